"""Services around an instance's KV cache: transfers, files, inheritance, events, pages ahead."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.config import MeshConfig, endpoint
from coordinator.messages import Settings
from coordinator.numerics import Numerics
from coordinator.process import process
from coordinator.rpc.keys import MeshKeys, file_key
from coordinator.rpc.own_key import is_lasting
from engine.config import EngineConfig
from engine.config.kv_events import endpoint_of
from engine.core import EngineCore
from engine.events.publisher import EventPublisher
from engine.events.recording import EventRecorder
from engine.executor_contract import Executor
from engine.inheritance.names import MEMORY_VARIABLE, PREDECESSOR_VARIABLE
from engine.lifecycle.ended import InstanceEnded
from engine.tiers.block_files import BlockFiles, file_bytes, folder_of
from engine.tiers.file_tier import FileTier
from engine.tiers.own_folders import NotOwn
from engine.transfers import checksums
from engine.transfers.block_memory import CacheMemory
from engine.transfers.identity import CacheFacts, identity_of
from engine.transfers.mover import BlockMover
from engine.transfers.pages_ahead import PagesAhead

if TYPE_CHECKING:
    from engine.inheritance.heir import Heir

logger = logging.getLogger(__name__)


def share_memory(executor: Executor, device: str) -> None:
    """Put the KV cache into memory that outlives this process, where ``serve`` has given some."""
    predecessor, path = os.environ.get(PREDECESSOR_VARIABLE), os.environ.get(MEMORY_VARIABLE)
    if path is None:
        return
    from engine.executor.uni import UniExecutor  # loads torch
    from engine.inheritance.shared_cache import SharedCache, release

    if predecessor is not None:
        with contextlib.suppress(OSError):  # it is gone, or just being read: serve closes it soon
            release(predecessor)
    if not isinstance(executor, UniExecutor) or device != "cpu":
        logger.warning("--enable-kv-inheritance is not built for -tp, -pp and GPUs: nothing is inherited")
        return
    try:
        executor.shared = SharedCache(path)
    except OSError as error:
        logger.warning("the KV cache is lost when this instance ends: %s: %s", path, error.strerror)


class CacheServices:
    """Threads and sockets that move, keep and publish KV blocks beside the steps."""

    def __init__(
        self,
        config: EngineConfig,
        mesh: MeshConfig,
        settings: Settings,
        numerics: Numerics,
        rank: int,
        host: str,
        keys: MeshKeys | None,
    ) -> None:
        """``host``: an address at which other instances reach this one."""
        self._config = config
        self._mesh = mesh
        self._settings = settings
        self._numerics = numerics
        self._rank = rank
        self._host = host
        self._keys = keys
        self._events: tuple[EventRecorder, EventPublisher] | None = None
        self._tier: FileTier | None = None
        self._heir: Heir | None = None
        self._mover: BlockMover | None = None
        self._pages: PagesAhead | None = None

    def __repr__(self) -> str:
        return f"<CacheServices {self._mover!r} {self._tier!r} {self._heir!r}>"

    def start(self, core: EngineCore, executor: Executor, wake: Callable[[], None]) -> None:
        """Start the services that are asked for; ``wake`` ends the step loop's sleep.

        Raises:
            InstanceEnded: a flag asks for something that cannot be had here.
        """
        self._publish_events(core)
        self._move_blocks(core, executor, wake)
        if not executor.has_workers and (memory := executor.block_memory()) is not None:
            self._pages = PagesAhead(memory)

    def look(self, core: EngineCore) -> None:
        """Between two steps: publish events, and touch pages before blocks need them."""
        self._tell_events()
        if self._pages is not None:
            self._pages.used(core.pool.num_touched)

    def close(self) -> None:
        """End all services; no step follows."""
        for service in (self._pages, self._tier, self._heir):
            if service is not None:
                service.close()
        if self._events is not None:
            self._tell_events()
            self._events[1].close()
        if self._mover is not None:
            self._mover.close()

    def _publish_events(self, core: EngineCore) -> None:
        """Publish changes of the prefix cache, if that is asked for."""
        config = self._config.cache.kv_events
        if config is None:
            return
        try:
            publisher = EventPublisher(config, self._rank)
        except ValueError as error:
            raise InstanceEnded(process.EXIT_USAGE, str(error)) from error
        publisher.start()
        self._events = core.sharing.record_events(core.admission.adapters), publisher
        where = endpoint_of(config.endpoint, self._rank)
        logger.info("KV events, with the tokens of prompts, are published at %s", where)

    def _tell_events(self) -> None:
        if self._events is not None and (events := self._events[0].take()):
            self._events[1].publish(events)

    def _move_blocks(self, core: EngineCore, executor: Executor, wake: Callable[[], None]) -> None:
        """Lend KV blocks to other instances, and fetch theirs, where that can be done."""
        cache = self._config.cache
        memory = executor.block_memory()
        if memory is None and cache.kv_cache_dir is not None:
            text = (
                "--kv-cache-dir needs a KV cache of one process, or of workers on this host's CPUs: drop it"
            )
            raise InstanceEnded(process.EXIT_USAGE, text)
        if (given := cache.kv_transfer) is not None and given.without_effect:
            names = ", ".join(given.without_effect)
            logger.info("KV blocks move in our own way: %s of --kv-transfer-config change nothing", names)
        if memory is None or not cache.moves_blocks:
            return
        kinds = [(kind.label, kind.grid, kind.form) for kind in core.pool.kinds.boundaries]
        facts = CacheFacts(
            numerics=self._numerics.fingerprint,
            dtype=self._settings.dtype,
            block_size=cache.block_size,
            layout=memory.layout,
            shards=memory.shards,
            tensor_parallel_size=self._config.device.tensor_parallel_size,
            pipeline_parallel_size=self._config.device.pipeline_parallel_size,
            weights=self._numerics.weights,
            boundaries=kinds or msgspec.UNSET,
        )
        identity = identity_of(facts)
        checksums.begin_build()
        self._tier = self._file_tier(core, memory, identity, wake)
        mover = BlockMover(memory, identity, endpoint(self._host, 0), self._keys, wake, core.pool.kinds)
        mover.start()
        self._mover = mover
        self._heir = self._inherit(core, executor, memory, identity, wake)
        core.sharing.exchange_blocks(
            mover,
            address=mover.address,
            identity=identity,
            token_bytes=memory.block_bytes / cache.block_size,
            end_bytes=sum(memory.bytes_of(end - 1) for end in core.pool.kinds.ends[1:]),
            checks=self._numerics.invariant,
            check_interval=cache.cache_check_interval,
            tier=self._tier,
            heir=self._heir,
        )
        logger.info("KV blocks are lent at %s (cache %s)", mover.address, identity)

    def _file_tier(
        self, core: EngineCore, memory: CacheMemory, identity: str, wake: Callable[[], None]
    ) -> FileTier | None:
        """Keep blocks in files, too, if that is asked for."""
        cache, settings, numerics = self._config.cache, self._settings, self._numerics
        if cache.kv_cache_dir is None:
            return None
        root = Path(cache.kv_cache_dir)
        folder = folder_of(Path(settings.model).name, numerics.fingerprint, identity)
        key = file_key(self._keys) if self._keys is not None and is_lasting(self._mesh) else None
        files = BlockFiles(root, folder, identity, key)
        largest = max(memory.bytes_of(end - 1) for end in core.pool.kinds.ends)
        if file_bytes(largest) > cache.kv_cache_dir_size:
            what = "KV block" if largest == memory.block_bytes else "state of a request"
            raise InstanceEnded(process.EXIT_USAGE, f"--kv-cache-dir-size is less than one {what}: give more")
        tier = FileTier(core.pool, memory, files, cache.kv_cache_dir_size, wake)
        try:
            tier.start()
        except NotOwn as error:
            text = f"--kv-cache-dir {root}: {error.filename} {error.strerror}, or give another directory"
            raise InstanceEnded(process.EXIT_USAGE, text) from error
        except OSError as error:
            text = f"--kv-cache-dir {root}: {error.strerror}: give a directory that can be written to"
            raise InstanceEnded(process.EXIT_USAGE, text) from error
        logger.info("KV blocks are kept in files: %r", tier)
        return tier

    def _inherit(
        self,
        core: EngineCore,
        executor: Executor,
        memory: CacheMemory,
        identity: str,
        wake: Callable[[], None],
    ) -> Heir | None:
        """Publish this cache's blocks, and copy those of dead instances."""
        if not self._config.cache.enable_kv_inheritance:
            return None
        from engine.executor.uni import UniExecutor
        from engine.inheritance.heir import Heir

        published = executor.published(identity) if isinstance(executor, UniExecutor) else None
        if published is None:
            return None
        core.sharing.publish_blocks(*published)
        logger.info("the KV cache is in shared memory, for other instances here after a death")
        return Heir(memory, identity, wake, core.pool.kinds)
