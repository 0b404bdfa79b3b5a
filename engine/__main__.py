"""``python -m engine``: one headless instance. Registers, loads, serves routers, drains, leaves."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid

from coordinator import process
from coordinator.client import Membership, RegistrationRefused, StartupTimeout
from coordinator.config import endpoint, is_loopback
from coordinator.flags import parse
from coordinator.messages import Load, Register, Settings, State
from coordinator.rpc import PortInUse
from engine.checkpoint import CheckpointError, ModelInfo
from engine.config import InstanceConfig
from engine.core import EngineCore
from engine.executor import make_executor
from engine.executor.base import Executor
from engine.pace import Pace
from engine.server import Server
from engine.settings import adopt, ignored_when_joining, resolve
from engine.step import ModelFacts
from parallel.communicators.base import CollectiveError
from parallel.topology import threads_per_worker, usable_cores

logger = logging.getLogger("engine")


class Ended(Exception):
    """The instance ends early; carries the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Instance:
    """One instance from registration to its end."""

    def __init__(self, config: InstanceConfig) -> None:
        self._mesh = config.mesh
        self._config = config.engine
        self._log_level = config.log_level
        self._name = uuid.uuid4().hex[:12]
        self._executor: Executor | None = None
        self._server: Server | None = None
        self._place: tuple[int, int] | None = None
        """(rank, size) among the instances over which experts are spread; None if they are not."""
        self._serving = False
        self._threads = 0
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
        logger.info("instance %d of the mesh at %s", welcome.rank, self._mesh.coordinator_endpoint)
        self._config = adopt(self._config, welcome.settings)
        if welcome.settings.enable_expert_parallel:
            self._place = (welcome.rank, welcome.settings.data_parallel_size)
        info, settings = resolve(self._config, welcome.settings.data_parallel_size)
        if settings.fingerprint != welcome.settings.fingerprint:
            raise Ended(
                process.EXIT_REFUSED,
                f"{info.directory} (fingerprint {settings.fingerprint}) is not the model of the mesh "
                f"({welcome.settings.model}, fingerprint {welcome.settings.fingerprint}): give MODEL",
            )
        return info

    # ---- serving

    def _serve(self, membership: Membership, info: ModelInfo) -> None:
        began = time.monotonic()
        self._share_cores(membership)
        membership.update(phase="loading libraries")
        place = self._place
        executor = self._executor = make_executor(self._config, info, self._threads, place)
        try:
            facts = executor.load(lambda phase: membership.update(phase=phase))
            self._check_stopped()
            num_blocks, max_model_len = self._size_cache(executor, facts, membership.neighbours)
            membership.update(phase="kv cache")
            executor.allocate(num_blocks)
            core = EngineCore(
                self._config, info, executor, num_blocks=num_blocks, max_model_len=max_model_len
            )
            self._server = Server(self._name, endpoint(self._listen_address(), 0), core)
            if place is not None:
                core.pace = self._join_group(membership, executor, place, self._server.endpoint)
            membership.update(state=State.READY, phase="serving", address=self._server.endpoint)
            logger.info("ready on %s after %.1f s", self._server.endpoint, time.monotonic() - began)
            self._serving = True
            self._check_stopped()
            try:
                self._server.run(lambda: self._on_step(membership))
            except CollectiveError as error:
                self._on_lost_group(error)
            finally:
                core.pace.close()
        finally:
            executor.close()

    def _join_group(
        self, membership: Membership, executor: Executor, place: tuple[int, int], address: str
    ) -> Pace:
        """Wait until all instances have their experts, then form the group of their epoch."""
        from engine.pace import InLockstep
        from parallel import groups  # loads torch.distributed

        rank, size = place
        timeout = self._config.device.collective_timeout
        host = self._listen_address()
        store = groups.open_store(host, None, is_host=True, timeout=timeout) if rank == 0 else None
        membership.update(
            state=State.LOADED,
            phase="waits for the other instances",
            address=address,
            store=f"{host}:{store.port}" if store is not None else "",
        )
        form = membership.wait_for_group(self._mesh.startup_timeout)
        if store is None:
            store_host, _, port = form.store.rpartition(":")
            store = groups.open_store(store_host, int(port), is_host=False, timeout=timeout)
        try:
            backend = groups.choose_backend(
                self._config.device.all2all_backend, [peer.host for peer in form.peers]
            )
            group = groups.form(store, form.epoch, rank, size, backend, timeout, host=host)
        except (ValueError, CollectiveError) as error:
            raise Ended(
                process.EXIT_FAILED, f"the group of epoch {form.epoch} cannot form: {error}"
            ) from error
        executor.join(group)
        logger.info("epoch %d: %d instances in lockstep over %s", form.epoch, size, backend)
        peers = [peer.address for peer in form.peers if peer.rank != rank]
        return InLockstep(group, form.epoch, peers)

    def _on_lost_group(self, error: CollectiveError) -> None:
        """A peer is gone, and with it its experts. Its requests go on elsewhere if they can."""
        if self._stop_signals:
            logger.info("the group ended: %s", error)
            return
        raise Ended(process.EXIT_FAILED, f"lost the lockstep group: {error}")

    def _on_step(self, membership: Membership) -> None:
        """Between two steps: pass on what signals and the coordinator said meanwhile."""
        self._share_cores(membership)
        if membership.refusal is not None and self._server is not None:
            self._server.drain(0.0)
        elif self._stop_signals and not self._announced_draining:
            self._announced_draining = True
            logger.info("draining for at most %.0f s", self._config.drain_timeout)
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
        sharers = membership.neighbours
        if self._server is None:  # others may not have registered yet
            sharers = max(sharers, self._mesh.instances_here)
        threads = self._config.device.cpu_threads or threads_per_worker(sharers, usable_cores())
        if threads != self._threads:
            self._threads = threads
            logger.info("computes with %d thread%s", threads, "s" * (threads > 1))
            if self._executor is not None:
                self._executor.set_threads(threads)

    def _listen_address(self) -> str:
        """An address that routers elsewhere can reach: given, or of the way to the coordinator."""
        if self._mesh.instance_address is not None:
            return self._mesh.instance_address
        target = self._mesh.data_parallel_address
        if is_loopback(target):
            return "127.0.0.1"
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, self._mesh.data_parallel_rpc_port))
            return str(probe.getsockname()[0])

    def _load(self) -> Load:
        return self._server.progress.load() if self._server is not None else Load()

    # ---- the end

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        """First signal: drain. Second: drop what is left. While loading: end at once."""
        self._stop_signals += 1
        if self._server is None or not self._serving:
            raise Ended(0, "told to stop before it was ready")
        self._server.drain(self._config.drain_timeout if self._stop_signals == 1 else 0.0)

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
    process.set_up("Engine" if rank is None else f"Engine_{rank}", config.log_level)
    try:
        Instance(config).run()
    except Ended as ended:
        logger.log(logging.ERROR if ended.status else logging.INFO, "%s", ended)
        return ended.status
    except (CheckpointError, PortInUse) as error:
        logger.error("%s", error)
        return process.EXIT_FAILED
    except MemoryError:
        logger.error("out of memory: lower --kv-cache-memory-bytes or --max-num-batched-tokens")
        return process.EXIT_FAILED
    logger.info("ends")
    return 0


if __name__ == "__main__":
    sys.exit(main())
