"""What the HTTP layer needs of the mesh behind it, as an interface.

:class:`router.dispatch.client.MeshClient` is the real one; tests use a scripted one.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from coordinator.messages import AdapterSource, ExpertBalance, Role, Settings
from coordinator.numerics import UNKNOWN as UNKNOWN_CLASS
from coordinator.numerics import Numerics
from coordinator.pooled_model import PooledModel
from engine.messages import Delta, InstanceReport
from engine.pieces.pool import rooted
from engine.pooling_params import PoolingParams
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams

STARTING_WEIGHTS = "default"
"""Name of the weights that the mesh was started with, as with SGLang."""


class MeshError(Exception):
    """A request that the mesh cannot take, in the client's terms.

    ``kind`` is the ``type`` of the error body (``ServiceUnavailableError`` ...). ``is_final``: another try
    would only end more instances.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after = retry_after
        self.is_final = is_final
        self.num_lost = 0
        """Instances that ended under the request since its last token."""


class ServedModel(msgspec.Struct, frozen=True):
    """The model of the mesh, as clients see it."""

    names: tuple[str, ...]
    """Names that requests may use; the first is reported."""
    directory: str
    """Its own, also with --tokenizer; the tokenizer's where the model is not on this host."""
    vocab_size: int
    max_model_len: int
    fingerprint: str = ""
    """Digest of the checkpoint's files and of samples of its weights."""
    adapters: tuple[AdapterSource, ...] = ()
    """Low-rank adapters, each of which requests may name in place of the model."""
    ranks: int = 1
    """Tensor-parallel ranks of each instance, which decide the bits of an adapter's answers."""
    pooling: PooledModel | None = None
    """What it computes with ``--runner pooling``; None: it generates tokens."""

    def knows(self, name: str) -> bool:
        """Whether requests may use this name."""
        return name in self.names or any(each.name == name for each in self.adapters)

    def adapter_of(self, name: str) -> str:
        """Digest of the adapter of this name; empty for the model's names, and for none.

        Raises:
            LookupError: requests may not use the name (any more).
        """
        if not name or name in self.names:
            return ""
        for each in self.adapters:
            if each.name == name:
                return each.digest
        raise LookupError(f"no model and no adapter is named {name}")


def served_model(settings: Settings, directory: str) -> ServedModel:
    """The model that settings of a mesh describe, with its tokenizer's directory."""
    return ServedModel(
        names=settings.served_model_name,
        directory=directory,
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        fingerprint=settings.fingerprint,
        adapters=() if settings.lora is None else settings.lora.adapters,
        ranks=settings.tensor_parallel_size,
        pooling=settings.pooling,
    )


class Known(msgspec.Struct, frozen=True):
    """First tokens of a sample, which a router that is gone has handed out."""

    token_ids: list[int]
    numerics: str | None
    """Name of the numerics class that gave the first of them."""
    weight_spans: list[WeightSpan]


class Prompt(msgspec.Struct, frozen=True):
    """One sample to generate."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    asked: int = 0
    """Tokens that the client itself asked for; an instance with less room would end early."""
    sample_index: int = 0
    rank: int | None = None
    """The instance that the client asked for (X-data-parallel-rank)."""
    preferred: int | None = None
    """The instance that an endpoint picker chose; another one will do."""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """Digest of its low-rank adapter; empty for none."""
    images: tuple[PromptImage, ...] = ()
    session: str = ""
    """Equal for all requests of a session: a hint to keep them together."""
    traceparent: str = ""
    """W3C Trace Context to pass to the instance; empty for none."""
    repeatable: bool = False
    """Whether the same request should get the same answer: it is greedy, seeded or recorded."""
    scored_from: int = 0
    """First token of the prompt whose log-probability is wanted, where some are."""
    routed_experts: bool = False
    """Whether the experts of its tokens are wanted."""
    background: bool = False
    """Whether no client waits for it.

    It stays where it is sent, is counted nowhere, and goes after all others.
    """

    known: Known | None = None
    """Tokens behind which it goes on."""
    pooling: PoolingParams | None = None
    """What to answer with in place of tokens; None: it generates.

    Its generation has one delta, with ``Delta.pooled``; or with ``Delta.error``, to be answered with 500.
    """

    @property
    def root(self) -> str:
        """Root of the names of its blocks."""
        return rooted(self.cache_salt, self.adapter)


class NumericsSwitch(msgspec.Struct, frozen=True):
    """A sample that went on in another numerics class."""

    after_tokens: int
    """Tokens of the sample before the change."""
    before: str | None
    """Name of the class that computed the last of them; None if unknown."""
    after: str | None
    """Name of the class that computed the next one; None if unknown."""

    def __str__(self) -> str:
        return f"{self.before or UNKNOWN_CLASS} -> {self.after or UNKNOWN_CLASS}"


class WeightSpan(msgspec.Struct, frozen=True):
    """Tokens of a sample that one weight version made, up to the next span."""

    first_token: int
    """Tokens of the sample before it."""
    number: int
    """Number of the weight version; 0 for the weights that the mesh was started with."""
    label: str = ""
    """Name that the trainer gave the version."""

    @property
    def name(self) -> str:
        """``weight_version`` in answers: the label, or the number where there is none."""
        return self.label or (str(self.number) if self.number else STARTING_WEIGHTS)


class ShadowResult(enum.StrEnum):
    """How a shadow check ended: the label of the metric."""

    EQUAL = "equal"
    ODD = "odd"
    """Two of three instances agree, and one is named."""
    UNDECIDED = "undecided"
    """Two instances differ, and no third one could decide."""
    LOST = "lost"
    """The second instance died, left or refused before it had computed the request."""
    DROPPED = "dropped"
    """No instance of the class was idle in time, or too many checks waited."""
    SKIPPED = "skipped"
    """Not comparable: it moved, failed or is too long, or a class has changed."""


class TokenSink(Protocol):
    """Consumer of one sample's tokens, without a task: it writes or keeps them at once.

    :class:`router.dispatch.delivery.Delivery` and :class:`router.dispatch.stream.Stream` call it in the event
    loop, as soon as the message of an instance is there. :mod:`router.api.shortcut` has the real ones.
    """

    def take(self, delta: Delta) -> bool:
        """Consume a delta; False, or an exception, leaves it to the reader of the generation."""
        ...

    def take_token(self, token_id: int, now: float) -> bool:
        """Consume a delta of a single token and nothing else, as nearly every one is.

        ``now`` is the time of ``time.perf_counter``.
        """
        ...


class Generation(Protocol):
    """One sample in flight. Iterating ends after the delta that has a finish_reason."""

    @property
    def rank(self) -> int | None:
        """The instance that it runs on now, None while it has none (for metrics)."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """Name of the numerics class of the instance that gave the first token.

        Before that, the class of the instance it runs on; None where none is known.
        """
        ...

    @property
    def first_class(self) -> Numerics | None:
        """The numerics class that ``fingerprint`` names; None where its name alone is known.

        The mesh may have no instance of it by now: their weights have changed.
        """
        ...

    @property
    def numerics_changes(self) -> Sequence[NumericsSwitch]:
        """Changes of its numerics class after the first token.

        The same list grows with later ones.
        """
        ...

    @property
    def weight_spans(self) -> Sequence[WeightSpan]:
        """Weight versions that made its tokens; empty before the first token.

        The same list grows with later ones.
        """
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def hand_over(self, sink: TokenSink) -> None:
        """Offer each delta to ``sink`` first while the reader waits.

        The reader sleeps on if the sink consumes the delta. A delta that the sink refuses goes to the reader;
        an exception of the sink is raised in the reader.
        """
        ...

    def close(self) -> None:
        """Forget the request; aborts it where it runs. Harmless after the end, and twice."""
        ...


class MeshFacts(Protocol):
    """State of the mesh at the moment of the call, for metrics and load reports."""

    @property
    def model(self) -> ServedModel | None:
        """Model of the mesh; None until the first instance has registered."""
        ...

    def reports(self) -> Mapping[int, InstanceReport]:
        """The newest report of each instance, by rank."""
        ...

    def epoch(self) -> int | None:
        """Epoch of the newest view; None before the first view."""
        ...

    def block_size(self) -> int | None:
        """Tokens of a KV block; None while the mesh's settings are unknown."""
        ...

    def instances_by_state(self) -> Mapping[str, int]:
        """Number of instances in each state (loading, ready, draining ...)."""
        ...

    def numerics(self) -> Mapping[Numerics, list[int]]:
        """Ranks of the instances in each numerics class, as far as they are known."""
        ...

    def roles(self) -> Mapping[int, Role]:
        """Role of each instance, by rank."""
        ...

    def refused_peers(self) -> Mapping[str, int]:
        """Connections that were refused, by the process that did it.

        The keys are ``coordinator`` and the ranks of instances.
        """
        ...

    def balance(self) -> ExpertBalance | None:
        """How the load of experts is balanced; None where it is not."""
        ...

    def choices(self) -> Mapping[str, int]:
        """Outcomes of routing so far, by the names of :data:`router.metrics.label_counts.OUTCOMES`."""
        ...

    def numerics_changes(self) -> Mapping[str, int]:
        """Requests that went on in another numerics class so far.

        ``true`` counts those whose answers were promised equal, ``false`` the others.
        """
        ...

    def shadow_checks(self) -> Mapping[str, int]:
        """Shadow checks so far, by the names of :class:`ShadowResult`."""
        ...

    def shadow_differences(self) -> Mapping[str, int]:
        """Shadow checks in which an instance computed otherwise than two others, by its rank."""
        ...


class Generates(Protocol):
    """Where samples are generated."""

    @property
    def model(self) -> ServedModel | None:
        """Model of the mesh; None until the first instance has registered."""
        ...

    def generate(self, prompt: Prompt) -> Generation:
        """Send a request to an instance.

        Raises:
            MeshError: no instance can take it (503), or the one asked for does not exist (400).
        """
        ...


class Mesh(MeshFacts, Generates, Protocol):
    """Mesh of instances as the HTTP layer sees it."""

    @property
    def healthy(self) -> bool:
        """Whether at least one instance is ready and makes progress."""
        ...

    def check_room(self) -> None:
        """Refuse a request early if no instance has room, before its prompt is made.

        Raises:
            MeshError: nobody could take any request now (503).
        """
        ...
