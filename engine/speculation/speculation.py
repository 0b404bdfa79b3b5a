"""Speculative decoding: whose proposals to draft, and how many tokens (pure).

Proposals come from the text of a request (prompt lookup decoding, Saxena 2023; ``ngram`` in vLLM) or from a
small model, which gives them at the end of the step before (:mod:`engine.speculation.proposers`). The next
step computes the drafted tokens behind the newest one. A token is sampled at each of them just as it would
have been a step later: with the same seed, position and history. As long as sampled tokens equal the drafted
ones, all count; the first that differs counts, too, and the rest do not. So the output is that of one token a
step, whatever is drafted.

Drafts cost time of the step. How long they are, and whether there are any, follows from what has come of them
so far and from what steps took (:mod:`engine.speculation.draft_prices`): a token is drafted if it is likelier
to be taken than the part of a token's time that it costs. A model's passes are part of that price, which is
paid when the model is asked. Where steps with drafts turn out to lose all the same, there are none
(:mod:`engine.speculation.draft_trials`). The setting ``adaptive`` turns all of that off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.config.speculation import SpeculativeConfig
from engine.speculation.draft_prices import DraftTrust, FixedTrust, PassCost, StepCost, moved
from engine.speculation.draft_trials import DraftTrials
from engine.speculation.proposers import NOTHING, CombinedProposer, Proposer, proposer_of
from engine.step import Step

MOST_INDEXED = 4096
"""Tokens that a step indexes, about a microsecond each.

Requests for which they do not suffice get no draft yet.
"""
MOST_HELD = 1 << 20
"""Indexed tokens of all requests, some hundred bytes each.

Requests for which there is no room get no drafts.
"""


class Drafter:
    """Drafts of one request, and the record of how many tokens were accepted."""

    def __init__(self, config: SpeculativeConfig, chance: float) -> None:
        """``chance``: that a drafted token is taken, as far as is known."""
        self._proposer: Proposer = proposer_of(config)
        self._trust, self._looked_up = (
            DraftTrust(chance) if config.adaptive else FixedTrust() for _ in range(2)
        )
        """The second: trust in what is looked up beside a model."""
        self._last = self._trust
        """That of the last draft."""
        self._runs_on = False
        """Whether all of the last draft was looked up beside a model, and taken."""

    def __repr__(self) -> str:
        return f"<Drafter {self._proposer!r} {self._trust!r}>"

    def __len__(self) -> int:
        """Number of tokens of the text that are indexed."""
        return len(self._proposer)

    def draft(
        self, tokens: Sequence[int], most: int, price: float, allowance: int
    ) -> tuple[list[int], float]:
        """Draft behind these tokens, mostly empty, and its expected gain beyond the price.

        Where a model was asked for it, that was decided to pay. ``allowance``: tokens that may be indexed for
        it now.
        """
        found = self._proposer.look(tokens, allowance)
        most = most if found is None else min(most, found)
        if most < 1:
            return NOTHING, 0.0
        proposer, self._last = self._proposer, self._trust
        if isinstance(proposer, CombinedProposer) and not proposer.is_paid:
            length, gain = self._looked_up.length(most, price)
            if length:
                self._last = self._looked_up
                return proposer.take(tokens, length), gain
            most = min(most, proposer.look_at_model(tokens) or 0)
        if proposer.is_paid:
            return proposer.take(tokens, most), math.inf if most else 0.0
        length, gain = self._trust.length(most, price)
        return proposer.take(tokens, length), gain

    def ask(self, most: int, price: float) -> tuple[int, float]:
        """Tokens that a model is to propose, and their expected gain.

        None where what was looked up goes on being right.
        """
        return self._trust.length(most, price) if most > 0 and not self._runs_on else (0, 0.0)

    def offer(self, length: int, proposal: list[int]) -> None:
        """Take in what a model proposes behind the first ``length`` tokens."""
        self._proposer.offer(length, proposal)

    def learn(self, drafted: int, accepted: int, price: float) -> None:
        """Take in that ``accepted`` tokens of the last draft were taken."""
        self._runs_on = self._last is self._looked_up and accepted == drafted
        self._last.learn(drafted, accepted, price)


Text = tuple[Drafter, Sequence[int], int]
"""A request's drafter, its tokens so far, and how many may be drafted behind them."""


class Speculation:
    """Drafting for all requests of one instance, as long as it pays."""

    UNPRICED = 32
    """Steps without drafts for each one that is priced, where drafts are off."""
    PLAIN_STEPS = 4
    """One in so many steps without drafts is timed: they are many, and alike."""
    MEMORY = 100
    """About how many of the last drafted tokens count for requests without any."""
    LONGEST_REST = 64
    """Steps whose drafts do not seem to pay before drafts are tried all the same."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._cost = StepCost()
        self._passes = PassCost()
        self._trials = DraftTrials()
        self._price = StepCost.GUESSED_SHARE
        """Price of a token drafted for the step in the making."""
        self._chance = 0.5
        self._rest = 0
        self._drafted = False
        """Whether the last step had drafts."""
        self._plain = 0
        self._unpriced = self._unpriced_size = 0
        """Steps until the next one that is priced, and bits of their number of rows."""
        self._is_stale = False
        """Whether the next seconds are those of several steps."""
        self._accepted = 0
        """Drafted tokens that were taken in steps that are not accounted for yet."""

    def __repr__(self) -> str:
        return f"<Speculation up to {self._config.most} tokens, {self._cost!r}>"

    def drafter(self) -> Drafter:
        """Make the drafter of a new request."""
        return Drafter(self._config, self._chance)

    def is_off(self, running: int) -> bool:
        """Whether nothing is drafted, asked for or taken in beside so many requests."""
        if self._unpriced:
            if running.bit_length() == self._unpriced_size:
                return True
            self._unpriced = 0
        limit = self._config.disable_by_batch_size
        is_too_full = limit is not None and running > limit
        return is_too_full or (self._config.adaptive and not self._trials.are_on(running))

    def prices_step(self) -> bool:
        """Whether :meth:`took` or :meth:`paid` is to be called for a step.

        Of steps in a row without drafts few are priced, since even asking for the time costs some.
        """
        if self._unpriced:
            self._unpriced -= 1
        return self._unpriced <= 1 and self._config.adaptive

    @property
    def asks(self) -> bool:
        """Whether a model is asked for proposals."""
        return self._config.by_model

    @property
    def follows(self) -> bool:
        """Whether what proposes must take in every token at once, and cannot catch up."""
        return self._config.by_head

    @property
    def rests(self) -> bool:
        """Whether asking a model does not seem to pay at the moment."""
        return self._config.adaptive and (self._rest > 0 or self._chance <= self._price)

    def ask(self, wanting: Sequence[tuple[Drafter, int]], rows: int) -> list[int]:
        """Tokens that a model is to propose for each request, mostly several.

        All are 0 if that does not pay.

        ``wanting``: drafters, and most tokens for each. The step has ``rows`` requests.
        """
        nothing = [0] * len(wanting)
        if not wanting:
            return nothing
        checking, drafting = self._cost.prices(rows)
        self._price = price = checking + self._passes.price(len(wanting), rows, self._cost.seconds(rows))
        most, gain, lengths = self._config.most, 0.0, []
        for drafter, longest in wanting:
            length, more = drafter.ask(min(longest, most), price)
            lengths.append(length)
            gain += more
        if not any(lengths):
            return nothing
        if gain <= drafting and self._rest < self.LONGEST_REST:
            self._rest += 1
            return nothing
        self._rest = 0
        return lengths

    def draft(self, texts: Sequence[Text], rows: int, room: int) -> list[list[int]]:
        """Drafts for these texts; all are empty if they do not pay.

        The step has ``rows`` requests, and ``room`` for so many more tokens.
        """
        nothing = [NOTHING] * len(texts)
        if not texts or room < 1:
            return nothing
        price, drafting = self._cost.prices(rows)
        if not self.asks:
            self._price = price
        if not self._drafted:
            drafting *= 2  # the step after this one cannot go on from it, either
        most, gain = self._config.most, 0.0
        drafts = []
        held = sum(map(len, [drafter for drafter, _, _ in texts]))
        allowance = min(MOST_INDEXED, MOST_HELD - held)
        for drafter, tokens, longest in texts:
            before = len(drafter)
            found, more = drafter.draft(tokens, min(longest, room, most), price, allowance)
            allowance -= len(drafter) - before
            drafts.append(found)
            gain += more
            room -= len(found)
        if not any(drafts):
            return nothing
        if gain <= drafting and self._rest < self.LONGEST_REST:
            self._rest += 1
            return nothing
        if not self.asks:
            self._rest = 0
        return drafts

    def learn(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        """Take in that ``accepted`` tokens of a request's draft were taken."""
        self._accepted += accepted
        drafter.learn(drafted, accepted, self._price)
        self._chance = moved(self._chance, drafted, accepted, self.MEMORY)

    def paid(self, running: int, seconds: float) -> None:
        """Take in how long a model took beside prompts, while so many requests were running."""
        self._accepted, self._is_stale = 0, False
        self._trials.paid(running, seconds)

    def took(self, step: Step, seconds: float, proposing: float, others: int = 0) -> None:
        """Take in the seconds of a step without prompts.

        Some of them were spent on ``proposing``. Its drafts are learnt from before. ``others``: tokens of the
        other instances in lockstep.
        """
        rows, drafts, accepted = len(step.slots), bool(step.drafts), self._accepted
        self._accepted = 0
        if self._is_stale:
            self._is_stale = False
            return
        was_on = drafts or bool(step.proposes) or self._trials.are_on(rows)
        self._trials.took(
            rows,
            tokens=rows + accepted,
            seconds=seconds,
            drafted=drafts,
            was_on=was_on,
            others=others,
            stands_for=1 if was_on else self.UNPRICED,
        )
        if not was_on and self._trials.rest(rows):
            self._unpriced, self._unpriced_size, self._is_stale = self.UNPRICED, rows.bit_length(), True
        if passes := max(step.proposes.values(), default=0):
            self._passes.took(len(step.proposes), passes, proposing)
        with_drafts, self._drafted = drafts or self._drafted, drafts
        if step.proposes and not with_drafts:
            return  # neither plain nor with drafts
        self._plain += not with_drafts
        if with_drafts or self._plain % self.PLAIN_STEPS == 0:
            self._cost.took(step.num_tokens, with_drafts, seconds - proposing)
