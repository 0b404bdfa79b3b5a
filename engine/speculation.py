"""Which tokens probably come next, and how many of them are worth a try (pure).

Prompt lookup decoding (Saxena 2023; ``ngram`` in vLLM): where the last tokens of a request stood before in
its prompt or its output, what followed there is drafted. The next step computes the drafted tokens behind
the newest one, and a token is sampled at each of them just as it would have been a step later: with the
same seed, position and history. As far as these are the drafted ones they all count; the first that is not
counts, too, and what comes behind it does not. So the output is that of one token a step, whatever is
drafted.

Drafts cost time of the step. How long they are, and whether there are any, follows from what has come of
them so far (:class:`Trust`) and from what steps took (:class:`StepCost`): a token is drafted if it is
likelier to be taken than the part of a token's time that it costs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from engine.speculation_config import SpeculativeConfig

NOTHING: list[int] = []
MOST_INDEXED = 4096
"""Tokens of a request that a step looks through: until all are, nothing is drafted for it."""
MOST_COMPARED = 8
"""Earlier places of the same last tokens, the newest first."""


class Places:
    """Where the short runs of tokens of a growing text stand: chains of earlier places as LZ77 compressors
    keep them, of which each token costs a number and a dictionary's entry at most."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._newest: dict[int, int] = {}
        """By hash of a run: the last place where such a run ends."""
        self._before = array("i")
        """By place: the one before it with the same hash, -1 if there is none."""
        self._last_run: int | None = None
        """Hash of the run that was looked for last, which ends at the place that is taken in next."""

    def __repr__(self) -> str:
        return f"<Places of {len(self._before)} tokens>"

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the end of these tokens stood before: the place of its last token. Of several the one before
        which most tokens agree, of those the newest. None as well as long as not all tokens are taken in."""
        last, run, self._last_run = len(tokens) - 1, self._last_run, None
        if run is not None and len(self._before) == last - 1:
            self._add(run)
        elif not self._take_in(tokens, last):
            return None
        if last < self._shortest:
            return None
        self._last_run = hash(tuple(tokens[-self._shortest :]))
        place = self._newest.get(self._last_run, -1)
        return None if place < 0 else self._best(tokens, last, place)

    def _add(self, run: int) -> None:
        place = len(self._before)
        self._before.append(self._newest.get(run, -1))
        self._newest[run] = place

    def _take_in(self, tokens: Sequence[int], end: int) -> bool:
        """All tokens before ``end``; False if there are too many for now."""
        begin = len(self._before)
        for place in range(begin, min(end, begin + MOST_INDEXED)):
            if place + 1 < self._shortest:
                self._before.append(-1)
            else:
                self._add(hash(tuple(tokens[place + 1 - self._shortest : place + 1])))
        return len(self._before) >= end

    def _best(self, tokens: Sequence[int], last: int, place: int) -> int | None:
        best, most = None, self._shortest - 1
        for _ in range(MOST_COMPARED):
            if place < 0:
                break
            agreeing = 0
            while agreeing < self._longest and agreeing <= place:
                if tokens[place - agreeing] != tokens[last - agreeing]:
                    break
                agreeing += 1
            if agreeing > most:
                best, most = place, agreeing
                if agreeing == self._longest:
                    break
            place = self._before[place]
        return best


def moved(chance: float, drafted: int, accepted: int, memory: int) -> float:
    """A chance after a draft of which so many tokens were taken."""
    for taken in [1.0] * accepted + [0.0] * (accepted < drafted):
        chance += (taken - chance) / memory
    return chance


class Trust:
    """How likely the next token of a draft is to be taken, given that all before it were."""

    MEMORY = 10
    """Of drafted tokens, about so many of the last ones count."""
    LONGEST_PAUSE = 64
    """Tokens of a request that nothing is drafted for, after drafts that brought nothing."""

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self._pause = 0
        self._waits = 0

    def __repr__(self) -> str:
        return f"<Trust {self.chance:.2f}, waits {self._waits}>"

    def length(self, most: int, price: float) -> tuple[int, float]:
        """Tokens to draft at the price of each, and how many more than that they will probably bring.
        Where not even one pays, one is tried now and then all the same: texts change."""
        if self._waits > 0:
            self._waits -= 1
            return 0, 0.0
        if self.chance <= price:
            return min(most, 1), self.chance - price
        length, gain, chance = 0, 0.0, self.chance
        while length < most and chance > price:
            length += 1
            gain += chance - price
            chance *= self.chance
        return length, gain

    def learn(self, drafted: int, accepted: int, price: float) -> None:
        """Of a draft so many tokens were taken."""
        self.chance = moved(self.chance, drafted, accepted, self.MEMORY)
        if accepted:
            self._pause = 0
        elif self.chance <= price:
            self._pause = min(self.LONGEST_PAUSE, max(1, 2 * self._pause))
            self._waits = self._pause


class StepCost:
    """What a step takes, as seconds = fixed + each * tokens + extra where drafts are: least squares
    over the steps so far, of which newer ones count more, beginning from a guess.

    Where memory sets the pace a further token adds little, and drafts are nearly free; where products do, a
    drafted token costs as much as any, and only what is the same for a whole step can be spared. A step with
    drafts takes longer besides, and so does the one after it: one that only takes the rows of the step before
    on needs no packing."""

    FORGETTING = 0.995
    GUESSED_SHARE, GUESSED_EXTRA = 0.3, 0.05
    """Of a step without drafts: what its tokens cost, and what drafting adds."""
    BELIEF = 0.5
    """Steps that the guess counts as."""
    STEPS_PER_FIT = 16
    LOWEST, HIGHEST = 0.05, 0.95
    """Prices."""

    def __init__(self) -> None:
        self._sums = [0.0] * 8
        """Of the steps: 1, tokens, drafts, tokens squared, tokens with drafts; and seconds alone, times
        tokens, and with drafts."""
        self._fixed = self._each = self._extra = 0.0
        self._steps = 0

    def __repr__(self) -> str:
        return f"<StepCost of {self._steps} steps>"

    def took(self, tokens: int, drafts: bool, seconds: float) -> None:
        """A step of so many tokens, none of prompts, that has drafts or follows one that had."""
        if self._fixed:  # one that took much longer shared the cores with something else
            seconds = min(seconds, 1.5 * (self._fixed + self._each * tokens + self._extra * drafts))
        parts = (1.0, tokens, 0.0, tokens * tokens, 0.0, seconds, seconds * tokens, 0.0)
        if drafts:
            parts = (1.0, tokens, 1.0, tokens * tokens, tokens, seconds, seconds * tokens, seconds)
        keep = self.FORGETTING
        self._sums = [keep * old + new for old, new in zip(self._sums, parts, strict=True)]
        self._steps += 1
        if self._steps % self.STEPS_PER_FIT == 0:
            self._fit()

    def prices(self, rows: int) -> tuple[float, float]:
        """Of a drafted token, and of drafting at all, beside so many rows. The unit is what a token costs in
        a step of these rows without drafts: that is what each token saves that is taken."""
        if not self._fixed:
            return self.GUESSED_SHARE, self.GUESSED_EXTRA * rows
        token = (self._fixed + self._each * rows) / rows
        return min(self.HIGHEST, max(self.LOWEST, self._each / token)), self._extra / token

    def _fit(self) -> None:
        steps, tokens, drafts, squares, both, seconds, by_tokens, by_drafts = self._sums
        mean, duration = tokens / steps, seconds / steps
        share, extra = self.GUESSED_SHARE, self.GUESSED_EXTRA
        guess = np.array([(1 - share) * duration, share * duration / mean, extra * duration])
        belief = self.BELIEF * np.diag([1.0, mean * mean, 1.0])
        products = np.array([[steps, tokens, drafts], [tokens, squares, both], [drafts, both, drafts]])
        found = np.linalg.solve(
            products + belief, np.array([seconds, by_tokens, by_drafts]) + belief @ guess
        ).tolist()
        self._fixed = max(found[0], 0.01 * duration)
        self._each, self._extra = max(found[1], 0.0), max(found[2], 0.0)


class Drafter:
    """What is drafted for one request, and what came of it."""

    def __init__(self, config: SpeculativeConfig, chance: float) -> None:
        """``chance`` of a drafted token, as far as is known."""
        self._places = Places(config.prompt_lookup_min, config.prompt_lookup_max)
        self._trust = Trust(chance)

    def __repr__(self) -> str:
        return f"<Drafter {self._places!r} {self._trust!r}>"

    def draft(self, tokens: Sequence[int], most: int, price: float) -> tuple[list[int], float]:
        """What may follow these tokens, mostly nothing; and what it will probably bring beyond its price."""
        place = self._places.find(tokens)
        if place is None or most < 1:
            return NOTHING, 0.0
        length, gain = self._trust.length(most, price)
        end = len(tokens)
        found = list(tokens[place + 1 : place + 1 + length])
        while len(found) < length:  # what follows there is the end of the text, which goes on with the draft
            found.append(found[place + 1 + len(found) - end])
        return found, gain

    def learn(self, drafted: int, accepted: int, price: float) -> None:
        """Of the last draft so many tokens were taken."""
        self._trust.learn(drafted, accepted, price)


Text = tuple[Drafter, Sequence[int], int]
"""Of a request: its tokens so far, and how many may be drafted behind them."""


class Speculation:
    """Drafts of one instance."""

    PLAIN_STEPS = 4
    """Of so many steps without drafts the duration of one is noted: they are many, and alike."""
    MEMORY = 100
    """Of the drafted tokens of all requests, about so many of the last ones tell what to expect of others."""
    LONGEST_REST = 64
    """Steps whose drafts do not seem to pay, before they are tried all the same."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._cost = StepCost()
        self._price = StepCost.GUESSED_SHARE
        """Of a token drafted for the step in the making."""
        self._chance = 0.5
        self._rest = 0
        self._drafted = False
        """Whether the last step had drafts."""
        self._plain = 0

    def __repr__(self) -> str:
        return f"<Speculation up to {self._config.num_speculative_tokens} tokens, {self._cost!r}>"

    def drafter(self) -> Drafter:
        """For a request."""
        return Drafter(self._config, self._chance)

    def draft(self, texts: Sequence[Text], rows: int, room: int) -> list[list[int]]:
        """What may follow each of these texts, in a step of so many requests that has room for so many tokens
        more. All empty if what is found does not pay."""
        nothing = [NOTHING] * len(texts)
        limit = self._config.disable_by_batch_size
        if not texts or (limit is not None and rows > limit):
            return nothing
        self._price, drafting = self._cost.prices(rows)
        if not self._drafted:
            drafting *= 2  # the step after this one cannot go on from it, either
        most, price, gain = self._config.num_speculative_tokens, self._price, 0.0
        drafts = []
        for drafter, tokens, longest in texts:
            found, more = drafter.draft(tokens, min(longest, room, most), price)
            drafts.append(found)
            gain += more
            room -= len(found)
        if not any(drafts):
            return nothing
        if gain <= drafting and self._rest < self.LONGEST_REST:
            self._rest += 1
            return nothing
        self._rest = 0
        return drafts

    def learn(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        """Of a draft so many tokens were taken."""
        drafter.learn(drafted, accepted, self._price)
        self._chance = moved(self._chance, drafted, accepted, self.MEMORY)

    def took(self, tokens: int, drafts: bool, seconds: float) -> None:
        """A step without prompts."""
        with_drafts, self._drafted = drafts or self._drafted, drafts
        self._plain += not with_drafts
        if with_drafts or self._plain % self.PLAIN_STEPS == 0:
            self._cost.took(tokens, with_drafts, seconds)


def num_taken(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many tokens of a draft are those that were sampled in their places. ``sampled`` has one more."""
    for count, (drafted, token) in enumerate(zip(draft, sampled, strict=False)):
        if drafted != token:
            return count
    return len(draft)
