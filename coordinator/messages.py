"""What instances and watchers say to the coordinator, and what it answers.

The coordinator binds the socket, so it owns the words. Instances register, then send heartbeats that
carry all that is known of them: a restarted coordinator learns the world from those. Watchers (routers,
``lockstep status``, the launcher) ask for the view and get it again whenever it changes.
"""

from __future__ import annotations

import enum

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a mesh and how it is run. Instances must agree on the fields of :data:`AGREED`;
    the others are defaults for an instance that joins without settings of its own."""

    model: str
    revision: str | None
    served_model_name: tuple[str, ...]
    fingerprint: str
    """Of the checkpoint's content; see :func:`engine.checkpoint.fingerprint`."""
    dtype: str
    max_model_len: int
    block_size: int
    vocab_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    """Experts are spread over the instances, which then step in lockstep."""
    expert_placement_strategy: str
    all2all_backend: str
    data_parallel_size: int
    """Instances among which the experts are spread; 0 without expert parallelism."""
    max_num_batched_tokens: int
    max_num_seqs: int


AGREED = {
    "fingerprint": "model",
    "served_model_name": "--served-model-name",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "vocab_size": "vocabulary",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "enable_expert_parallel": "-ep",
    "expert_placement_strategy": "--expert-placement-strategy",
    "all2all_backend": "--all2all-backend",
    "data_parallel_size": "-dp",
}
"""Field -> how the user knows it."""
NEEDS_SIZE = {"enable_expert_parallel", "data_parallel_size"}
"""Fields that an instance which was not told ``-dp`` cannot know; it takes them from the mesh."""


class State(enum.StrEnum):
    """The life of an instance in the mesh."""

    LOADING = "loading"
    LOADED = "loaded"
    """Has its experts and waits for all others, to form their group."""
    READY = "ready"
    DRAINING = "draining"


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
    """Seconds since the last step while there is work; 0 without work. Large: it makes no progress."""


# ---- to the coordinator


class Register(msgspec.Struct, frozen=True, tag="register", kw_only=True):
    """An instance wants in. Repeated until it is answered with Welcome or Refused."""

    instance: str
    """Random name of this process; a restarted process has another."""
    rank: int | None
    """None for any free one."""
    size: int | None
    """``-dp`` as given to this instance, if it was."""
    settings: Settings | None
    """None to learn them."""
    host: str
    pid: int
    epoch: int = 0
    """The last epoch it knew, for a coordinator that was restarted."""


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


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """An instance is about to end; it holds no request any more."""

    instance: str


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Answer with the view now, and push it when it changes; repeated as a sign of life."""

    watcher: str


ToCoordinator = Register | Heartbeat | Leave | Watch


# ---- from the coordinator


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    rank: int
    settings: Settings
    epoch: int
    heartbeat_interval: float
    """Seconds."""


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Not yet; ask again soon."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Never, as things are: the reason says what to change."""

    reason: str


class Peer(msgspec.Struct, frozen=True):
    """One member of a group to form."""

    rank: int
    address: str
    host: str


class Form(msgspec.Struct, frozen=True, tag="form", kw_only=True):
    """All instances have their experts: form the group of this epoch, then be ready."""

    epoch: int
    store: str
    """The rendezvous, host:port, at the instance of the lowest rank."""
    peers: list[Peer]
    """By rank."""


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


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Answer to a heartbeat: the coordinator lives, and this is the epoch."""

    epoch: int
    neighbours: int
    """Instances on the asking one's host, itself included: they share its cores."""


FromCoordinator = Welcome | Wait | Refused | Form | Unknown | View | Beat
