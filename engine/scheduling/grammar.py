"""Grammars of structured outputs: which tokens may come next (no torch, no sockets).

A grammar is text in llguidance's own form (JSON, see :mod:`router.turns.structured`), and one matcher per
request follows it. Looking at what may come next changes nothing; only :meth:`Grammar.take`, called when a
step is over, moves on. So a step that is cut short and run again has the same mask and gives the same token.
An instance that resumes a request of another one reads the tokens that the client already has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.model.tokenizer_files import TOKENIZER, TokenizerFilesError, tokenizer_directory
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.uint8]
"""One bit per token, the lowest bit of a byte first."""

UNCHANGED = SamplingParams()
"""Parameters that leave a grammar's masks as they are."""
MAX_LEXER_STATES = 20_000
"""Lexer states of one grammar: 1 to 3 kB each, held while its request runs."""


class GrammarError(ValueError):
    """A grammar or a tokenizer that cannot be used.

    Clients read the message.
    """


class Vocabulary:
    """Tokens of the model, in the form that grammars compare."""

    def __init__(self, tokenizer: LLTokenizer, size: int, eos_ids: Sequence[int]) -> None:
        """``size``: of the model's vocabulary, which is the width of its logits."""
        self.tokenizer = tokenizer
        self.size = size
        self.eos_ids = tuple(eos_ids)
        self._words = -(-int(tokenizer.vocab_size) // 32)
        self.num_bytes = -(-size // 8)
        """Bytes of a mask."""

    def __repr__(self) -> str:
        return f"<Vocabulary of {self.size} tokens, ends with {self.eos_ids}>"

    def bits_of(self, ids: Iterable[int]) -> Bits:
        """The mask that allows these tokens only."""
        flags = np.zeros(self.num_bytes * 8, dtype=np.uint8)
        flags[list(ids)] = 1
        return np.packbits(flags, bitorder="little")

    def allowed(self, matcher: LLMatcher) -> Bits:
        """The tokens that a matcher accepts next; none if it has failed."""
        bits = np.zeros(self._words * 4, dtype=np.uint8)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, len(bits))
        if matcher.is_error():
            bits[:] = 0  # the library would end the text here, as if all were well
        if len(bits) < self.num_bytes:
            bits = np.pad(bits, (0, self.num_bytes - len(bits)))
        bits = bits[: self.num_bytes]
        if spare := -self.size % 8:
            bits[-1] &= 0xFF >> spare
        return bits


def load_vocabulary(directory: Path, size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """Read a model's tokenizer.json: about a second for 150,000 tokens, with the GIL held.

    Raises:
        GrammarError: there is none, or llguidance does not know its kind.
    """
    if not eos_ids:
        raise GrammarError("the model has no end-of-sequence token to end a structured output with")
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise GrammarError(f"the package llguidance cannot be loaded ({error}): pip install it") from error
    try:
        text = (tokenizer_directory(directory) / TOKENIZER).read_text(encoding="utf-8")
    except (OSError, TokenizerFilesError) as error:
        raise GrammarError("the instance has no tokenizer.json beside the model's weights") from error
    ends = list(eos_ids)
    try:
        try:
            tokenizer = LLTokenizer(text, n_vocab=size, eos_token=ends)
        except ValueError:  # it has more tokens than the model
            tokenizer = LLTokenizer(text, eos_token=ends)
    except Exception as error:  # the package raises nothing more special
        raise GrammarError(
            f"the model's tokenizer cannot be used for structured outputs: {first_line(error)}"
        ) from error
    return Vocabulary(tokenizer, size, eos_ids)


def compile_grammar(text: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at the beginning of a grammar, to be copied for each request.

    Raises:
        GrammarError: the grammar is wrong, too large, or lets no answer begin.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    if not vocabulary.allowed(matcher).any():
        raise GrammarError(f"no answer can follow the grammar ({why_stopped(matcher)})")
    return matcher


class Grammar:
    """Progress of one request's answer in its grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        params: SamplingParams = UNCHANGED,
        *,
        stop_ids: Iterable[int] = (),
        output_ids: Sequence[int] = (),
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """``matcher`` is this request's own, at the beginning of the grammar.

        ``stop_ids``: tokens that end the answer, which ``params.min_tokens`` keeps from coming too early.
        ``output_ids``: tokens that are there already. ``on_error``: called when the library fails, not when
        an answer merely does not follow.

        Raises:
            GrammarError: ``output_ids`` do not follow the grammar.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._on_error = on_error
        self._min_tokens, allowed = params.min_tokens, params.allowed_token_ids
        self._ends = vocabulary.bits_of(vocabulary.eos_ids) if params.ignore_eos else None
        self._stops = vocabulary.bits_of(stop_ids) if params.min_tokens else None
        self._within = None if allowed is None else vocabulary.bits_of(allowed)
        self._has_bad_words = bool(params.bad_words)
        self._problem: str | None = None
        self.draft_masks: list[bytes] = []
        """Masks behind the newest token and each token of the last draft."""
        self.ended = False
        """Whether its last token was the end of the sequence."""
        for token_id in output_ids:
            if (problem := self.take(token_id)) is not None:
                raise GrammarError(problem)

    def __repr__(self) -> str:
        state = "ended" if self.ended else self._problem or "under way"
        return f"<Grammar {state}>"

    def mask(self, num_output: int) -> bytes | None:
        """Mask of the tokens that may follow ``num_output`` ones; None if there are none.

        In that case :meth:`take` fails, whatever token it gets.

        Stop tokens before ``min_tokens``, and an end that is to be ignored, are left out, unless the grammar
        lets nothing else follow.
        """
        bits = self._bits(self._matcher, num_output)
        if bits is None:
            stopped = self._matcher.is_error()
            self._fail(why_stopped(self._matcher) if stopped else "none of allowed_token_ids may follow")
            return None
        return bits.tobytes()

    def follow(self, draft: Sequence[int], num_output: int) -> int:
        """Number of a draft's first tokens behind which the answer can go on.

        Leaves :attr:`draft_masks`. A copy follows the draft, so that this answer stays where it is.
        """
        matcher, masks = self._matcher.deep_copy(), []
        bits = None if self._problem is not None else self._bits(matcher, num_output)
        for token_id in draft:
            if bits is None:
                break
            masks.append(bits.tobytes())
            is_allowed = bits[token_id >> 3] >> (token_id & 7) & 1
            if not is_allowed or token_id in self._vocabulary.eos_ids or not matcher.consume_token(token_id):
                break
            bits = self._bits(matcher, num_output + len(masks))
        else:
            if bits is not None:
                masks.append(bits.tobytes())
        self.draft_masks = masks
        return max(0, len(masks) - 1)

    def _bits(self, matcher: LLMatcher, num_output: int) -> Bits | None:
        bits = self._vocabulary.allowed(matcher)
        if self._within is not None:
            bits = bits & self._within
        if not bits.any():
            return None
        for unwanted in (self._stops if num_output < self._min_tokens else None, self._ends):
            if unwanted is not None and (rest := bits & ~unwanted).any():
                bits = rest
        return bits

    def take(self, token_id: int) -> str | None:
        """Advance by this token; returns the problem if the grammar does not allow it."""
        if self._problem is None and not self._matcher.consume_token(token_id):
            self._fail(why_refused(self._matcher, token_id, has_bad_words=self._has_bad_words))
        self.ended = token_id in self._vocabulary.eos_ids
        return self._problem

    def _fail(self, reason: str) -> None:
        self._problem = f"the structured output cannot go on: {reason}"
        if self._matcher.is_error():
            self._on_error()


def why_stopped(matcher: LLMatcher) -> str:
    """Message for a matcher that accepts nothing more, though it should."""
    reason = str(matcher.stop_reason())
    return {
        "NoExtension": "no token can follow",
        "NoExtensionBias": "no token can follow",
        "LexerTooComplex": "it is too complex",
        "ParserTooComplex": "it is too complex",
    }.get(reason, first_line(matcher.get_error() or reason))


def why_refused(matcher: LLMatcher, token_id: int, *, has_bad_words: bool = False) -> str:
    """Message for a token that was not accepted: no fit, or limits reached.

    Masks let no such token be sampled, unless bad words exclude all that are in the mask.
    """
    error = first_line(matcher.get_error() or "")
    if error.startswith("lexer error"):
        return f"its grammar is too complex ({error.removeprefix('lexer error: ')})"
    if has_bad_words:
        return "bad_words exclude every token that may come next"
    return f"token {token_id} does not follow its grammar"


def first_line(error: object) -> str:
    """First line of the library's error, without its picture of the place."""
    return (str(error).strip().splitlines() or ["unknown error"])[0]
