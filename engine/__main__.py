"""``python -m engine``: one headless instance. Registers, loads, serves routers, drains, leaves."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from coordinator import process
from coordinator.addresses import AddressError, interfaces, is_loopback, own, toward
from coordinator.client import Membership, RegistrationRefused, StartupTimeout
from coordinator.config import endpoint
from coordinator.flags import parse
from coordinator.keys import MeshKeys
from coordinator.messages import Load, Register, Settings, State
from coordinator.rpc import PortInUse
from coordinator.tracing import Tracing, TracingMissing
from engine import deferred
from engine.checkpoint import CheckpointError, ModelInfo
from engine.config import InstanceConfig
from engine.core import EngineCore
from engine.executor import make_executor
from engine.executor.base import CannotStart, Executor, WorkerLost
from engine.pace import NoGroup
from engine.server import Server
from engine.settings import adopt, has_gpu, ignored_when_joining, resolve
from engine.step import ModelFacts
from engine.trace import write_chrome_trace
from parallel.topology import threads_per_worker, usable_cores

if TYPE_CHECKING:
    from engine.executor.base import SpreadExecutor
    from engine.spread import Spread

logger = logging.getLogger("engine")


class Ended(Exception):
    """The instance ends early; carries the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Instance:
    """One instance from registration to its end."""

    def __init__(self, config: InstanceConfig, keys: MeshKeys | None = None) -> None:
        self._mesh = config.mesh
        self._keys = keys
        self._config = config.engine
        self._log_level = config.log_level
        self._name = os.environ.get(process.INSTANCE_VARIABLE) or uuid.uuid4().hex[:12]
        self._executor: Executor | None = None
        self._server: Server | None = None
        self._place: tuple[int, int] | None = None
        """(rank, size) by which the experts to load first are chosen; None if they are not spread."""
        self._spread: Spread | None = None
        self._serving = False
        self._settings: Settings | None = None
        self._rank = 0
        self._threads = 0
        self._cores: list[int] = []
        """Those that no other instance computes on, if there are any."""
        self._stop_signals = 0
        self._announced_draining = False

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            Ended: it could not start, or may not go on.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop_signal)
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
        """What this instance was told about the model; None to learn it from the mesh."""
        if self._config.model.model is None:
            ignored = ignored_when_joining(self._config)
            if ignored:
                logger.warning(
                    "%s ignored: without a MODEL of its own an instance takes them from the mesh",
                    ", ".join(ignored),
                )
            return None
        return resolve(self._config, self._mesh.data_parallel_size)[1]

    def _register(self, settings: Settings | None) -> Membership:
        membership = Membership(
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
        )
        membership.start()
        return membership

    def _settle(self, membership: Membership) -> ModelInfo:
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
            from engine.spread import first_share

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

    def _serve(self, membership: Membership, info: ModelInfo) -> None:
        began = time.monotonic()
        self._share_cores(membership)
        membership.update(phase="loading libraries")
        place = self._place
        tracing = self._tracing()
        with deferred.no_garbage():
            executor = self._executor = make_executor(
                self._config, info, self._threads, place, cores=self._cores, rank=self._rank,
                settings=self._settings, keys=self._keys,
                startup_timeout=process.PATIENCE * self._mesh.startup_timeout,
            )  # fmt: skip
        try:
            with deferred.no_garbage(leaves=True):
                facts = executor.load(lambda phase: membership.update(phase=phase))
            self._check_stopped()
            num_blocks, max_model_len = self._size_cache(executor, facts, membership.neighbours)
            membership.update(phase="kv cache")
            executor.allocate(num_blocks)
            core = EngineCore(
                self._config,
                info,
                executor,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                tracing=tracing,
                at_once=self._at_once(),
            )
            membership.update(phase="tokenizer")
            core.grammars.prepare()
            self._server = Server(self._name, endpoint(self._listen_address(), 0), core, self._keys)
            if place is None:
                membership.update(state=State.READY, phase="serving", address=self._server.endpoint)
                logger.info("ready on %s after %.1f s", self._server.endpoint, time.monotonic() - began)
            else:
                self._spread = self._spread_experts(membership, executor, self._server)
                core.pace = self._spread.pace
                logger.info("loaded after %.1f s", time.monotonic() - began)
            self._serving = True
            self._check_stopped()
            try:
                self._server.run(lambda: self._on_step(membership))
                self._write_trace(executor)
            except NoGroup as error:
                raise Ended(process.EXIT_FAILED, str(error)) from error
            except WorkerLost as error:
                membership.leave()  # at once: the others need not wait until all is closed here
                self._server.close()  # and the end of the other workers takes a while
                raise Ended(process.EXIT_WORKER_LOST, f"lost a worker: {error}") from error
            finally:
                if self._spread is not None:
                    self._spread.close()
        finally:
            executor.close()
            if tracing is not None:
                tracing.close()

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

    def _spread_experts(self, membership: Membership, executor: Executor, server: Server) -> Spread:
        from engine.spread import Spread  # loads torch.distributed

        return Spread(
            self._name,
            membership,
            cast("SpreadExecutor", executor),
            server,
            host=self._listen_address(),
            device=self._config.device,
            startup_timeout=self._mesh.startup_timeout,
            keys=self._keys,
        )

    def _on_step(self, membership: Membership) -> None:
        """Between two steps: pass on what signals and the coordinator said meanwhile."""
        self._share_cores(membership)
        if self._spread is not None:
            self._spread.drains = self._stop_signals > 0
            self._spread.look()
        if self._executor is not None:
            self._executor.check()
        if membership.refusal is not None and self._server is not None:
            self._server.drain(0.0)
        elif self._stop_signals and not self._announced_draining:
            self._announced_draining = True
            logger.info("draining for at most %.0f s", self._server.drain_time_left if self._server else 0.0)
            membership.update(state=State.DRAINING, phase="draining")

    def _size_cache(self, executor: Executor, facts: ModelFacts, neighbours: int) -> tuple[int, int]:
        """Number of KV blocks, and the context length that they allow. Neighbours share a host's memory."""
        cache, kv = self._config.cache, facts.kv
        block_bytes = kv.bytes_per_token * cache.block_size
        asked_len = self._config.model.max_model_len
        assert asked_len is not None
        if cache.num_gpu_blocks_override is not None:
            num_blocks = cache.num_gpu_blocks_override
        else:
            sharers = neighbours if facts.device == "cpu" else 1
            memory = cache.kv_cache_memory_bytes or executor.free_kv_memory() // sharers
            useful = -(-asked_len // cache.block_size) * self._config.scheduler.max_num_seqs
            num_blocks = min(memory // block_bytes, useful)
            if num_blocks < 1:
                raise Ended(
                    process.EXIT_FAILED,
                    f"{_bytes(memory)} for the KV cache is too little for one block of "
                    f"{cache.block_size} tokens ({_bytes(block_bytes)}): raise "
                    "--kv-cache-memory-bytes or --gpu-memory-utilization, or lower --block-size",
                )
        capacity = num_blocks * cache.block_size
        logger.info(
            "%s, %.1f M parameters, %.1f MiB of weights in %s on %s",
            facts.architecture, facts.num_parameters / 1e6, facts.weight_bytes / 2**20, facts.dtype,
            facts.device,
        )  # fmt: skip
        logger.info(
            "# KV blocks: %d, %d tokens (%.1f MiB); %.2fx the context of %d tokens",
            num_blocks, capacity, num_blocks * block_bytes / 2**20, capacity / asked_len, asked_len,
        )  # fmt: skip
        if capacity < asked_len:
            logger.warning(
                "the KV cache holds %d tokens, less than the context of %d: longer requests are refused; "
                "raise --kv-cache-memory-bytes or lower --max-model-len",
                capacity, asked_len,
            )  # fmt: skip
        return num_blocks, min(asked_len, capacity)

    def _share_cores(self, membership: Membership) -> None:
        """Compute threads: as asked, or this host's cores divided by the instances on it, which come and
        go. More threads than cores would make every step tens of times slower."""
        if not self._config.num_local_workers:
            return  # Ray's nodes have cores of their own
        sharers = membership.neighbours
        if self._server is None:  # others may not have registered yet
            sharers = max(sharers, self._mesh.instances_here)
        workers, given = self._config.num_local_workers, self._config.device.cpu_threads
        every_core = sorted(os.sched_getaffinity(0))
        threads = threads_per_worker(workers if given else sharers * workers, given or len(every_core))
        cores = every_core if sharers == 1 else []
        if (threads, cores) != (self._threads, self._cores):
            if threads != self._threads:
                each = f" in each of {workers} workers" if workers > 1 else ""
                logger.info("computes with %d thread%s%s", threads, "s" * (threads > 1), each)
                self._warn_of_crowding(sharers * workers, len(every_core))
            self._threads, self._cores = threads, cores
            if self._executor is not None:
                self._executor.set_threads(threads, cores)

    def _at_once(self) -> float | None:
        """Instances like this one for which this host's cores suffice; None if it has devices of its own."""
        workers, device = self._config.num_local_workers, self._config.device
        if not workers or has_gpu(device):
            return None
        return usable_cores() / max(workers, device.cpu_threads)

    def _warn_of_crowding(self, workers: int, cores: int) -> None:
        if self._config.num_local_workers > 1 and workers > cores and self._config.device.device != "cuda":
            logger.warning(
                "%d workers share the %d core%s of this host: expect each step to take longer than with "
                "fewer (lower -tp or -pp, or run fewer instances here)",
                workers, cores, "s" * (cores > 1),
            )  # fmt: skip

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
        if self._server is None:
            return Load()
        return msgspec.structs.replace(self._server.progress.load(), refused_peers=self._server.refused_peers)

    # ---- the end

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        """First signal: drain. Second: drop what is left. While loading: end at once."""
        self._stop_signals += 1
        if self._server is None or not self._serving:
            raise Ended(0, "told to stop before it was ready")
        self._server.drain(self._config.drain_timeout if self._stop_signals == 1 else 0.0)

    def _on_drain(self, timeout: float | None) -> None:
        """An operator's wish, passed on by the coordinator; called by the membership thread."""
        if self._server is None or not self._serving:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._server.drain(self._config.drain_timeout if timeout is None else timeout)
        self._stop_signals = max(1, self._stop_signals)

    def _check_stopped(self) -> None:
        if self._stop_signals:
            raise Ended(0, "told to stop before it was ready")


def _bytes(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def main(argv: list[str] | None = None) -> int:
    config = parse(
        InstanceConfig,
        sys.argv[1:] if argv is None else argv,
        prog="python -m engine",
        description="One headless instance of a Lockstep mesh.",
    )
    rank = config.mesh.data_parallel_start_rank
    process.set_up(
        "Engine" if rank is None else f"Engine_{rank}", config.log_level, config.mesh.observability.log_format
    )
    keys = process.mesh_keys(config.mesh, "python -m engine")
    process.warn_if_open(config.mesh)
    try:
        Instance(config, keys).run()
    except Ended as ended:
        logger.log(logging.ERROR if ended.status else logging.INFO, "%s", ended)
        return ended.status
    except WorkerLost as error:
        logger.error("lost a worker while starting: %s", error)
        return process.EXIT_WORKER_LOST
    except (CheckpointError, CannotStart, PortInUse, AddressError) as error:
        logger.error("%s", error)
        return process.EXIT_FAILED
    except ImportError as error:
        logger.error("a library cannot be loaded: %s; lockstep doctor looks at the installation", error)
        return process.EXIT_FAILED
    except MemoryError:
        logger.error("out of memory: leave less room for the KV cache, or lower --max-num-batched-tokens")
        return process.EXIT_FAILED
    logger.info("ends")
    return 0


if __name__ == "__main__":
    deferred.trim()
    process.finish(main())
