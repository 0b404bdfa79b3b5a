"""Process of one instance: registers, loads the model, serves routers, drains, leaves."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from coordinator.config import endpoint
from coordinator.member_connection import MemberConnection, RegistrationRefused, StartupTimeout
from coordinator.messages import Load, Register, Settings, State, WeightVersion
from coordinator.numerics import TORCH, Numerics
from coordinator.process import process
from coordinator.process.tracing import Tracing, TracingMissing
from coordinator.rpc.keys import MeshKeys
from engine.adapters.adapter_settings import AdapterError
from engine.adapters.loading import AdaptersLost
from engine.compute.trace import write_chrome_trace
from engine.config import InstanceConfig
from engine.core import EngineCore, ModelPlace
from engine.executor import make_executor
from engine.executor_contract import Executor, WorkerLost
from engine.groups.stepping import NoGroup
from engine.groups.transport import transport_problem
from engine.host import deferred, memory
from engine.host.cache_size import CacheSize, TooLittleMemory, size_cache
from engine.host.cores import instances_at_once
from engine.lifecycle.cache_services import CacheServices, share_memory
from engine.lifecycle.compute_share import ComputeShare
from engine.lifecycle.ended import InstanceEnded
from engine.lifecycle.following_orders import OrdersFollowing
from engine.lifecycle.listening import listen_address
from engine.lifecycle.scheduling_ahead import log_scheduling_ahead
from engine.lifecycle.stats_line import StatsLine, drain_line
from engine.lifecycle.step_watch import StepWatch, place_of
from engine.lifecycle.stop_requests import StopRequests
from engine.messages import WeightsInUse
from engine.model.checkpoint import ModelInfo
from engine.model.host_digest import host_digest
from engine.numerics import kind_problem, numerics_of
from engine.pieces.kinds import BoundarySlots
from engine.serving.server import Server
from engine.settings import adopt, ignored_when_joining, resolve, with_adapters
from engine.step import ModelFacts
from engine.weight_versions.updating import WeightsLost
from parallel.devices import cuda_devices, device_sharers

if TYPE_CHECKING:
    from engine.executor_contract import SpreadExecutor
    from engine.groups.spread import Spread

logger = logging.getLogger(__name__)

CATCH_UP_INTERVAL = 0.02
"""Seconds between two looks whether the mesh's weights are read."""


def memory_turn(device: str) -> AbstractContextManager[None]:
    """Keeps other instances from measuring memory while this one does, and takes its own."""
    if device == "cpu":
        return memory.turn()
    return memory.turn(memory.DEVICE_TURN_TIMEOUT, cuda_devices())


class InstanceProcess:
    """Life of one instance; its process does nothing else."""

    def __init__(self, config: InstanceConfig, keys: MeshKeys | None = None) -> None:
        self._mesh = config.mesh
        self._keys = keys
        self._config = config.engine
        self._asked_requests = config.engine.scheduler.max_num_seqs
        """``--max-num-seqs`` of its own command line, not of the mesh."""
        self._log_level = config.log_level
        self._name = os.environ.get(process.INSTANCE_VARIABLE) or uuid.uuid4().hex[:12]
        self._server: Server | None = None
        self._place: tuple[int, int] | None = None
        """(rank, size) that chooses the experts to load first; None: not spread."""
        self._spread: Spread | None = None
        self._services: CacheServices | None = None
        self._orders: OrdersFollowing | None = None
        self._watch: StepWatch | None = None
        """Where nobody else would miss the result of a step."""
        self._stats: StatsLine | None = None
        self._step_thread = threading.get_ident()
        self._settings: Settings | None = None
        self._adapter_problem: AdapterError | None = None
        """Why an adapter of the command line cannot be served."""
        self._numerics: Numerics | None = None
        self._rank = 0
        self._host = ""
        """Address at which routers and other instances reach this one."""
        self._stops = StopRequests(config.engine.drain_timeout)
        self._announced_draining = False

    def run(self) -> None:
        """Serve until asked to stop.

        Raises:
            InstanceEnded: it could not start, or may not go on.
        """
        self._stops.listen()
        problem = None
        if not self._config.workers_elsewhere:
            problem = kind_problem(self._config.device) or transport_problem(self._config.device)
        if problem is not None:
            raise InstanceEnded(process.EXIT_USAGE, problem)
        settings = self._own_settings()
        membership = self._register(settings)
        try:
            info = self._settle(membership)
            self._serve(membership, info)
        finally:
            membership.leave()
        if membership.refusal is not None:
            raise InstanceEnded(process.EXIT_REFUSED, f"the mesh refused this instance: {membership.refusal}")

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
        size = self._mesh.data_parallel_size
        try:
            return resolve(self._config, size)[1]
        except AdapterError as error:  # no harm if the mesh has others by now
            logger.warning("%s; the mesh may have other adapters by now", error)
            self._adapter_problem = error
            return resolve(self._config, size, unread=True)[1]

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
            self._stops.drain,
            self._config.cache.role,
        )
        membership.start()
        return membership

    def _settle(self, membership: MemberConnection) -> ModelInfo:
        """Wait for the coordinator, then take over what the mesh shares."""
        try:
            welcome = membership.wait_for_welcome(self._mesh.startup_timeout)
        except RegistrationRefused as error:
            if self._adapter_problem is not None:
                raise self._adapter_problem from error
            raise InstanceEnded(
                process.EXIT_REFUSED, f"the coordinator refused this instance: {error}"
            ) from error
        except StartupTimeout as error:
            raise InstanceEnded(process.EXIT_FAILED, str(error)) from error
        if self._mesh.data_parallel_start_rank is None:
            process.set_up(f"Engine_{welcome.rank}", self._log_level)
        self._rank = welcome.rank
        logger.info("instance %d of the mesh at %s", welcome.rank, self._mesh.coordinator_endpoint)
        self._config = adopt(self._config, with_adapters(welcome.settings, welcome.orders.adapters))
        if welcome.settings.enable_expert_parallel:
            from engine.groups.spread import first_share

            self._place = first_share(welcome.rank, welcome.settings)
        info, settings = resolve(self._config, welcome.settings.data_parallel_size)
        if settings.fingerprint != welcome.settings.fingerprint:
            raise InstanceEnded(
                process.EXIT_REFUSED,
                f"{info.directory} (fingerprint {settings.fingerprint}) is not the model of the mesh "
                f"({welcome.settings.model}, fingerprint {welcome.settings.fingerprint}): give MODEL",
            )
        self._settings = settings
        return info

    # ---- serving

    def _serve(self, membership: MemberConnection, info: ModelInfo) -> None:
        began = time.monotonic()
        share = ComputeShare(self._config, self._mesh.instances_here)
        share.update(share.neighbours(membership.neighbours, is_ready=False), None)
        if self._config.model.reads_weights and not self._config.workers_elsewhere:
            host_digest(Path(info.directory))  # workers of this host find it, or wait for it
        membership.update(phase="loading libraries")
        tracing = self._tracing()
        with deferred.no_garbage():
            executor = make_executor(
                self._config, info, share.now.threads, self._place, cores=share.now.cores, rank=self._rank,
                settings=self._settings, keys=self._keys,
                startup_timeout=process.PATIENCE * self._mesh.startup_timeout,
            )  # fmt: skip
        try:
            core, facts = self._load_model(membership, info, executor, share)
            core.tracing = tracing
            membership.update(phase="tokenizer")
            core.grammars.prepare()
            self._host = listen_address(self._mesh)
            server = self._server = Server(self._name, endpoint(self._host, 0), core, self._keys)
            try:
                self._open(membership, info, core, executor, facts)
                logger.info(
                    "%s after %.1f s",
                    "loaded" if self._spread is not None else f"ready on {server.endpoint}",
                    time.monotonic() - began,
                )
                self._stops.serve(server)
                self._step_to_the_end(membership, core, executor, server, share)
            finally:
                self._watch = None  # there are no turns any more
                if self._services is not None:
                    self._services.close()
                if self._orders is not None:
                    self._orders.close()
                if self._spread is not None:
                    self._spread.close()
        finally:
            executor.close()
            if tracing is not None:
                tracing.close()

    def _load_model(
        self, membership: MemberConnection, info: ModelInfo, executor: Executor, share: ComputeShare
    ) -> tuple[EngineCore, ModelFacts]:
        """Load the model, allocate the KV cache, and make the engine core."""
        with deferred.no_garbage(leaves=True):
            facts = executor.load(lambda phase: membership.update(phase=phase))
        self._stops.check()
        membership.update(phase="kv cache")
        if self._config.cache.enable_kv_inheritance:
            share_memory(executor, facts.device)
        with memory_turn(facts.device):
            neighbours = share.neighbours(membership.neighbours, is_ready=False)
            size = self._size_cache(executor, facts, neighbours)
            executor.allocate(size.num_blocks, size.num_boundaries)
        self._tell_numerics(membership, info, executor)
        if (drafts := self._config.scheduler.speculative) is not None:
            logger.info(
                "speculative decoding: up to %d tokens of a request are %s",
                drafts.most,
                f"proposed by {drafts.model or 'its MTP layer'}"
                if drafts.by_model
                else "looked up in its own text",
            )
        is_native = all(each.kernels != TORCH for each in executor.arithmetic())
        wanted = self._config.scheduler.async_scheduling
        log_scheduling_ahead(wanted, facts.device, runs_ahead=executor.runs_ahead)
        core = EngineCore(
            self._config,
            info,
            executor,
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            place=ModelPlace(
                has_gpu=facts.device != "cpu",
                is_native=is_native,
                keeps_experts=is_native and info.num_experts > 0 and facts.has_all_layers,
                at_once=instances_at_once(self._config),
                boundaries=[BoundarySlots(kind, size.num_boundaries) for kind in facts.boundaries],
            ),
        )
        return core, facts

    def _open(
        self,
        membership: MemberConnection,
        info: ModelInfo,
        core: EngineCore,
        executor: Executor,
        facts: ModelFacts,
    ) -> None:
        """Start the services beside the steps, and report readiness to the coordinator."""
        assert self._server is not None
        assert self._settings is not None
        assert self._numerics is not None
        self._services = CacheServices(
            self._config, self._mesh, self._settings, self._numerics, self._rank, self._host,
            self._keys,
        )  # fmt: skip
        self._services.start(core, executor, self._server.wake)
        core.reports.in_use = WeightsInUse(numerics=self._numerics)
        self._orders = OrdersFollowing(
            membership, self._server, core, executor,
            lambda version: self._tell_weights(version, membership, info, core, executor),
            self._config.lora.sources,
            in_groups=self._place is not None,
        )  # fmt: skip
        self._catch_up(executor)
        if self._place is None:
            membership.update(state=State.READY, phase="serving", address=self._server.endpoint)
        else:
            sharers = None if facts.device == "cpu" else device_sharers()
            self._spread = self._spread_experts(membership, executor, self._server, sharers)
            core.stepping = self._spread.stepping
        if not executor.has_workers:
            device = self._config.device
            limit = device.step_timeout if self._place is None else device.lockstep_timeout
            self._watch = StepWatch(limit, self._mesh.startup_timeout)
        if not self._mesh.observability.disable_log_stats:
            self._stats = StatsLine(core.pool.num_blocks, time.monotonic())

    def _step_to_the_end(
        self,
        membership: MemberConnection,
        core: EngineCore,
        executor: Executor,
        server: Server,
        share: ComputeShare,
    ) -> None:
        """Run the step loop until the instance leaves.

        Raises:
            InstanceEnded: it has lost a worker, or can be in no group.
        """
        try:
            server.run(lambda: self._between_steps(membership, core, executor, share))
            if not server.leaves_requests:
                membership.leave()
                server.await_readers()
            server.close()
            self._write_trace(executor)
        except NoGroup as error:
            raise InstanceEnded(process.EXIT_FAILED, str(error)) from error
        except WorkerLost as error:
            membership.leave()  # at once: the others need not wait until all is closed here
            server.close()  # and the end of the other workers takes a while
            raise InstanceEnded(process.EXIT_WORKER_LOST, f"lost a worker: {error}") from error

    def _tell_numerics(self, membership: MemberConnection, info: ModelInfo, executor: Executor) -> None:
        assert self._settings is not None
        numerics = numerics_of(self._settings, self._config.model, info.directory, executor.arithmetic())
        invariant = "invariant" if numerics.invariant else "variant: bits depend on what runs beside"
        logger.info("numerics class %s, %s", numerics, invariant)
        self._numerics = numerics
        membership.update(numerics=numerics)

    def _tell_weights(
        self,
        version: WeightVersion,
        membership: MemberConnection,
        info: ModelInfo,
        core: EngineCore,
        executor: Executor,
    ) -> None:
        self._tell_numerics(membership, info, executor)
        core.reports.in_use = WeightsInUse(version.number, version.label, self._numerics)

    def _tracing(self) -> Tracing | None:
        wanted = self._mesh.observability.otlp_traces_endpoint
        try:
            return None if wanted is None else Tracing(wanted, f"engine-{self._rank}")
        except TracingMissing as error:
            raise InstanceEnded(process.EXIT_USAGE, str(error)) from error

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
        assert self._orders is not None
        return Spread(
            membership,
            cast("SpreadExecutor", executor),
            Rendezvous(self._name, self._host, device, self._keys),
            server,
            device.eplb,
            self._orders,
            sharers=sharers,
        )

    def _catch_up(self, executor: Executor) -> None:
        """Follow the standing orders before this instance is ready.

        Weights that the mesh has gone over to since its start are read now, and adapters.
        """
        orders = self._orders
        assert orders is not None
        while not (self._follow_orders() or orders.may_be_ready) or orders.lacks_adapters_of_peers:
            self._stops.check()
            executor.check()  # workers get their orders
            time.sleep(CATCH_UP_INTERVAL)

    def _follow_orders(self) -> bool:
        assert self._orders is not None
        try:
            return self._orders.follow()
        except (WeightsLost, AdaptersLost) as error:
            raise InstanceEnded(process.EXIT_FAILED, str(error)) from error

    def _between_steps(
        self, membership: MemberConnection, core: EngineCore, executor: Executor, share: ComputeShare
    ) -> None:
        """Between two steps: handle signals and messages of the coordinator."""
        share.update(share.neighbours(membership.neighbours, is_ready=True), executor)
        assert self._services is not None
        self._services.look(core)
        if self._stats is not None and self._stats.is_due(now := time.monotonic()):
            line = self._stats.line(core.scheduler.counters(), core.reports.snapshot, now)
            if line is not None:
                logger.info("%s", line)
        if self._spread is not None:
            self._spread.drains = self._stops.drains
            self._spread.look(self._mesh.startup_timeout)
        executor.check()
        self._follow_orders()
        if membership.refusal is not None and self._server is not None:
            self._server.leave()
        elif self._stops.drains and not self._announced_draining:
            self._announced_draining = True
            seconds = self._server.drain_time_left if self._server else 0.0
            logger.info("%s", drain_line(core.reports.snapshot, seconds))
            membership.update(state=State.DRAINING, phase="draining")

    def _size_cache(self, executor: Executor, facts: ModelFacts, neighbours: int) -> CacheSize:
        try:
            return size_cache(self._config, facts, executor.free_kv_memory, neighbours, self._asked_requests)
        except TooLittleMemory as error:
            raise InstanceEnded(process.EXIT_FAILED, str(error)) from error

    def _load(self) -> Load:
        """Load for each heartbeat; called by the membership's thread."""
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

    def _end_hung(self, seconds: float) -> NoReturn:
        """End the process at once: the thread that would end it in order hangs."""
        logger.error(
            "a step has not ended after %.0f s (--execute-model-timeout): it hangs in %s. This instance "
            "ends; routers resume its requests on others",
            seconds,
            place_of(self._step_thread),
        )
        logging.shutdown()
        os._exit(process.EXIT_HUNG)
