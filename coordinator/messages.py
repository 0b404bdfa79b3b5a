"""Messages between instances or watchers and the coordinator, in both directions.

The coordinator binds the socket, so it owns the words. Instances register, then send heartbeats that
carry all that is known of them: a restarted coordinator learns the world from those. Watchers (routers,
``lockstep status``, the launcher) ask for the view once, and get what changes in it from then on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.numerics import Numerics
from coordinator.pooled_model import PooledModel
from parallel.placement import Copies, Placement

Epoch = Annotated[int, Meta(ge=0, le=2**53)]
"""The number of a group.

What is no number of one is dropped where it is decoded.
"""

MAX_ODD = 1000
"""Instances that one router may name for what they computed."""
MAX_REACH_PEERS = 64
"""Instances that one instance is asked to connect to at a time."""


class PlanName(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a :class:`GroupPlan`."""

    epoch: Epoch
    token: str


class Balancing(msgspec.Struct, frozen=True, kw_only=True):
    """How the load of spread experts is balanced (``--enable-eplb``)."""

    window_size: int
    """Steps over which loads are counted."""
    windows: int
    """Windows between two looks whether a change pays."""
    num_redundant: int = 0
    """Copies of experts in each layer beyond one of each."""
    survive: int = 0
    """Instances that may die without the last copy of any expert, where copies suffice."""
    log_every: int = 0
    """Windows between two log lines with the balancedness; 0: none."""


MOST_ADAPTERS = 1000
"""Most adapters of a mesh."""


class AdapterSource(msgspec.Struct, frozen=True):
    """Low-rank adapter of the mesh: its name for clients, and where its files are."""

    name: str
    path: str
    digest: str = ""
    """Digest of its tensors and settings; empty as long as it is unknown."""


class Lora(msgspec.Struct, frozen=True):
    """Low-rank adapters of a mesh, and the room for them on each instance."""

    adapters: tuple[AdapterSource, ...]
    """Those of the start; standing orders have later ones."""
    max_loras: int
    """Adapters that running requests have at once."""
    max_lora_rank: int
    max_cpu_loras: int = MOST_ADAPTERS
    """Adapters in memory at once, those included that only requests in flight have."""
    allowed_path: str = ""
    """Directory that adapters loaded later must be in; empty: any."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a mesh and how it is run.

    Instances must agree on most of this (:mod:`coordinator.membership.admission`); the rest are defaults for
    one that joins without settings of its own.
    """

    model: str
    revision: str | None
    served_model_name: tuple[str, ...]
    fingerprint: str
    """Digest of the checkpoint's files and of samples of its weights.

    See :func:`engine.model.checkpoint.fingerprint`.
    """
    dtype: str
    max_model_len: int
    block_size: int
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    vocab_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    """Experts are spread over the instances, which then step in lockstep."""
    expert_placement_strategy: str
    all2all_backend: str
    mesh_transport: str = "auto"
    data_parallel_size: int
    """Instances among which the experts are spread at first; 0 without expert parallelism."""
    num_experts: int = 0
    """Routed experts of a layer that are spread; 0 if none are."""
    balancing: Balancing | None = None
    """As flags ask for it, with an effect only where experts are spread.

    None: experts keep their places.
    """
    pipeline_split: str = ""
    """Layers of each pipeline stage as flags ask for them, such as 10,12,10; empty: balanced.

    Where experts are spread, a stage must hold the same layers on all instances.
    """
    max_num_batched_tokens: int
    is_budget_given: bool = True
    """Whether that budget was asked for.

    If not, each instance takes what suits its own device.
    """
    max_num_seqs: int
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    quantization: str = ""
    """How plain weights are quantised while they are read; empty: not at all."""
    lora: Lora | None = None
    """Low-rank adapters; None: the mesh has none."""
    pooling: PooledModel | None = None
    """What it computes with ``--runner pooling``; None: it generates tokens."""


class State(enum.StrEnum):
    """The life of an instance in the mesh."""

    LOADING = "loading"
    LOADED = "loaded"
    """Has its weights and waits for its group to form."""
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    """Holds no request, and waits for a group without it (only where experts are spread)."""

    @property
    def stays(self) -> bool:
        """Whether it serves or will; the others are on their way out."""
        return self in (State.LOADING, State.LOADED, State.READY)


class Role(enum.StrEnum):
    """What an instance is preferred for (:mod:`router.dispatch.roles`)."""

    MIXED = "mixed"
    PREFILL = "prefill"
    """Long prompts, whose requests go on elsewhere after the first token."""
    DECODE = "decode"
    """All but long prompts."""


class Evidence(enum.StrEnum):
    """What makes a member think that another one is lost."""

    EXITED = "exited"
    """Its process has ended: certain."""
    CLOSED = "closed"
    """The member's end of the group is closed.

    Its process died, or it lives and gave the group up.
    """
    DEADLINE = "deadline"
    """It did not come to a collective within the deadline."""


class Load(msgspec.Struct, frozen=True):
    """What an instance is doing, as of its last heartbeat."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    tokens_per_second: float = 0.0
    """Tokens generated, over the last heartbeats."""
    steps: int = 0
    stalled_for: float = 0.0
    """Seconds since the last step while there is work; 0 without work.

    Large: it makes no progress.
    """
    refused_peers: int = 0
    """Connections refused for want of the mesh's key."""
    cache_checked: int = 0
    """Cached pieces that were computed again and compared, in the last 24 hours."""
    cache_wrong: int = 0
    """Those of them that differed."""


class InFlight(enum.StrEnum):
    """What becomes of requests in flight when the weights change."""

    KEEP = "keep"
    """They go on, with the keys and values of the old weights."""
    RECOMPUTE = "recompute"
    """Prompt and output are computed again with the new weights, and they go on."""
    ABORT = "abort"
    """They end."""
    FINISH = "finish"
    """They end on the old weights, and new ones wait; not with spread experts."""


class PauseMode(enum.StrEnum):
    """What becomes of requests while all instances pause; new ones wait in any case."""

    KEEP = "keep"
    """They stand still, and go on afterwards."""
    WAIT = "wait"
    """They go on to their end."""
    ABORT = "abort"
    """They end."""


class MemoryPart(enum.StrEnum):
    """Memory that an instance gives back while the mesh sleeps."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class MeshSleep(msgspec.Struct, frozen=True):
    """Sleep of all instances: nothing is computed, and memory is given back.

    Nobody gives memory back before all stand still, and nobody computes before all have it again: with
    spread experts each step needs all members.
    """

    parts: tuple[MemoryPart, ...] = ()
    """What instances are without while ``gives_back``; empty: they take everything back, then it ends."""
    level: Annotated[int, Meta(ge=1, le=2)] = 1
    """2: weights are read again from their source; 1: an instance may keep them elsewhere."""
    mode: PauseMode = PauseMode.ABORT
    """What becomes of requests in flight; new ones wait."""
    gives_back: bool = False
    """Whether all stand still, so that memory may be given back."""

    @property
    def lacks_weights(self) -> bool:
        """Whether instances are to be without their weights now."""
        return self.gives_back and MemoryPart.WEIGHTS in self.parts


class WeightVersion(msgspec.Struct, frozen=True):
    """Weights of the mesh, by their number."""

    number: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """0: those of the model that the mesh was started with."""
    label: str = ""
    """Name that the trainer gave it."""
    source: str = ""
    """Directory that has them, on every host; empty for number 0."""
    digest: str = ""
    """Digest of all bytes of all tensors; empty while it is not known."""
    update: str = ""
    """Id of the update that brought it."""


class WeightUpdate(msgspec.Struct, frozen=True):
    """New weights that instances prepare beside the ones in use."""

    version: WeightVersion
    in_flight: InFlight = InFlight.KEEP


class AdapterList(msgspec.Struct, frozen=True, omit_defaults=True):
    """Low-rank adapters of the mesh, as changed while it serves."""

    number: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Rises with each change; 0: the list is that of the settings."""
    adapters: tuple[AdapterSource, ...] = ()
    retired: tuple[AdapterSource, ...] = ()
    """Unloaded and replaced ones that requests in flight may still have."""
    commands: tuple[str, ...] = ()
    """Ids of the newest commands that changed the list, the last one at the end."""


class AdapterLoad(msgspec.Struct, frozen=True):
    """Adapter that instances read into memory before the mesh decides to serve it."""

    command: str
    source: AdapterSource


class StandingOrders(msgspec.Struct, frozen=True, tag="orders", kw_only=True, omit_defaults=True):
    """What all instances of the mesh keep to (docs/design/weight-versions.md).

    Sent to an instance until its heartbeats name them.
    """

    revision: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Rises with each change, also over restarts of the coordinator."""
    token: str = ""
    """Identifies the coordinator process that gave this revision its number."""
    weights: WeightVersion = WeightVersion()
    """The current version; an instance with an older one in use follows."""
    in_flight: InFlight = InFlight.KEEP
    """What becomes of requests in flight when an instance goes over to it."""
    update: WeightUpdate | None = None
    """The version to prepare."""
    pause: PauseMode | None = None
    command: str = ""
    """Id of the newest command about the pause."""
    sleep: MeshSleep | None = None
    """None: the mesh is awake."""
    sleep_command: str = ""
    """Id of the newest command about the sleep."""
    adapters: AdapterList = AdapterList()
    adapter_load: AdapterLoad | None = None
    """The adapter to read now."""

    @property
    def standstill(self) -> PauseMode | None:
        """How instances stand still for a pause or a sleep; None: requests run."""
        if self.sleep is None:
            return self.pause
        if self.sleep.gives_back or (self.sleep.mode is PauseMode.WAIT and self.pause is not None):
            return PauseMode.KEEP if self.pause is not PauseMode.ABORT else self.pause
        return self.sleep.mode


def is_same_but_name(one: StandingOrders, other: StandingOrders) -> bool:
    """Whether two orders ask for the same."""
    names = ("revision", "token", "command", "sleep_command")
    return one == msgspec.structs.replace(other, **{name: getattr(one, name) for name in names})


class OrdersReport(msgspec.Struct, frozen=True, array_like=True):
    """How far an instance is with its standing orders."""

    revision: Annotated[int, Meta(ge=0, le=2**53)] = 0
    token: str = ""
    in_effect: bool = True
    """Whether nothing happens here any more that they forbid."""


class WeightsReport(msgspec.Struct, frozen=True, array_like=True):
    """How far an instance is with weight versions."""

    number: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Number of the version in use."""
    prepared: str = ""
    """Id of the update that is prepared."""
    digest: str = ""
    """Its digest."""
    failed: str = ""
    """Id of the update that could not be prepared."""
    reason: str = ""


class AdaptersReport(msgspec.Struct, frozen=True, array_like=True):
    """How far an instance is with the adapter to read."""

    command: str = ""
    """Id of the command whose adapter is in memory."""
    digest: str = ""
    """Digest of that adapter."""
    failed: str = ""
    """Id of the command whose adapter cannot be served."""
    reason: str = ""


# ---- to the coordinator


class Register(msgspec.Struct, frozen=True, tag="register", kw_only=True):
    """Request of an instance to join, repeated until it is welcomed or refused."""

    instance: str
    """Random name of this process; a restarted process has another."""
    rank: int | None
    """None for any free one."""
    rank_was_given: bool = False
    """The coordinator assigned this rank, since the instance asked for none: any other will do."""
    size: int | None
    """``-dp`` as given to this instance, if it was."""
    settings: Settings | None
    """None to learn them."""
    host: str
    pid: int
    epoch: Epoch = 0
    """The last epoch it knew, for a coordinator that was restarted."""
    group: GroupPlan | None = None
    """The group it steps in, for a coordinator that was restarted."""
    numerics: Numerics | None = None
    """Its numerics class; None before the weights are loaded."""
    orders: StandingOrders | None = None
    """Those that it has, for a coordinator that was restarted; None: it never had any."""


class ExpertLoads(msgspec.Struct, frozen=True, array_like=True):
    """Rows that an instance's experts computed in a window of steps."""

    epoch: Epoch
    number: int
    """Number of the window in its epoch, from 1: the same for all members."""
    rows: tuple[tuple[int, ...], ...]
    """By layer and expert."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", kw_only=True):
    """Sign of life of an instance, with its state."""

    instance: str
    state: State
    phase: str
    """What it is doing while it loads ("weights", "kv cache" ...)."""
    address: str
    """Where routers reach it; empty until it listens."""
    store: str = ""
    """host:port where this instance would host the rendezvous of a group, if it can."""
    load: Load
    experts: tuple[tuple[int, ...], ...] = ()
    """The experts that it holds in every layer, ascending, by tensor-parallel rank.

    An expert that is not split is on one rank each.
    """
    experts_by_layer: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The experts that it holds by tensor-parallel rank and layer, where layers differ."""
    expert_layers: int = 0
    """Layers with experts that it computes, if their load is balanced."""
    loads: ExpertLoads | None = None
    """Loads of the last window in which they were counted."""
    expert_bytes: int = 0
    """Memory of a copy of an expert over all layers, kernels' copies included."""
    max_experts: int = 0
    """How many each of its ranks has room for; 0: any number."""
    epoch: Epoch = 0
    """Epoch of the group that it steps in; 0: none."""
    ready_epoch: Epoch = 0
    """Epoch of the newest group that it is ready to enter, or has entered."""
    plan: PlanName | None = None
    """The newest plan that it has.

    A plan is sent once, and only changes of it after that.
    """
    answers: int = 0
    """The number of the newest :class:`Probe` that it has received."""
    numerics: Numerics | None = None
    """Its numerics class; None before the weights are loaded."""
    role: Role = Role.MIXED
    is_role_set: bool = False
    """Whether an operator has set the role, and not the command line."""
    orders: OrdersReport = OrdersReport()
    weights: WeightsReport = WeightsReport()
    adapters: AdaptersReport = AdaptersReport()


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """An instance is about to end; it holds no request any more."""

    instance: str


class Lost(msgspec.Struct, frozen=True, tag="lost", kw_only=True):
    """A group is broken, or could not form.

    Repeated until a :class:`GroupPlan` of a later epoch comes.
    """

    instance: str
    """The instance that reports, and is therefore alive."""
    epoch: Epoch
    """Epoch of the group."""
    suspects: tuple[str, ...] = ()
    """The instances that probably are at fault, as far as this one knows."""
    evidence: Evidence = Evidence.CLOSED


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    """Answer to a :class:`Reach`."""

    instance: str
    number: int
    reached: Annotated[tuple[str, ...], Meta(max_length=MAX_REACH_PEERS)]
    """The instances whose address takes connections from here."""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """An instance's process has ended, as its launcher saw: do not wait for missed heartbeats."""

    instance: str
    how: str


class AnswerChecks(msgspec.Struct, frozen=True):
    """Answers that shadow checks compared in the last 24 hours."""

    checked: int = 0
    wrong: int = 0
    """Those of them that another instance computed otherwise."""


class Watch(msgspec.Struct, frozen=True, tag="watch", omit_defaults=True):
    """Push changes of the view from now on.

    Repeated as a sign of life. Answered by :class:`ViewCurrent`, or by the whole view if the watcher has none
    of this coordinator's.
    """

    watcher: str
    launcher: str = ""
    """Name of the mesh whose coordinator this ``serve`` runs; scale commands go to it."""
    odd: Annotated[dict[str, int], Meta(max_length=MAX_ODD)] = {}
    """Shadow checks of this router that name an instance, by instance."""
    answers: AnswerChecks = AnswerChecks()
    """All of its shadow checks."""
    series: str = ""
    """Series of the view that the watcher has."""
    number: Epoch = 0
    """Number of that view; 0: it has none, or missed a change."""
    adapters: Annotated[tuple[str, ...], Meta(max_length=MOST_ADAPTERS)] = ()
    """Digests of retired adapters that requests of this router have."""


class Drain(msgspec.Struct, frozen=True, tag="drain", kw_only=True):
    """An operator wants an instance to finish what it has and go.

    Passed on to the instance. Repeated until it is answered; the same command twice is one wish.
    """

    command: str
    """Random name of this wish."""
    rank: int
    timeout: float | None = None
    """Seconds for its requests to finish before they move elsewhere.

    None: the instance's own setting.
    """
    force: bool = False
    """Also if no instance serves then."""
    instance: str = ""
    """Name of the instance that must have this rank; empty for any."""


class SetRole(msgspec.Struct, frozen=True, tag="set_role", kw_only=True):
    """An operator wants an instance to have another role."""

    command: str
    rank: int
    role: Role


class Rebalance(msgspec.Struct, frozen=True, tag="rebalance", kw_only=True):
    """An operator wants experts to move now where that makes steps faster."""

    command: str


class SetPause(msgspec.Struct, frozen=True, tag="set_pause", kw_only=True):
    """An operator wants all instances to pause, or to go on.

    The same command again asks whether that is in effect everywhere (200) or not yet (202).
    """

    command: str
    mode: PauseMode | None
    """None: go on."""


class SetSleep(msgspec.Struct, frozen=True, tag="set_sleep", kw_only=True):
    """An operator wants all instances to give back memory.

    The same command again asks whether all have (200) or not yet (202). Instances that sleep already give
    back these parts, too.
    """

    command: str
    parts: tuple[MemoryPart, ...]
    level: Annotated[int, Meta(ge=1, le=2)] = 1
    mode: PauseMode = PauseMode.ABORT


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up", kw_only=True):
    """An operator wants all instances to take memory back.

    They go on when they have all of it. The same command again asks whether that is so: 200, or 202 not yet.
    """

    command: str
    parts: tuple[MemoryPart, ...] = ()
    """Empty: all."""


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights", kw_only=True):
    """An operator, or a trainer, wants all instances to go over to other weights.

    The same command again asks how far that is: 202 not yet, 200 in use everywhere, 500 abandoned.
    """

    command: str
    source: str
    """Directory that has them, on every host."""
    label: str = ""
    number: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    """None: the next one."""
    in_flight: InFlight = InFlight.KEEP


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", kw_only=True):
    """An operator, or a trainer, wants all instances to serve one more low-rank adapter.

    The same command again asks how far that is: 202 not yet, 200 served everywhere, 400 refused.
    """

    command: str
    name: str
    path: str
    """Directory that has it, on every host."""
    in_place: bool = False
    """Also in place of an adapter of the same name."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", kw_only=True):
    """An operator wants no further requests to be answered by a low-rank adapter.

    The same command again asks whether that is so everywhere.
    """

    command: str
    name: str


class Scale(msgspec.Struct, frozen=True, tag="scale", kw_only=True):
    """An operator wants so many instances in all.

    Passed on to the launcher, which starts or drains its own. The same command again, while its sender waits,
    asks whether it can still succeed.
    """

    command: str
    size: int
    force: bool = False


class OperatorAnswer(msgspec.Struct, frozen=True, tag="answer", kw_only=True):
    """Result of a command, from the launcher to the coordinator and on to the client."""

    command: str
    status: int
    """Status as in HTTP: 202 accepted, 404 no such rank, 409 conflict, 503 no launcher.

    200: it is done. 400: refused for what it asks. 500: what was accepted before cannot succeed any more.
    """
    text: str
    """Text for the operator: what happens now, or what prevents it and what to do."""


OperatorCommand = (
    Drain
    | Scale
    | SetRole
    | Rebalance
    | SetPause
    | SetSleep
    | WakeUp
    | UpdateWeights
    | LoadAdapter
    | UnloadAdapter
)
"""Wishes of operators, each answered by an :class:`OperatorAnswer`."""

ToCoordinator = (
    Register | Heartbeat | Lost | Reached | Leave | Exited | Watch | OperatorCommand | OperatorAnswer
)


# ---- from the coordinator


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    rank: int
    settings: Settings
    epoch: int
    heartbeat_interval: float
    """Seconds."""
    fenced: bool = False
    """The other members go on without this instance.

    It must give up the group that it steps in, or was to enter, and all requests with it.
    """
    orders: StandingOrders = StandingOrders()


class AdmissionWait(msgspec.Struct, frozen=True, tag="wait"):
    """Answer to an instance that cannot join yet; it asks again soon."""

    reason: str


class AdmissionRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal of an instance; the reason says what to change."""

    reason: str


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """One member of a group to form."""

    rank: int
    address: str
    host: str
    instance: str = ""


class GroupPlan(msgspec.Struct, frozen=True, tag="form", kw_only=True):
    """Prepare the group of this epoch: load the assigned experts, connect to the members.

    :mod:`engine.groups.recovery` decides when to enter it. It replaces every earlier plan.
    """

    epoch: Epoch
    store: str
    """The rendezvous, host:port, at the first peer."""
    peers: list[Peer]
    """The members, by rank.

    Ranks may have gaps, a member's number in the group is its place here. Empty when all who are left leave.
    """
    owners: tuple[int, ...] = ()
    """Owner of each expert, the same in every layer and pipeline stage.

    Empty if there are ``replicas``. It is the tensor-parallel rank ``owner % ranks`` of the member
    ``owner // ranks``.
    """
    replicas: tuple[Copies, ...] = ()
    """Owners of each expert by layer, where layers differ or experts have several."""
    ranks: Annotated[int, Meta(ge=1)] = 1
    """Tensor-parallel ranks of each member."""
    leavers: tuple[str, ...] = ()
    """Instances of the previous group that leave in good order when this group begins."""
    broken: int = 0
    """Groups of this epoch and earlier ones are dead: no member waits in them."""
    token: str = ""
    """Identifies the coordinator process that formed the group.

    One that was restarted may reuse an epoch number that its predecessor sent to an instance that is away
    now. Those two groups must never meet at a rendezvous.
    """
    weights: int = 0
    """Number of the weight version with which its members step."""

    @property
    def name(self) -> PlanName:
        """How an instance that has this plan names it."""
        return PlanName(self.epoch, self.token)

    @property
    def placement(self) -> Placement:
        """Where the experts are, over all ranks of all members."""
        return Placement(self.owners, len(self.peers) * self.ranks, self.replicas)


class PlanChange(msgspec.Struct, frozen=True, tag="form_change", kw_only=True, omit_defaults=True):
    """A :class:`GroupPlan` for instances that have another one (:mod:`coordinator.plans`).

    It is small where few members come or go, so a large mesh can change often.
    """

    base: PlanName
    """The plan that the instance has; without that one, the message means nothing to it."""
    epoch: Epoch
    store: str
    token: str
    left: tuple[int, ...] = ()
    """Places in the base of the members that are no more, ascending."""
    joined: tuple[Peer, ...] = ()
    """New members, by rank."""
    moved: tuple[tuple[int, int], ...] = ()
    """Expert and owner, where it is not the one of the base."""
    copied: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """Layer, expert and owners, where layers differ and they are not those of the base."""
    leavers: tuple[str, ...] = ()
    broken: int = 0
    weights: int = 0


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Reported as lost: answer at once with a heartbeat that bears this number."""

    number: int


class Reach(msgspec.Struct, frozen=True, tag="reach"):
    """Try to connect to these instances where they would host a group's rendezvous, and send
    :class:`Reached`. Sent when groups break again and again though all members live."""

    number: int
    peers: Annotated[dict[str, str], Meta(max_length=MAX_REACH_PEERS)]
    """host:port by name of the instance."""


class TakeRole(msgspec.Struct, frozen=True, tag="role"):
    """An operator has set the role of this instance.

    Sent until heartbeats name it. So a coordinator that is started again learns it from the instance.
    """

    role: Role


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """A heartbeat of an instance that is not in the world (any more): register again."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One instance in the view."""

    instance: str
    rank: int
    state: State
    phase: str
    address: str
    host: str
    pid: int
    load: Load
    numerics: Numerics | None = None
    """None while it is not known.

    Where experts are spread over instances of several classes, it is one for all of them.
    """
    odd: int = 0
    """Shadow checks of all routers in which it computed otherwise than two others."""
    role: Role = Role.MIXED


def ranks_by_class(members: Sequence[Member]) -> dict[Numerics, list[int]]:
    """Ranks of the members of each numerics class.

    Members whose class is not known are left out.
    """
    ranks: dict[Numerics, list[int]] = {}
    for member in members:
        if member.numerics is not None:
            ranks.setdefault(member.numerics, []).append(member.rank)
    return ranks


class BusyExpert(msgspec.Struct, frozen=True):
    """One of the experts with most rows in a window, over all layers."""

    expert: int
    share: float
    """Part of all rows."""
    ranks: tuple[int, ...]
    """Instances that hold it in any layer, and are still here."""


class ExpertBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How the load of spread experts is balanced, as far as the coordinator knows."""

    windows: int = 0
    """Windows of steps whose loads are known, since the coordinator began."""
    balancedness: float = 1.0
    """Mean over maximum of the instances' rows in the newest one, summed over layers."""
    by_layer: tuple[float, ...] = ()
    held: dict[int, int] = {}
    """Copies of experts over all layers, by rank of the instance.

    Instances that are gone are left out.
    """
    replicas: tuple[int, ...] = ()
    """Copies of each expert over all layers.

    Empty where all have one owner, the same in each layer.
    """
    changes: int = 0
    """Groups that were formed to move experts, and have begun."""
    failures: int = 0
    """Those that have not."""
    is_failing: bool = False
    """The last ones in a row have not, or loads do not come."""
    moves: int = 0
    """Copies of experts that these changes moved."""
    moved_bytes: int = 0
    """Memory of these copies."""
    seconds: float = 0.0
    """From the coordinator's plan until all members were in these groups."""
    copies: int = 1
    """Copies of the expert that has fewest."""
    wanted_copies: int = 1
    """Copies of each expert that ``--eplb-survive`` asks for."""
    busiest: tuple[BusyExpert, ...] = ()
    """Those with most rows in the newest window, the busiest first."""
    most_copies: int = 1
    """Copies of each expert for which ``num_redundant_experts`` and room suffice, if that is less."""


class View(msgspec.Struct, frozen=True, tag="view", kw_only=True):
    """The world as the coordinator knows it."""

    mesh: str = ""
    """The mesh's name, when its launcher gave it one."""
    epoch: int
    """Number of the set of ready instances; rises whenever that set changes."""
    size: int | None
    """Instances that the mesh starts with (``-dp``)."""
    settings: Settings | None
    members: list[Member]
    """By rank."""
    waiting_for: str
    """What is still missing before all of ``size`` are ready; empty when nothing is."""
    refused_peers: int = 0
    """Connections that the coordinator refused for want of the mesh's key."""
    balance: ExpertBalance | None = None
    """None where the load of experts is not balanced."""
    orders: StandingOrders = StandingOrders()
    """What all instances keep to."""
    answers: AnswerChecks = AnswerChecks()
    """Shadow checks of all routers."""
    complete: bool = True
    """False at first: instances that serve may not have noticed this coordinator yet.

    An instance that is missing in such a view need not be gone.
    """
    series: str = ""
    """Random name of the coordinator process, which numbers its views."""
    number: int = 0
    """Number of the view in its series."""


class LoadChange(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`Load` that changed, in few bytes: one of each instance is sent every second."""

    rank: int
    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    tokens_per_second: float
    steps: int
    stalled_for: float
    refused_peers: int
    cache_checked: int = 0
    cache_wrong: int = 0

    @classmethod
    def of(cls, rank: int, load: Load) -> LoadChange:
        """The message for an instance's load."""
        return cls(rank, *msgspec.structs.astuple(load))

    def load(self) -> Load:
        """The load of this message."""
        return Load(*msgspec.structs.astuple(self)[1:])


class ViewChange(msgspec.Struct, frozen=True, tag="change", kw_only=True, omit_defaults=True):
    """What makes the view of one number from that of the number before.

    A watcher without that one asks for the whole view. First the instances of ``left`` are removed, then
    ``members`` are added or replaced: an instance that was taken out and came back at once is in both.
    """

    series: str
    number: int
    """Number of the view after this change."""
    epoch: int
    size: int | None
    waiting_for: str
    refused_peers: int = 0
    answers: AnswerChecks = AnswerChecks()
    balance: ExpertBalance | None = None
    orders: StandingOrders = StandingOrders()
    complete: bool = True
    settings: Settings | None = None
    """None: as before."""
    left: list[str] = []
    members: list[Member] = []
    loads: list[LoadChange] = []
    """Loads of other members that have changed."""


class ViewCurrent(msgspec.Struct, frozen=True, tag="current"):
    """Answer to a watcher: the newest view has this number.

    It comes after all changes up to that one.
    """

    series: str
    number: int


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """Answer to a heartbeat: the coordinator lives, and this is the epoch."""

    epoch: int
    neighbours: int
    """Instances on the asking one's host, itself included: they share its cores."""
    interval: float | None = None
    """Seconds until the next heartbeat in a large mesh; None: as in the welcome."""


FromCoordinator = (
    Welcome
    | AdmissionWait
    | AdmissionRefused
    | GroupPlan
    | PlanChange
    | Probe
    | Reach
    | Unknown
    | View
    | ViewChange
    | ViewCurrent
    | Beat
    | TakeRole
    | StandingOrders
    | Drain
    | Scale
    | OperatorAnswer
)
