"""One headless instance from registration to its end: registers, loads, serves routers, drains, leaves."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from coordinator.addresses import interfaces, is_loopback, own, toward
from coordinator.config import endpoint
from coordinator.member_connection import MemberConnection, RegistrationRefused, StartupTimeout
from coordinator.messages import Load, Register, Settings, State
from coordinator.numerics import TORCH, Numerics
from coordinator.process import process
from coordinator.process.tracing import Tracing, TracingMissing
from coordinator.rpc.keys import MeshKeys, file_key
from coordinator.rpc.own_key import is_lasting
from engine.compute.trace import write_chrome_trace
from engine.config import InstanceConfig
from engine.config.kv_events import endpoint_of
from engine.core import EngineCore, ModelPlace
from engine.events.publisher import EventPublisher
from engine.events.recording import EventRecorder
from engine.executor import make_executor
from engine.executor_contract import Executor, WorkerLost
from engine.groups.stepping import NoGroup
from engine.groups.transport import transport_problem
from engine.host import deferred, memory
from engine.host.cache_size import TooLittleMemory, size_cache
from engine.host.cores import Share, instances_at_once, share_of_cores, tell_threads
from engine.inheritance.names import MEMORY_VARIABLE, PREDECESSOR_VARIABLE
from engine.model.checkpoint import ModelInfo
from engine.model.host_digest import host_digest
from engine.numerics import kind_problem, numerics_of
from engine.serving.server import Server
from engine.settings import adopt, ignored_when_joining, resolve
from engine.stats_line import StatsLine, drain_line
from engine.step import ModelFacts
from engine.step_watch import StepWatch, place_of
from engine.tiers.block_files import BlockFiles, file_bytes, folder_of
from engine.tiers.file_tier import FileTier
from engine.tiers.own_folders import NotOwn
from engine.transfers import checksums
from engine.transfers.block_memory import CacheMemory
from engine.transfers.identity import CacheFacts, identity_of
from engine.transfers.mover import LARGEST_BLOCK, BlockMover
from engine.transfers.pages_ahead import PagesAhead
from parallel.devices import cuda_devices, device_sharers

if TYPE_CHECKING:
    from engine.executor_contract import SpreadExecutor
    from engine.groups.spread import Spread
    from engine.inheritance.heir import Heir

logger = logging.getLogger(__name__)


class Ended(BaseException):
    """Raised to end the instance early; carries the exit status.

    A signal raises it wherever the code happens to be, and nobody on the way may take it for an error of
    their own, as libraries do with any Exception.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Instance:
    """One instance; its process does nothing else."""

    def __init__(self, config: InstanceConfig, keys: MeshKeys | None = None) -> None:
        self._mesh = config.mesh
        self._keys = keys
        self._config = config.engine
        self._log_level = config.log_level
        self._name = os.environ.get(process.INSTANCE_VARIABLE) or uuid.uuid4().hex[:12]
        self._executor: Executor | None = None
        self._server: Server | None = None
        self._place: tuple[int, int] | None = None
        """(rank, size) that chooses the experts to load first; None: not spread."""
        self._spread: Spread | None = None
        self._tier: FileTier | None = None
        self._inherits: Heir | None = None
        self._events: tuple[EventRecorder, EventPublisher] | None = None
        self._pages: PagesAhead | None = None
        self._watch: StepWatch | None = None
        """Where nobody else would miss the result of a step."""
        self._stats: StatsLine | None = None
        self._step_thread = threading.get_ident()
        self._serving = False
        self._settings: Settings | None = None
        self._numerics: Numerics | None = None
        self._rank = 0
        self._share = Share()
        self._stop_signals = 0
        self._told_to_drain = False
        """Whether an operator asked to drain, rather than a signal."""
        self._announced_draining = False

    def run(self) -> None:
        """Serve until asked to stop.

        Raises:
            Ended: it could not start, or may not go on.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop_signal)
        problem = None
        if not self._config.workers_elsewhere:
            problem = kind_problem(self._config.device) or transport_problem(self._config.device)
        if problem is not None:
            raise Ended(process.EXIT_USAGE, problem)
        settings = self._own_settings()
        membership = self._register(settings)
        try:
            info = self._settle(membership)
            self._serve(membership, info)
        finally:
            membership.leave()
        if membership.refusal is not None:
            raise Ended(process.EXIT_REFUSED, f"the mesh refused this instance: {membership.refusal}")

    # ---- joining

    def _own_settings(self) -> Settings | None:
        """Settings of the model from flags; None: they come from the mesh."""
        if self._config.model.model is None:
            ignored = ignored_when_joining(self._config)
            if ignored:
                logger.warning(
                    "%s ignored: without a MODEL of its own an instance takes them from the mesh",
                    ", ".join(ignored),
                )
            return None
        return resolve(self._config, self._mesh.data_parallel_size)[1]

    def _register(self, settings: Settings | None) -> MemberConnection:
        membership = MemberConnection(
            self._mesh.coordinator_endpoint,
            Register(
                instance=self._name,
                rank=self._mesh.data_parallel_start_rank,
                size=self._mesh.data_parallel_size,
                settings=settings,
                host=socket.gethostname(),
                pid=os.getpid(),
            ),
            self._load,
            self._keys,
            self._on_drain,
            self._config.cache.role,
        )
        membership.start()
        return membership

    def _settle(self, membership: MemberConnection) -> ModelInfo:
        """Wait for the coordinator, then take over what the mesh shares."""
        try:
            welcome = membership.wait_for_welcome(self._mesh.startup_timeout)
        except RegistrationRefused as error:
            raise Ended(process.EXIT_REFUSED, f"the coordinator refused this instance: {error}") from error
        except StartupTimeout as error:
            raise Ended(process.EXIT_FAILED, str(error)) from error
        if self._mesh.data_parallel_start_rank is None:
            process.set_up(f"Engine_{welcome.rank}", self._log_level)
        self._rank = welcome.rank
        logger.info("instance %d of the mesh at %s", welcome.rank, self._mesh.coordinator_endpoint)
        self._config = adopt(self._config, welcome.settings)
        if welcome.settings.enable_expert_parallel:
            from engine.groups.spread import first_share

            self._place = first_share(welcome.rank, welcome.settings)
        info, settings = resolve(self._config, welcome.settings.data_parallel_size)
        if settings.fingerprint != welcome.settings.fingerprint:
            raise Ended(
                process.EXIT_REFUSED,
                f"{info.directory} (fingerprint {settings.fingerprint}) is not the model of the mesh "
                f"({welcome.settings.model}, fingerprint {welcome.settings.fingerprint}): give MODEL",
            )
        self._settings = settings
        return info

    # ---- serving

    def _serve(self, membership: MemberConnection, info: ModelInfo) -> None:
        began = time.monotonic()
        self._share_cores(membership)
        if self._config.model.reads_weights and not self._config.workers_elsewhere:
            host_digest(Path(info.directory))  # workers of this host find it, or wait for it
        membership.update(phase="loading libraries")
        place = self._place
        tracing = self._tracing()
        with deferred.no_garbage():
            executor = self._executor = make_executor(
                self._config, info, self._share.threads, place, cores=self._share.cores, rank=self._rank,
                settings=self._settings, keys=self._keys,
                startup_timeout=process.PATIENCE * self._mesh.startup_timeout,
            )  # fmt: skip
        try:
            with deferred.no_garbage(leaves=True):
                facts = executor.load(lambda phase: membership.update(phase=phase))
            self._check_stopped()
            membership.update(phase="kv cache")
            self._share_memory(executor, facts)
            with self._turn(facts):
                num_blocks, max_model_len = self._size_cache(executor, facts, self._neighbours(membership))
                executor.allocate(num_blocks)
            self._tell_numerics(membership, info, executor)
            core = EngineCore(
                self._config,
                info,
                executor,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                place=ModelPlace(
                    has_gpu=facts.device != "cpu",
                    is_native=all(each.kernels != TORCH for each in executor.arithmetic()),
                    at_once=instances_at_once(self._config),
                ),
            )
            core.tracing = tracing
            if (drafts := self._config.scheduler.speculative) is not None:
                logger.info(
                    "speculative decoding: up to %d tokens of a request are looked up in its own text",
                    drafts.num_speculative_tokens,
                )
            membership.update(phase="tokenizer")
            core.grammars.prepare()
            self._server = Server(self._name, endpoint(self._listen_address(), 0), core, self._keys)
            self._publish_events(core)
            mover = self._move_blocks(core, executor, self._server)
            if not executor.has_workers and (kv := executor.block_memory()) is not None:
                self._pages = PagesAhead(kv)
            if place is None:
                membership.update(state=State.READY, phase="serving", address=self._server.endpoint)
                logger.info("ready on %s after %.1f s", self._server.endpoint, time.monotonic() - began)
            else:
                sharers = None if facts.device == "cpu" else device_sharers()
                self._spread = self._spread_experts(membership, executor, self._server, sharers)
                core.stepping = self._spread.stepping
                logger.info("loaded after %.1f s", time.monotonic() - began)
            if not executor.has_workers:
                device = self._config.device
                limit = device.step_timeout if place is None else device.lockstep_timeout
                self._watch = StepWatch(limit, self._mesh.startup_timeout)
            if not self._mesh.observability.disable_log_stats:
                self._stats = StatsLine(num_blocks, time.monotonic())
            self._serving = True
            self._check_stopped()
            try:
                self._server.run(lambda: self._on_step(membership, core))
                if not self._server.leaves_requests:
                    membership.leave()
                    self._server.await_readers()
                self._server.close()
                self._write_trace(executor)
            except NoGroup as error:
                raise Ended(process.EXIT_FAILED, str(error)) from error
            except WorkerLost as error:
                membership.leave()  # at once: the others need not wait until all is closed here
                self._server.close()  # and the end of the other workers takes a while
                raise Ended(process.EXIT_WORKER_LOST, f"lost a worker: {error}") from error
            finally:
                self._watch = None  # there are no turns any more
                if self._pages is not None:
                    self._pages.close()
                if self._tier is not None:
                    self._tier.close()
                if self._inherits is not None:
                    self._inherits.close()
                if self._events is not None:
                    self._tell_events()
                    self._events[1].close()
                if mover is not None:
                    mover.close()
                if self._spread is not None:
                    self._spread.close()
        finally:
            executor.close()
            if tracing is not None:
                tracing.close()

    def _share_memory(self, executor: Executor, facts: ModelFacts) -> None:
        """Have the KV cache in memory that outlives this process, if that is asked for."""
        predecessor, path = os.environ.get(PREDECESSOR_VARIABLE), os.environ.get(MEMORY_VARIABLE)
        if not self._config.cache.enable_kv_inheritance or path is None:
            return
        from engine.executor.uni import UniExecutor  # loads torch
        from engine.inheritance.shared_cache import SharedCache, release

        if predecessor is not None:
            with contextlib.suppress(OSError):  # it is gone, or just being read: serve closes it soon
                release(predecessor)
        if not isinstance(executor, UniExecutor) or facts.device != "cpu":
            logger.warning("--enable-kv-inheritance is not built for -tp, -pp and GPUs: nothing is inherited")
            return
        try:
            executor.shared = SharedCache(path)
        except OSError as error:
            logger.warning("the KV cache dies with this instance: %s: %s", path, error.strerror)

    def _heir(self, core: EngineCore, executor: Executor, memory: CacheMemory, identity: str) -> Heir | None:
        """Publish this cache's blocks, and copy those of dead instances."""
        if not self._config.cache.enable_kv_inheritance or self._server is None:
            return None
        from engine.executor.uni import UniExecutor
        from engine.inheritance.heir import Heir

        published = executor.published(identity) if isinstance(executor, UniExecutor) else None
        if published is None:
            return None
        core.sharing.publish_blocks(*published)
        logger.info("the KV cache outlives this instance")
        return Heir(memory, identity, self._server.wake, core.pool.kinds)

    def _turn(self, facts: ModelFacts) -> AbstractContextManager[None]:
        """Keeps others from measuring memory while this instance does, and takes its own."""
        if facts.device == "cpu":
            return memory.turn()
        return memory.turn(memory.DEVICE_TURN_TIMEOUT, cuda_devices())

    def _publish_events(self, core: EngineCore) -> None:
        """Publish changes of the prefix cache, if that is asked for."""
        config = self._config.cache.kv_events
        if config is None:
            return
        try:
            publisher = EventPublisher(config, self._rank)
        except ValueError as error:
            raise Ended(process.EXIT_USAGE, str(error)) from error
        publisher.start()
        self._events = core.sharing.record_events(), publisher
        where = endpoint_of(config.endpoint, self._rank)
        logger.info("KV events, with the tokens of prompts, are published at %s", where)

    def _tell_events(self) -> None:
        if self._events is not None and (events := self._events[0].take()):
            self._events[1].publish(events)

    def _move_blocks(self, core: EngineCore, executor: Executor, server: Server) -> BlockMover | None:
        """Lend KV blocks to other instances, and fetch theirs, where that can be done."""
        cache = self._config.cache
        memory = executor.block_memory()
        if memory is None and cache.kv_cache_dir is not None:
            raise Ended(process.EXIT_USAGE, "--kv-cache-dir needs a KV cache in reach: drop it")
        if (given := cache.kv_transfer) is not None and given.without_effect:
            names = ", ".join(given.without_effect)
            logger.info("KV blocks move in our own way: %s of --kv-transfer-config change nothing", names)
        if memory is None or not cache.enable_prefix_caching or not cache.enable_kv_transfer:
            return None
        assert self._settings is not None
        assert self._numerics is not None
        if memory.block_bytes > LARGEST_BLOCK:
            logger.warning("KV blocks of %d bytes are too large to be moved", memory.block_bytes)
            return None
        facts = CacheFacts(
            numerics=self._numerics.fingerprint,
            dtype=self._settings.dtype,
            block_size=cache.block_size,
            layout=memory.layout,
            shards=memory.shards,
            tensor_parallel_size=self._config.device.tensor_parallel_size,
            pipeline_parallel_size=self._config.device.pipeline_parallel_size,
            weights=self._numerics.weights,
        )
        identity = identity_of(facts)
        checksums.begin_build()
        tier = self._tier = self._file_tier(core, memory, identity, server.wake)
        mover = BlockMover(
            memory, identity, endpoint(self._listen_address(), 0), self._keys, server.wake, core.pool.kinds
        )
        mover.start()
        self._inherits = self._heir(core, executor, memory, identity)
        core.sharing.exchange_blocks(
            mover,
            address=mover.address,
            identity=identity,
            token_bytes=memory.block_bytes / cache.block_size,
            checks=self._numerics.invariant,
            tier=tier,
            heir=self._inherits,
        )
        logger.info("KV blocks are lent at %s (cache %s)", mover.address, identity)
        return mover

    def _file_tier(
        self, core: EngineCore, memory: CacheMemory, identity: str, wake: Callable[[], None]
    ) -> FileTier | None:
        """Keep blocks in files, too, if that is asked for."""
        cache, settings, numerics = self._config.cache, self._settings, self._numerics
        if cache.kv_cache_dir is None:
            return None
        assert settings is not None
        assert numerics is not None
        root = Path(cache.kv_cache_dir)
        folder = folder_of(Path(settings.model).name, numerics.fingerprint, identity)
        key = file_key(self._keys) if self._keys is not None and is_lasting(self._mesh) else None
        files = BlockFiles(root, folder, identity, key)
        if file_bytes(memory.block_bytes) > cache.kv_cache_dir_size:
            raise Ended(process.EXIT_USAGE, "--kv-cache-dir-size is less than one KV block: give more")
        tier = FileTier(core.pool, memory, files, cache.kv_cache_dir_size, wake)
        try:
            tier.start()
        except NotOwn as error:
            text = f"--kv-cache-dir {root}: {error.filename} {error.strerror}, or give another directory"
            raise Ended(process.EXIT_USAGE, text) from error
        except OSError as error:
            text = f"--kv-cache-dir {root}: {error.strerror}: give a directory that can be written to"
            raise Ended(process.EXIT_USAGE, text) from error
        logger.info("KV blocks are kept in files: %r", tier)
        return tier

    def _tell_numerics(self, membership: MemberConnection, info: ModelInfo, executor: Executor) -> None:
        assert self._settings is not None
        numerics = numerics_of(self._settings, self._config.model, info.directory, executor.arithmetic())
        invariant = "invariant" if numerics.invariant else "variant: bits depend on what runs beside"
        logger.info("numerics class %s, %s", numerics, invariant)
        self._numerics = numerics
        membership.update(numerics=numerics)

    def _tracing(self) -> Tracing | None:
        wanted = self._mesh.observability.otlp_traces_endpoint
        try:
            return None if wanted is None else Tracing(wanted, f"engine-{self._rank}")
        except TracingMissing as error:
            raise Ended(process.EXIT_USAGE, str(error)) from error

    def _write_trace(self, executor: Executor) -> None:
        if self._config.device.trace is None:
            return
        asked = Path(self._config.device.trace)
        path = asked.with_name(f"{asked.stem}.{self._rank}{asked.suffix or '.json'}")
        try:
            logger.info("%s: %s", path, write_chrome_trace(path, executor.spans()))
        except OSError as error:
            logger.error("the trace could not be written: %s", error)

    def _spread_experts(
        self, membership: MemberConnection, executor: Executor, server: Server, sharers: int | None
    ) -> Spread:
        from engine.groups.rendezvous import Rendezvous  # loads torch.distributed
        from engine.groups.spread import Spread

        device = self._config.device
        return Spread(
            membership,
            cast("SpreadExecutor", executor),
            Rendezvous(self._name, self._listen_address(), device, self._keys),
            server,
            device.eplb,
            startup_timeout=self._mesh.startup_timeout,
            sharers=sharers,
        )

    def _on_step(self, membership: MemberConnection, core: EngineCore) -> None:
        """Between two steps: handle signals and messages of the coordinator."""
        self._share_cores(membership)
        self._tell_events()
        if self._stats is not None and self._stats.is_due(now := time.monotonic()):
            line = self._stats.line(core.scheduler.counters(), core.reports.snapshot, now)
            if line is not None:
                logger.info("%s", line)
        if self._spread is not None:
            self._spread.drains = self._drains
            self._spread.look()
        if self._executor is not None:
            self._executor.check()
        if self._pages is not None:
            self._pages.used(core.pool.num_touched)
        if membership.refusal is not None and self._server is not None:
            self._server.leave()
        elif self._drains and not self._announced_draining:
            self._announced_draining = True
            seconds = self._server.drain_time_left if self._server else 0.0
            logger.info("%s", drain_line(core.reports.snapshot, seconds))
            membership.update(state=State.DRAINING, phase="draining")

    def _size_cache(self, executor: Executor, facts: ModelFacts, neighbours: int) -> tuple[int, int]:
        try:
            return size_cache(self._config, facts, executor.free_kv_memory, neighbours)
        except TooLittleMemory as error:
            raise Ended(process.EXIT_FAILED, str(error)) from error

    def _neighbours(self, membership: MemberConnection) -> int:
        """Instances on this host, this one included."""
        if self._server is not None or not self._config.num_local_workers:
            return membership.neighbours
        return max(membership.neighbours, self._mesh.instances_here)  # some may not have registered yet

    def _share_cores(self, membership: MemberConnection) -> None:
        """Take as many threads as are this instance's by now: others come and go."""
        config = self._config
        if not config.num_local_workers:
            return  # Ray's nodes have cores of their own
        sharers = self._neighbours(membership)
        share = share_of_cores(config.num_local_workers, config.device.cpu_threads, sharers)
        if share == self._share:
            return
        if share.threads != self._share.threads:
            tell_threads(config, share, sharers)
        self._share = share
        if self._executor is not None:
            self._executor.set_threads(*share)

    def _listen_address(self) -> str:
        """An address that routers elsewhere can reach: given, or of the way to the coordinator."""
        if self._mesh.instance_address is not None:
            return own("--instance-address", self._mesh.instance_address)
        target = self._mesh.data_parallel_address
        if is_loopback(target):
            return "127.0.0.1"
        address = toward(target, self._mesh.data_parallel_rpc_port)
        others = [str(each) for each in interfaces() if each.address != address]
        if others and self._server is None:
            logger.info(
                "listens on %s, the way to the coordinator; --instance-address chooses another (%s)",
                address,
                ", ".join(others),
            )
        return address

    def _load(self) -> Load:
        """Load for each sign of life; called by the membership's thread."""
        if self._server is None:
            return Load()
        if self._watch is not None:
            hung = self._watch.look(self._server.turn, self._server.num_steps, time.monotonic())
            if hung is not None:
                self._end_hung(hung)
        return msgspec.structs.replace(
            self._server.load_meter.load(), refused_peers=self._server.refused_peers
        )

    # ---- the end

    @property
    def _drains(self) -> bool:
        return self._told_to_drain or self._stop_signals > 0

    def _end_hung(self, seconds: float) -> NoReturn:
        """The thread that would end this process in order does not come back."""
        logger.error(
            "a step has not ended after %.0f s (--execute-model-timeout): it hangs in %s. This instance "
            "ends; routers resume its requests on others",
            seconds,
            place_of(self._step_thread),
        )
        logging.shutdown()
        os._exit(process.EXIT_HUNG)

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        """First signal: drain, which an operator's wish may have begun.

        Second: drop what is left. While loading: end at once.
        """
        self._stop_signals += 1
        if self._server is None or not self._serving:
            status = process.EXIT_INTERRUPTED if number == signal.SIGINT else 0
            raise Ended(status, "asked to stop before it was ready")
        if self._stop_signals > 1:
            self._server.leave()
        else:
            left = self._server.drain_time_left if self._told_to_drain else math.inf
            self._server.drain(min(self._config.drain_timeout, left))

    def _on_drain(self, timeout: float | None) -> None:
        """An operator's wish, passed on by the coordinator; called by the membership thread."""
        if self._server is None or not self._serving:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not self._stop_signals:
            self._server.drain(self._config.drain_timeout if timeout is None else timeout)
        self._told_to_drain = True

    def _check_stopped(self) -> None:
        if self._stop_signals:
            raise Ended(0, "asked to stop before it was ready")
