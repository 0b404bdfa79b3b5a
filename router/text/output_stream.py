"""Text side of one sample of a request: token ids in, text out (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from coordinator.numerics import Numerics
from engine.messages import Delta, FinishReason, RoutedExperts, TokenLogprobs
from engine.sampling import SamplingParams
from router.errors import from_failure
from router.mesh import NumericsSwitch, Prompt, WeightSpan
from router.recorded import RecordedSample, Recorder
from router.text.prompt_text import NO_TEXT, PromptText
from router.text.stops import StopStrings
from router.text.tokens import Tokenizer


class TextPiece(msgspec.Struct, gc=False):
    """Text, tokens and log-probabilities that a delta adds to a sample, or all deltas."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One per token, if requested."""
    offsets: list[int] = []
    """Where in the generated text each token begins, if log-probabilities are requested."""
    cuts: list[int] = []
    """Where in ``text`` each token but the first begins, if there are several."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def parts(self) -> list[tuple[str, int]]:
        """The text, cut where its tokens begin, and the number of tokens of each part."""
        if not self.cuts:
            return [(self.text, len(self.token_ids))]
        return [(self.text[begin:end], 1) for begin, end in pairwise([0, *self.cuts, len(self.text)])]


class OutputStream:
    """Text of one sample, a choice of the answer, while it is generated."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        shown: PromptText = NO_TEXT,
        stops: StopStrings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``shown``: the prompt as an answer may repeat it.

        ``recorder`` gets the tokens as instances gave them, if their log-probabilities come with them.
        """
        self.index = index
        self.prompt = prompt
        self.prompt_text = shown.text
        self.prompt_offsets = shown.offsets
        """Where in that text its tokens begin, if the client gave it."""
        self.num_samples = params.n
        """How many samples of the same prompt there are."""
        self.fingerprint: str | None = None
        """Name of the numerics class in which its first token was computed."""
        self.first_class: Numerics | None = None
        """That class; None where its name alone is known."""
        self.known_changes: Sequence[NumericsSwitch] = ()
        """Changes of its numerics class, also between tokens that are not read yet."""
        self.known_weights: Sequence[WeightSpan] = ()
        """Weight versions that made its tokens, also tokens that are not read yet."""
        self.first_token_at = 0.0
        """When its first token came, on the clock of ``time.perf_counter``."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the instance of its first token had in its cache."""
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.routed: list[RoutedExperts] = []
        """Experts of its tokens, in parts."""
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._drops_output = params.max_tokens == 0
        self._min_tokens = params.min_tokens
        self._wants_logprobs = params.logprobs is not None
        self._shows_stop_token = params.include_stop_str_in_output
        self._plain_end = None if params.ignore_eos else tokenizer.eos_id
        """The end-of-sequence token that is not reported as ``stop_reason``; others are (as in vLLM)."""
        self._length = 0
        """Characters that the detokenizer has returned."""
        self._kept: list[int] = []
        """Counted tokens whose text is read with the next delta."""
        self.detokenizer = tokenizer.detokenizer(
            prompt.prompt_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._search = stops.search(include_in_output=params.include_stop_str_in_output) if stops else None
        self._recorder = recorder
        self.is_text_alone = not (
            self._drops_output or self._wants_logprobs or self._search or recorder or prompt.routed_experts
        )
        """Its tokens bring text and nothing else, and no text ends it."""

    def __repr__(self) -> str:
        return f"<OutputStream {self.prompt.request_id}: {self.num_tokens} tokens, {self.finish_reason}>"

    @property
    def is_first_of_prompt(self) -> bool:
        return self.prompt.sample_index == 0

    @property
    def numerics_changes(self) -> list[NumericsSwitch]:
        """Changes of numerics class between its tokens so far."""
        return [change for change in self.known_changes if change.after_tokens < self.num_tokens]

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """Weight versions that made its tokens so far, or computed its prompt alone."""
        return self.weight_spans_from(0)

    def weight_spans_from(self, first_token: int) -> list[WeightSpan]:
        """Those of its weight spans that begin at a token or later."""
        most = max(1, self.num_tokens)
        return [span for span in self.known_weights if first_token <= span.first_token < most]

    @property
    def system_fingerprint(self) -> str | None:
        """Its numerics class; behind it the weight versions where there are several."""
        spans = self.weight_spans
        if self.fingerprint is None or len(spans) < 2:
            return self.fingerprint
        return "-".join([self.fingerprint, "weights", *(str(span.number) for span in spans)])

    @property
    def needs_mesh(self) -> bool:
        """Whether a token has to be computed, unlike for a prompt that is only echoed."""
        asks = self.prompt.params.prompt_logprobs is not None or self.prompt.routed_experts
        return not self._drops_output or asks

    @property
    def num_values(self) -> int:
        """Number of tokens and log-probabilities for the answer so far.

        The time to make the answer is proportional to it.
        """
        params = self.prompt.params
        of_prompt = len(self.prompt_logprobs) * (1 + (params.prompt_logprobs or 0))
        of_prompt += sum(len(each.ids) // 2 for each in self.routed)
        return of_prompt + self.num_tokens * (1 + (params.logprobs or 0))

    @property
    def records_images(self) -> bool:
        """Whether its capsule has images: megabytes, which take long to write."""
        return self._recorder is not None and bool(self.prompt.images)

    @property
    def may_stop(self) -> bool:
        """Whether stop strings may end it at any delta."""
        return self._search is not None

    @property
    def recorded(self) -> RecordedSample:
        """Sampled tokens of an ended sample that has a recorder."""
        assert self._recorder is not None, "it was asked to record"
        assert self.finish_reason is not None, "it has ended"
        return self._recorder.sample(self.finish_reason, self._stop_reason)

    def keep(self, token_id: int) -> int:
        """Count its next token, where text is all; :meth:`take` gives it with the next delta.

        Returns how many are kept.
        """
        self.num_tokens += 1
        self._kept.append(token_id)
        return len(self._kept)

    def read(self, token_ids: list[int]) -> str:
        """Text of its next tokens, where text is all and more tokens follow."""
        self.num_tokens += len(token_ids)
        if len(token_ids) == 1:
            return self.detokenizer.step(token_ids[0])
        return "".join(map(self.detokenizer.step, token_ids))

    def take(self, delta: Delta) -> TextPiece:
        """The piece of text that the next delta of the mesh gives.

        After a piece with a ``finish_reason``, no more deltas may come.

        Raises:
            ApiError: the delta reports that the request failed.
        """
        if self._kept:
            delta = self._with_kept(delta)
        if (
            self.is_text_alone
            and delta.finish_reason is None
            and delta.prompt_logprobs is None
            and (self.num_tokens or not delta.num_cached_tokens)
            and len(delta.token_ids) == 1
        ):  # nearly every one
            return TextPiece(self.read(delta.token_ids), delta.token_ids)
        if delta.finish_reason is FinishReason.ERROR:
            self.finish_reason = FinishReason.ERROR
            raise from_failure(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.routed_experts is not None:
            self.routed.append(delta.routed_experts)
        if not self.num_tokens:  # where a request goes on, its prompt may have come along
            self.num_cached_tokens = delta.num_cached_tokens
        if self._drops_output:
            return self._finish(TextPiece(), FinishReason.LENGTH)
        piece = self._read(delta)
        if delta.finish_reason is not None and self.finish_reason is None:
            piece.text += self._flush()
            if not self._finish_if_matched(piece):
                stop_reason = None if delta.stop_reason == self._plain_end else delta.stop_reason
                self._finish(piece, delta.finish_reason, stop_reason)
        return piece

    def _with_kept(self, delta: Delta) -> Delta:
        kept, self._kept = self._kept, []
        self.num_tokens -= len(kept)  # they are counted again
        return msgspec.structs.replace(delta, token_ids=[*kept, *delta.token_ids])

    def _read(self, delta: Delta) -> TextPiece:
        """The piece of a delta's tokens, up to a stop string."""
        piece = TextPiece(
            token_ids=delta.token_ids, logprobs=delta.logprobs or [] if self._wants_logprobs else []
        )
        last = len(delta.token_ids) - 1
        hides_last = delta.finish_reason is FinishReason.STOP and not self._shows_stop_token
        if self.is_text_alone:  # the same as below in fewer steps
            self.num_tokens += last + 1
            texts = [*map(self.detokenizer.step, delta.token_ids[:last] if hides_last else delta.token_ids)]
            piece.text, piece.cuts = "".join(texts), [*accumulate(map(len, texts))][: max(0, last)]
            return piece
        for position, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if position:
                piece.cuts.append(len(piece.text))
            if self._wants_logprobs:
                piece.offsets.append(self._length)
            if hides_last and position == last:
                break
            text = self.detokenizer.step(token_id)
            if not text:
                continue
            piece.text += self._certain(text)
            if self._finish_if_matched(piece):
                piece.token_ids = piece.token_ids[: position + 1]
                piece.logprobs = piece.logprobs[: position + 1]
                break
        if self._recorder is not None:
            self._recorder.add(piece.token_ids, delta.logprobs or [])
        return piece

    def _certain(self, text: str) -> str:
        """Text from the detokenizer, less what may yet become a stop string."""
        self._length += len(text)
        if self._search is None:
            return text
        return self._search.feed(text, armed=self.num_tokens > self._min_tokens)

    def _flush(self) -> str:
        """Text that was held back until the end."""
        text = self._certain(self.detokenizer.flush())
        return text + self._search.flush() if self._search is not None else text

    def _finish_if_matched(self, piece: TextPiece) -> bool:
        if self._search is None or self._search.matched is None:
            return False
        self._finish(piece, FinishReason.STOP, self._search.matched)
        return True

    def _finish(self, piece: TextPiece, reason: str, stop_reason: int | str | None = None) -> TextPiece:
        self.finish_reason = piece.finish_reason = str(reason)
        self._stop_reason = piece.stop_reason = stop_reason
        return piece


def join(pieces: Sequence[TextPiece]) -> TextPiece:
    """All pieces of a sample as one."""
    whole = TextPiece("".join([piece.text for piece in pieces]))
    for piece in pieces:
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.offsets += piece.offsets
    if pieces:
        whole.finish_reason, whole.stop_reason = pieces[-1].finish_reason, pieces[-1].stop_reason
    return whole
