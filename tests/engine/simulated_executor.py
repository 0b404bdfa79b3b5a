"""An executor without a model, whose tokens depend on every readable cached position.

The "keys and values" of a position are a digest of the token there and of all before it; the next token
is a digest of what the block table shows. A wrong block, a stale one, or one shared by mistake changes
the output, so comparing with :func:`expected_output` proves the scheduler and the block pool right.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from engine.config.scheduler import most_tokens
from engine.messages import TokenLogprobs
from engine.step import ExtraTokens, Step, StepResult

VOCAB = 50


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def next_token(token_ids: list[int]) -> int:
    """What the simulated model says after a context."""
    state = 0
    for position, token in enumerate(token_ids):
        state = _digest(state, position, token)
    return state % VOCAB


def expected_output(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class SimulatedExecutor:
    """Checks every step while it runs it."""

    image_encoder = None

    def __init__(
        self,
        *,
        block_size: int,
        budget: int,
        max_rows: int,
        in_flight: int = 1,
        checks_reads: bool = True,
        computes_apart: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        """An executor of simulated steps.

        Without ``checks_reads`` a row may read what is not its context, as one of an aborted request may when
        its step is run again; its writes and samples then show it.
        """
        self._checks_reads = checks_reads
        self.in_flight = in_flight
        self.runs_ahead = runs_ahead
        self.needs_tokens = in_flight > 1 and not runs_ahead
        self.computes_apart = self.has_workers = computes_apart
        self._results: deque[StepResult] = deque()
        self._block_size = block_size
        self._max_tokens = most_tokens(budget)
        self._max_rows = max_rows
        self._tokens: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._wants_prompt_logprobs: dict[int, bool] = {}
        self._cache: dict[tuple[int, int], int] = {}
        self.num_steps = 0
        self.computed_tokens = 0

    def _compute(self, step: Step) -> StepResult:
        self.num_steps += 1
        self.computed_tokens += step.num_tokens
        assert 0 < step.num_tokens <= self._max_tokens
        rows = list(zip(step.slots, step.starts, step.counts, strict=True))
        assert 0 < len(rows) <= self._max_rows
        assert len(set(step.slots)) == len(rows)
        kinds = [0 if count == 1 else 1 if i in step.drafts else 2 for i, count in enumerate(step.counts)]
        assert kinds == sorted(kinds)
        admitted = {admit.slot for admit in step.admits}
        for admit in step.admits:
            self._tokens[admit.slot] = list(admit.token_ids)
            self._prompts[admit.slot] = admit.num_prompt
            self._tables[admit.slot] = []
            self._wants_prompt_logprobs[admit.slot] = admit.params.prompt_logprobs is not None
        for index, (slot, start, count) in enumerate(rows):
            table = self._tables[slot]
            del table[-(-start // self._block_size) :]  # it is there if this row runs again
            if slot in admitted:
                table.clear()
            table += step.new_blocks.get(index, [])
            draft = step.drafts.get(index, [])
            if index not in step.partial:
                del self._tokens[slot][start + count - len(draft) :]
            if step.tokens and kinds[index] < 2:
                assert step.tokens[index] == self._tokens[slot][start]
            self._tokens[slot] += draft
        self._write(step)
        tokens, prompt_logprobs = [], {}
        further = {}
        for index, (slot, start, count) in enumerate(rows):
            draft = step.drafts.get(index)
            if draft:
                first, *behind = self._sample_draft(slot, start, draft)
                tokens.append(first)
                if behind:
                    further[index] = ExtraTokens(behind)
                continue
            tokens.append(self._sample(slot, start, count, index not in step.partial))
            if self._wants_prompt_logprobs[slot]:
                prompt_logprobs[index] = self._prompt_logprobs(slot, start, count)
        return StepResult(tokens, {}, prompt_logprobs, further)

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """Computed at once, answered later."""
        assert len(self._results) < self.in_flight
        self._results.append(self._compute(step))

    def finish(self) -> StepResult:
        return self._results.popleft()

    def forget(self) -> None:
        """The answers of all steps under way."""
        self._results.clear()

    def check(self) -> None:
        return

    def expert_times(self) -> None:
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        return {}

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._block_size)
        return self._tables[slot][index], offset

    def _write(self, step: Step) -> None:
        """All rows write before any reads, as each layer does.

        A position builds on the one before it.
        """
        written: dict[tuple[int, int], int] = {}
        for start, end, slot in sorted(zip(step.starts, step.ends, step.slots, strict=True)):
            for position in range(start, end):
                before = 0 if position == 0 else self._cache[self._place(slot, position - 1)]
                place = self._place(slot, position)
                assert place not in written, "two rows write one place"
                value = _digest(before, position, self._tokens[slot][position])
                written[place] = self._cache[place] = value

    def _sample(self, slot: int, start: int, count: int, sample: bool) -> int | None:
        ids = self._tokens[slot]
        assert sample == (start + count == len(ids))
        state = 0
        for position, token in enumerate(ids[: start + count]):
            state = _digest(state, position, token)
            read = self._cache[self._place(slot, position)]
            assert read == state or not self._checks_reads, "a row reads what is not its context"
            state = read
        if not sample:
            return None
        ids.append(state % VOCAB)
        return ids[-1]

    def _sample_draft(self, slot: int, start: int, draft: list[int]) -> list[int]:
        """Token by token, as long as what is sampled is what was drafted."""
        ids = self._tokens[slot]
        del ids[start + 1 :]
        sampled = []
        for place in range(len(draft) + 1):
            token = self._sample(slot, start + place, 1, True)
            assert token is not None
            sampled.append(token)
            if place == len(draft) or token != draft[place]:
                break
        assert ids[start + 1 :] == sampled
        return sampled

    def _prompt_logprobs(self, slot: int, start: int, count: int) -> list[TokenLogprobs]:
        last = min(start + count, self._prompts[slot] - 1)
        return [TokenLogprobs(self._tokens[slot][p], -1.0, 1, [], []) for p in range(start + 1, last + 1)]
