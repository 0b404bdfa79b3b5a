"""Engine core: one batch of all routers' requests, its steps, and their tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from coordinator.messages import PauseMode
from coordinator.process.tracing import Tracing
from engine.config import EngineConfig
from engine.core.admission import Admission
from engine.core.cache_sharing import CacheSharing
from engine.core.model_place import ModelPlace
from engine.core.reporting import Reporting
from engine.core.step_pipeline import StepPipeline
from engine.executor_contract import Executor
from engine.groups.stepping import Stepping
from engine.messages import HandedOver, Prefetch, Prefetched, RequestRefused, Submit
from engine.model.checkpoint import ModelInfo
from engine.pieces.pool import PiecePool
from engine.scheduling.grammar_compiler import GrammarCompiler
from engine.scheduling.outcomes import outgoing_tokens_of
from engine.scheduling.outgoing_tokens import OutgoingTokens
from engine.scheduling.request import Request
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.scheduler import Scheduler
from engine.speculation.speculation import Speculation
from engine.transfers.messages import Holder
from parallel.communicators.base import CollectiveError

Peer = bytes
UNKNOWN = ModelPlace()
"""Place of a model about which nothing is known: torch's operators on a CPU."""


class EngineCore:
    """Schedules the requests of all routers in one batch, and runs its steps."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        *,
        num_blocks: int,
        max_model_len: int,
        place: ModelPlace = UNKNOWN,
        speculation: Speculation | None = None,
    ) -> None:
        """``speculation``: None makes what the settings ask for."""
        if speculation is None and config.scheduler.speculative is not None:
            speculation = Speculation(config.scheduler.speculative)
        self.pool = PiecePool(
            num_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            boundaries=place.boundaries,
            block_size=config.cache.block_size,
        )
        """Slots of the KV cache and of other pieces."""
        self.scheduler = Scheduler(_rules(config, info, executor, place), self.pool, speculation)
        depth = 1 if executor.runs_ahead else executor.in_flight
        self.sharing = CacheSharing(self.pool, self.scheduler, config.cache.block_size, depth)
        adapters = {source.digest: source.name for source in config.lora.sources}
        self._admission = Admission(
            config.scheduler, info, max_model_len, self.scheduler, self.sharing, adapters,
            keeps_experts=place.keeps_experts,
        )  # fmt: skip
        self._admission.images.encoder = executor.image_encoder
        self._steps = StepPipeline(executor, self.scheduler, self.sharing)
        self.reports = Reporting(
            config, place.at_once, self.scheduler, self.pool, self._admission, self.sharing, self._steps
        )
        self.routers: dict[Peer, str] = {}
        """Names of the routers that are connected."""
        self.tracing: Tracing | None = None
        """Exporter of a span for each ended request; None: none are made."""
        self._outgoing: dict[Peer, OutgoingTokens] = {}
        """Tokens of steps that ended before a later one failed."""

    def __repr__(self) -> str:
        return f"<EngineCore {self.scheduler!r}>"

    @property
    def stepping(self) -> Stepping:
        """Agreement with other instances on each step; an instance steps alone until this is set."""
        return self._steps.stepping

    @stepping.setter
    def stepping(self, stepping: Stepping) -> None:
        self._steps.stepping = stepping

    @property
    def admission(self) -> Admission:
        """Requests that are not in the scheduler yet, and how they get there."""
        return self._admission

    @property
    def grammars(self) -> GrammarCompiler:
        """Requests whose grammars are being compiled."""
        return self._admission.grammars

    @property
    def has_work(self) -> bool:
        """Whether requests are scheduled, a step is under way, or tokens are to be sent."""
        may_step = not self._steps.stands_still
        return (self.scheduler.queues.has_work and may_step) or bool(self._outgoing) or self._steps.has_work

    @property
    def is_empty(self) -> bool:
        """Whether there are no requests, not even ones that wait beside the scheduler."""
        return not (self.has_work or self.scheduler.queues.has_work) and self._admission.is_empty

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`step` has time for something else: others compute, and no instance is waited for."""
        return self._steps.overlaps

    # ---- requests

    def submit(self, peer: Peer, submit: Submit) -> RequestRefused | None:
        """Queue a request of a router, or return its refusal."""
        return self._admission.submit(peer, submit)

    @property
    def pause(self) -> PauseMode | None:
        """Whether and how the mesh is paused."""
        return self._admission.pausing.mode

    def set_pause(self, mode: PauseMode | None) -> None:
        """Pause this instance, or let it go on; the caller ends requests."""
        self._admission.set_pause(mode)
        self._steps.stands_still = self._admission.pausing.stands_still

    def hold_steps(self, hold: bool) -> bool:
        """Schedule no step until this is called with False; returns whether none is under way."""
        self._steps.stands_still = hold or self._admission.pausing.stands_still
        return not len(self._steps) and not self._steps.has_work

    @property
    def is_pause_in_effect(self) -> bool:
        """Whether no step that the pause forbids is under way or to come."""
        if self.pause is None:
            return True
        return not self.has_work and (self._steps.stands_still or self._admission.is_quiet)

    def take_ready(self) -> list[tuple[Peer, RequestRefused]]:
        """Queue requests whose grammars or images are ready; returns refusals of failed ones."""
        return self._admission.take_ready()

    def prefetch(self, peer: Peer, wish: Prefetch) -> None:
        """Fetch the blocks of a request that is to move here; :meth:`take_fetched` has the answer."""
        if not self._admission.can_compute(wish):
            wish = msgspec.structs.replace(wish, token_ids=[], request=0)  # answered: nothing came
        router = self.routers.get(peer)
        holder = None if router is None or not wish.request else (router, wish.request)
        self.sharing.fetch(peer, wish, holder)

    def take_fetched(self) -> list[tuple[Peer, Prefetched | HandedOver]]:
        """Act on what transfers of KV blocks did; see :meth:`CacheSharing.take_fetched`."""
        return self.sharing.take_fetched(self._holder)

    def abort(self, peer: Peer, numbers: list[int]) -> None:
        """Forget some requests of a router; those not known are ignored."""
        for number in numbers:
            if not self._admission.forget((peer, number)):
                self.scheduler.abort((peer, number))
        if (tokens := self._outgoing.pop(peer, None)) and (kept := tokens.without(numbers)):
            self._outgoing[peer] = kept

    def requests_of(self, peer: Peer) -> list[int]:
        """Numbers of all requests of a router."""
        return self._admission.requests_of(peer)

    def recall(self, peer: Peer, numbers: list[int]) -> list[int]:
        """Forget those of these requests that have not begun, and return their numbers."""
        keys = ((peer, number) for number in numbers)
        return [key[1] for key in keys if self._admission.forget(key) or self.scheduler.recall(key)]

    def abort_all(self, peer: Peer) -> int:
        """Forget all requests of a router that is gone; returns how many."""
        self.sharing.forget_copies(peer)
        numbers = self.requests_of(peer)
        self.abort(peer, numbers)
        self._outgoing.pop(peer, None)  # also of requests that have ended
        return len(numbers)

    def _holder(self, holder: Holder) -> Request | None:
        """The request of a router with this name.

        None if tokens for the router are kept since a step failed.
        """
        name, number = holder
        peer = next((peer for peer, router in self.routers.items() if router == name), None)
        if peer is None or peer in self._outgoing:
            return None
        return self.scheduler.queues.find((peer, number))

    # ---- steps

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> dict[Peer, OutgoingTokens]:
        """Begin steps until ``in_flight`` are under way, then finish the oldest.

        Returns the new tokens by router, none if nothing runs. In lockstep each step begins once all agree on
        it. Where no further step follows for now, all that are under way are finished. Where it
        :attr:`overlaps`, ``meanwhile`` is called while workers or a device compute; before a device gets a
        step with prompts, too.

        A step that does not come to its end is kept and runs again before anything else is scheduled, also
        if its requests are aborted meanwhile: others may rely on the blocks that it fills. So nothing has to
        be taken back, and nothing was handed out.

        Raises:
            parallel.communicators.base.CollectiveError: in lockstep, a peer is lost.
            engine.executor_contract.WorkerLost: a worker of this instance is.
        """
        try:
            pauses = self._steps.begin(meanwhile)
            if self._steps.overlaps:
                meanwhile()
            for _ in range(len(self._steps) if pauses else min(1, len(self._steps))):
                self._keep(outgoing_tokens_of(self._steps.finish_oldest(), self.tracing))
        except CollectiveError:
            self._steps.restart()
            raise
        outgoing, self._outgoing = self._outgoing, {}
        return outgoing

    def run_again(self) -> None:
        """After entering a new group: steps lost with the old one run first."""
        if len(self._steps):
            self._steps.restart()

    def _keep(self, outgoing: dict[Peer, OutgoingTokens]) -> None:
        for peer, tokens in outgoing.items():
            if peer in self._outgoing:
                for delta in tokens:
                    self._outgoing[peer].add(delta)
            else:
                self._outgoing[peer] = tokens


def _rules(config: EngineConfig, info: ModelInfo, executor: Executor, place: ModelPlace) -> SchedulerRules:
    """Limits of the scheduler, from the settings and what computes the model."""
    limits, has_gpu = config.scheduler, place.has_gpu
    return SchedulerRules(
        max_num_seqs=limits.most_requests(),
        max_num_batched_tokens=limits.token_budget(),
        block_size=config.cache.block_size,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        prompt_tokens_beside_decodes=limits.prompt_tokens_beside_decodes(has_gpu),
        prompt_seconds_beside_decodes=limits.prompt_seconds_beside_decodes(has_gpu),
        largest_lone_chunk=limits.largest_lone_chunk(has_gpu) if place.is_native else 0,
        lone_chunk_seconds=limits.lone_chunk_seconds(),
        micro_batches=1 if executor.runs_ahead else executor.in_flight,
        runs_ahead=executor.runs_ahead,
        tells_tokens=executor.needs_tokens,
        images_are_whole=info.images_are_whole,
        max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
    )
