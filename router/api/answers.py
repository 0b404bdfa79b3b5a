"""Base classes of the answers of all APIs: pieces of samples as JSON or events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from starlette.responses import Response

from router.api.capsules import event_with_capsule, with_capsule
from router.errors import ApiError, error_body
from router.openai_api import NumericsChange, PromptTokensDetails, StreamOptions, Usage, WeightRange
from router.text.output_stream import OutputStream, TextPiece

DONE = b"data: [DONE]\n\n"

MARK = "\0"
"""Placeholder of the text in a chunk that is encoded once per sample."""

encode = msgspec.json.Encoder().encode


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def event(content: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


def named_event(content: msgspec.Struct) -> bytes:
    """A server-sent event under the name of its type, which is the struct's tag."""
    name = str(type(content).__struct_config__.tag)
    return b"event: " + name.encode() + b"\n" + event(content)


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of all APIs have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    samples: Sequence[OutputStream]
    shows_cached_tokens: bool = False
    capsule: Callable[[], bytes] | None = None
    """Makes the capsule of the finished samples; None if the client asked for none."""


class Answer(ABC):
    """The answer to one request: as a whole, or in chunks."""

    content_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    """Type of its stream."""
    comment: ClassVar[bytes] = b": keep-alive\n\n"
    """Keep-alive comment of its stream; empty where clients would not skip one."""

    def __init__(self, facts: AnswerFacts) -> None:
        self.id = facts.id
        self.created = facts.created
        self.model = facts.model
        self.samples = facts.samples
        self._shows_cached_tokens = facts.shows_cached_tokens
        self._capsule = facts.capsule

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} with {len(self.samples)} samples>"

    def body(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        """:meth:`whole`, with the capsule if there is to be one."""
        whole = self.whole(outputs)
        return whole if self._capsule is None else with_capsule(whole, self._capsule())

    def ending(self) -> bytes:
        """:meth:`closing`, with the capsule if there is to be one."""
        return self.closing() if self._capsule is None else self.closing_with(self._capsule())

    @abstractmethod
    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        """Body of an answer that is not streamed, from the pieces of each sample."""

    @abstractmethod
    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        """Events for one more piece of a sample; empty if the client would see nothing."""

    @abstractmethod
    def closing(self) -> bytes:
        """The last events of a stream."""

    def closing_with(self, capsule: bytes) -> bytes:
        """The last events of a stream, with the capsule in the last object."""
        return event_with_capsule(self.closing(), capsule)

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that cannot go on."""

    def frame(self, sample: OutputStream) -> tuple[bytes, bytes] | None:
        """Bytes around the text (as JSON) in a sample's events but the first and last.

        None if these events differ in more than their text.
        """
        return None

    @property
    def fingerprint(self) -> str | None:
        """``system_fingerprint`` of all samples; None if they are of several numerics classes, or none."""
        found = {sample.system_fingerprint for sample in self.samples}
        return found.pop() if len(found) == 1 else None

    @property
    def numerics_changes(self) -> list[NumericsChange] | msgspec.UnsetType:
        """Changes of numerics class of all samples; unset if there are none."""
        return changes_of(self.samples)

    @property
    def weight_version(self) -> str | msgspec.UnsetType:
        """Name of the newest weight version of its tokens; unset if none is known."""
        return weight_version_of(self.samples)

    @property
    def weight_versions(self) -> list[WeightRange] | msgspec.UnsetType:
        """Ranges of all samples; unset if one weight version made all."""
        return weight_versions_of(self.samples)

    def whole_usage(self) -> Usage:
        """:meth:`usage` in a whole answer, with null for details that are not known."""
        usage = self.usage()
        usage.prompt_tokens_details = usage.prompt_tokens_details or None
        return usage

    def usage(self) -> Usage:
        """Usage of all samples; a prompt with several samples counts once."""
        of_prompts = [sample for sample in self.samples if sample.is_first_of_prompt]
        prompt_tokens = sum(len(sample.prompt.prompt_ids) for sample in of_prompts)
        usage = _usage(prompt_tokens, sum(sample.num_tokens for sample in self.samples))
        usage.numerics_changes = self.numerics_changes
        if self._shows_cached_tokens:
            usage.prompt_tokens_details = PromptTokensDetails(
                sum(sample.num_cached_tokens for sample in of_prompts)
            )
        return usage


class ChunkedAnswer(Answer):
    """Answer with choices, streamed in chunks: base of completions and chat."""

    def __init__(self, stream_options: StreamOptions | None, facts: AnswerFacts) -> None:
        super().__init__(facts)
        options = stream_options or StreamOptions()
        self._includes_usage = options.include_usage is True
        self._usage_in_every_chunk = self._includes_usage and options.continuous_usage_stats is True
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By sample: bytes before and after the text in chunks of text alone."""

    @abstractmethod
    def text_chunk(self, sample: OutputStream, text: str) -> bytes:
        """The event of a piece that brings text alone."""

    @abstractmethod
    def last_chunk(self, usage: Usage | msgspec.UnsetType) -> bytes:
        """The last event of a stream: usage without choices."""

    def frame(self, sample: OutputStream) -> tuple[bytes, bytes] | None:
        if self._usage_in_every_chunk:
            return None
        frame = self._frames.get(sample.index)
        if frame is None:
            before, _, after = self.text_chunk(sample, MARK).partition(encode(MARK))
            frame = self._frames[sample.index] = (before, after)
        return frame

    def framed(self, sample: OutputStream, text: str) -> bytes:
        """The bytes of :meth:`text_chunk`, from a frame that is encoded once per sample."""
        frame = ChunkedAnswer.frame(self, sample)
        return self.text_chunk(sample, text) if frame is None else frame[0] + encode(text) + frame[1]

    def closing(self) -> bytes:
        return self.last_chunk(self.usage()) + DONE if self._includes_usage else DONE

    def closing_with(self, capsule: bytes) -> bytes:
        chunk = self.last_chunk(self.usage() if self._includes_usage else msgspec.UNSET)
        return event_with_capsule(chunk, capsule) + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def usage_so_far(self, sample: OutputStream, num_tokens: int) -> Usage | msgspec.UnsetType | None:
        """Usage in a chunk: that of its sample, null, or unset."""
        if self._usage_in_every_chunk:
            return _usage(len(sample.prompt.prompt_ids), num_tokens)
        return None if self._includes_usage else msgspec.UNSET


def changes_of(samples: Sequence[OutputStream]) -> list[NumericsChange] | msgspec.UnsetType:
    """Changes of numerics class of some samples, for the client; unset if there are none."""
    found = [
        NumericsChange(sample.index, each.after_tokens, each.before, each.after)
        for sample in samples
        for each in sample.numerics_changes
    ]
    return found or msgspec.UNSET


def weight_version_of(samples: Sequence[OutputStream]) -> str | msgspec.UnsetType:
    """Name of the newest weight version of some samples' tokens; unset if none is known."""
    newest = max(
        (span for sample in samples for span in sample.weight_spans),
        key=lambda span: span.number,
        default=None,
    )
    return msgspec.UNSET if newest is None else newest.name


def weight_versions_of(samples: Sequence[OutputStream]) -> list[WeightRange] | msgspec.UnsetType:
    """Which weight version made which tokens of some samples; unset if one made all."""
    spans = [(sample, span) for sample in samples for span in sample.weight_spans]
    if len({(span.number, span.label) for _, span in spans}) < 2:
        return msgspec.UNSET
    return [WeightRange(sample.index, span.first_token, span.name) for sample, span in spans]


def ranges_within(sample: OutputStream, num_tokens: int) -> list[WeightRange] | msgspec.UnsetType:
    """Ranges that begin within the newest tokens of a sample; unset if none does."""
    spans = sample.weight_spans_from(sample.num_tokens - num_tokens)
    found = [WeightRange(sample.index, span.first_token, span.name) for span in spans]
    return found or msgspec.UNSET


def _usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
