"""Shadow checks: a share of the answers is computed again elsewhere and compared (pure).

The second instance is of the same numerics class, so both give the same bits if both compute rightly. Where
they differ, a third instance of the class decides by majority. Nothing here sends messages or reads clocks:
:mod:`router.dispatch.shadow.shadowing` does both.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from router.mesh import Prompt, ShadowResult
from router.recorded import Difference, RecordedSample, bits_of, first_difference

MAX_PENDING = 64
"""Checks that wait for an idle instance; beyond that the oldest is dropped."""
MAX_UNDER_WAY = 8
"""Requests of one router computed again at a time, at most one per instance."""
MAX_CHECK_TOKENS = 32_768
"""Tokens of prompt and answer beyond which a request is not checked."""
PENDING_TIMEOUT = 30.0
"""Seconds that a check waits for an idle instance before it is dropped."""
THIRD_TIMEOUT = 60.0
"""Seconds that a difference waits for a third instance, idle or not."""
COMPUTE_TIMEOUT = 60.0
"""Seconds that an instance gets to compute a request again."""
MAX_THIRDS = 3
"""Third instances tried for one difference, where they are lost one after the other."""
DRAIN_MEMORY_SECONDS = 3600.0
"""Seconds for which an ordered drain counts against the minority that may drain."""

LEAVES_ALREADY = "it leaves already"
"""Why an instance is not drained that an earlier check, or another router, had drained."""


class Party(msgspec.Struct, frozen=True):
    """An instance, as far as a check depends on it."""

    name: str
    rank: int
    address: str
    fingerprint: str | None
    """Name of its numerics class; None if that is variant or unknown."""
    ready: bool
    idle: bool = True
    """Whether nothing waits there, and there is room."""
    crowded: bool = False
    """Whether requests wait there for room."""
    requests: int = 0
    leaves: bool = False
    shares_experts: bool = False
    """Whether other instances compute a part of its answers (spread experts)."""

    def __str__(self) -> str:
        return f"instance {self.rank} ({self.name}) at {self.address}"


@dataclass(eq=False)
class ShadowCheck:
    """One request that is computed again."""

    prompt: Prompt
    expected: RecordedSample
    origin: Party
    up_to: int | None = None
    """Tokens that were computed, where a stop string or the client cut the answer there."""
    deadline: float = 0.0
    """Time at which its wait ends, or its computation if that has begun."""
    at: Party | None = None
    """The instance that computes it now."""
    second: Party | None = None
    """The instance whose answer differs from the first one."""
    found: RecordedSample | None = None
    """Sample that the second instance computed."""
    excluded: set[str] = field(default_factory=set)
    """Instances that computed it, or were lost while they did."""
    num_thirds: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.expected.token_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens after which another computation is stopped: one more shows that it did not end."""
        return self.num_tokens + (self.up_to is None)

    def compare(self, one: RecordedSample, other: RecordedSample) -> Difference | None:
        return first_difference(one, other, self.up_to)


class ShadowVerdict(msgspec.Struct, frozen=True):
    """Result of a difference, once a third instance decided or none can."""

    request_id: str
    fingerprint: str
    first: Party
    second: Party
    difference: Difference
    odd: Party | None
    """The instance that differs from the two others."""
    third: Party | None = None
    why_undecided: str = ""

    def __str__(self) -> str:
        found = f"request {self.request_id} has other bits on {self.first} than on {self.second}, both of "
        found += f"numerics class {self.fingerprint}: {_told(self.difference)}; "
        if self.odd is None:
            return found + f"undecided, {self.why_undecided}"
        return found + f"{self.third} decides: instance {self.odd.rank} computes otherwise than two others"


class Start(msgspec.Struct, frozen=True):
    """Order: compute the request of this check at this instance."""

    check: ShadowCheck
    party: Party


class Stop(msgspec.Struct, frozen=True):
    """Order: stop computing this check."""

    check: ShadowCheck


Parties = Mapping[str, Party]
"""The instances that are there, by name."""


def is_drawn(prompt: Prompt, rate: float) -> bool:
    """Whether a request is of the share to check.

    Every router draws alike. A client that always sends one id has its seeds decide, which routers draw.
    """
    text = f"{prompt.request_id}|{prompt.seed}|{prompt.sample_index}".encode()
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    return drawn < rate * 2**64


def can_be_checked(fingerprint: str | None, parties: Iterable[Party]) -> bool:
    """Whether two instances of a class serve; None for any class."""
    found = Counter(each.fingerprint for each in parties if each.ready and each.fingerprint is not None)
    counts = found.values() if fingerprint is None else [found[fingerprint]]
    return any(count > 1 for count in counts)


class ShadowChecks:
    """The checks of one router, waiting and under way."""

    def __init__(self) -> None:
        self._pending: list[ShadowCheck] = []
        """Differences first, then by age."""
        self._under_way: list[ShadowCheck] = []
        self.counts: Counter[str] = Counter()
        """Ended checks by :class:`router.mesh.ShadowResult`."""

    def __repr__(self) -> str:
        return f"<ShadowChecks {len(self._pending)} pending, {len(self._under_way)} under way>"

    def __bool__(self) -> bool:
        return bool(self._pending or self._under_way)

    def skip(self) -> None:
        """Count a drawn request that cannot be compared."""
        self.counts[ShadowResult.SKIPPED] += 1

    def add(self, check: ShadowCheck, now: float) -> None:
        """Queue a check of an answer that has ended."""
        if len(check.prompt.prompt_ids) + check.num_tokens > MAX_CHECK_TOKENS:
            self.skip()
            return
        check.excluded.add(check.origin.name)
        check.deadline = now + PENDING_TIMEOUT
        self._pending.append(check)
        if len(self._pending) > MAX_PENDING:
            oldest = next((each for each in self._pending if each.second is None), self._pending[0])
            self._pending.remove(oldest)
            self.counts[ShadowResult.DROPPED] += 1

    def look(self, parties: Parties, now: float) -> list[Start | Stop | ShadowVerdict]:
        """Orders to start and stop checks now, and verdicts on overdue differences."""
        return [*self._stops(parties, now), *self._expired(now), *self._starts(parties, now)]

    def computed(
        self, check: ShadowCheck, sample: RecordedSample, parties: Parties, now: float
    ) -> ShadowVerdict | None:
        """Take in what the instance of a check has computed; returns the verdict, if any."""
        party = self._ends(check)
        if self._has_changed(check, party, parties):
            self.skip()
            return None
        if check.second is not None:
            return self._decided(check, party, sample)
        if check.compare(check.expected, sample) is None:
            self.counts[ShadowResult.EQUAL] += 1
            return None
        check.second, check.found = party, sample
        if party.shares_experts:
            return self._undecided(check, "the group spreads experts, and others computed a part of both")
        return self._ask_a_third(check, parties, now)

    def lost(self, check: ShadowCheck, parties: Parties, now: float) -> ShadowVerdict | None:
        """Act on a check whose instance is gone, or does not compute it."""
        self._ends(check)
        if check.second is not None:
            return self._ask_a_third(check, parties, now)
        self.counts[ShadowResult.LOST] += 1
        return None

    def stopped(self, check: ShadowCheck, parties: Parties, now: float) -> ShadowVerdict | None:
        """A check was stopped as ordered: a difference goes to another instance, others are dropped."""
        self._ends(check)
        if check.second is not None:
            return self._ask_a_third(check, parties, now)
        self.counts[ShadowResult.DROPPED] += 1
        return None

    # ---- helpers

    def _ends(self, check: ShadowCheck) -> Party:
        """Take a check out of those under way."""
        party, check.at = check.at, None
        assert party is not None, "it is under way"
        self._under_way.remove(check)
        check.excluded.add(party.name)
        return party

    def _stops(self, parties: Parties, now: float) -> Iterator[Stop]:
        for check in self._under_way:
            assert check.at is not None
            seen = parties.get(check.at.name)
            crowded = seen is not None and seen.crowded and check.second is None
            if crowded or now > check.deadline:
                yield Stop(check)

    def _expired(self, now: float) -> Iterator[ShadowVerdict]:
        for check in [each for each in self._pending if now > each.deadline]:
            self._pending.remove(check)
            if check.second is None:
                self.counts[ShadowResult.DROPPED] += 1
            else:
                yield self._undecided(check, "no third instance of the class took it in time")

    def _starts(self, parties: Parties, now: float) -> Iterator[Start]:
        busy = {each.at.name for each in self._under_way if each.at is not None}
        for check in self._pending[:]:
            if len(self._under_way) == MAX_UNDER_WAY:
                return
            able = [
                each
                for each in _able(check, parties)
                if each.name not in busy and (each.idle or check.second is not None)
            ]
            if not able:
                continue
            party = min(able, key=lambda each: (each.requests, each.rank))
            self._pending.remove(check)
            self._under_way.append(check)
            busy.add(party.name)
            check.at, check.deadline = party, now + COMPUTE_TIMEOUT
            yield Start(check, party)

    def _has_changed(self, check: ShadowCheck, party: Party, parties: Parties) -> bool:
        """Whether an instance of the check is of another class now."""
        involved = (check.origin, check.second or party, party)
        now = (parties.get(each.name, each).fingerprint for each in involved)
        return any(fingerprint != check.origin.fingerprint for fingerprint in now)

    def _ask_a_third(self, check: ShadowCheck, parties: Parties, now: float) -> ShadowVerdict | None:
        if check.num_thirds == MAX_THIRDS:
            return self._undecided(check, f"{MAX_THIRDS} third instances were lost while they computed it")
        if not any(_able(check, parties)):
            return self._undecided(check, "the class has no third instance that serves")
        check.num_thirds += 1
        check.deadline = now + THIRD_TIMEOUT
        self._pending.insert(0, check)
        return None

    def _decided(self, check: ShadowCheck, third: Party, sample: RecordedSample) -> ShadowVerdict:
        assert check.second is not None
        assert check.found is not None
        odd = None
        if check.compare(check.expected, sample) is None:
            odd = check.second
        elif check.compare(check.found, sample) is None:
            odd = check.origin
        if odd is None:
            return self._undecided(check, f"{third} differs from both")
        self.counts[ShadowResult.ODD] += 1
        return self._verdict(check, odd, third, "")

    def _undecided(self, check: ShadowCheck, why: str) -> ShadowVerdict:
        self.counts[ShadowResult.UNDECIDED] += 1
        return self._verdict(check, None, None, why)

    def _verdict(self, check: ShadowCheck, odd: Party | None, third: Party | None, why: str) -> ShadowVerdict:
        assert check.second is not None
        assert check.found is not None
        difference = check.compare(check.expected, check.found)
        assert difference is not None
        fingerprint = check.origin.fingerprint or ""
        return ShadowVerdict(
            check.prompt.request_id, fingerprint, check.origin, check.second, difference, odd, third, why
        )


class DrainLimit:
    """Bound on the instances that a router has drained for what they computed: a minority."""

    def __init__(self) -> None:
        self._ordered: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<DrainLimit of {sorted(self._ordered)}>"

    def problem(self, odd: Party, parties: Parties, now: float) -> str | None:
        """Why this instance is not drained; None if it is, which then counts."""
        recent = {name for name, at in self._ordered.items() if now - at <= DRAIN_MEMORY_SECONDS}
        self._ordered = {name: self._ordered[name] for name in recent}
        there = parties.get(odd.name)
        if there is None or there.leaves or odd.name in recent:
            return LEAVES_ALREADY
        members = {each.name: each for each in parties.values() if each.fingerprint == odd.fingerprint}
        gone = recent | {name for name, each in members.items() if each.leaves}
        total = len(gone | set(members))
        if 2 * (len(gone) + 1) >= total:
            return f"{len(gone)} of {total} instances of its class left already, and only a minority may"
        if not any(each.ready for name, each in members.items() if name != odd.name and name not in gone):
            return "no other instance of its class serves"
        self._ordered[odd.name] = now
        return None

    def failed(self, odd: Party) -> None:
        """Forget an order that the coordinator did not take: it may be given again."""
        self._ordered.pop(odd.name, None)


def _able(check: ShadowCheck, parties: Parties) -> list[Party]:
    """Instances that can compute a check: of its class, ready, and new to it."""
    return [
        each
        for each in parties.values()
        if each.ready and each.fingerprint == check.origin.fingerprint and each.name not in check.excluded
    ]


def _told(difference: Difference) -> str:
    """Difference of two instances' answers, in words."""
    sides = []
    ends = (difference.expected_end, difference.found_end)
    for found, end in zip((difference.expected, difference.found), ends, strict=True):
        sides.append(f"end ({end})" if found is None else f"id {found[0]} logprob {bits_of(found[1])}")
    return f"first differing token {difference.index}, {sides[0]} and {sides[1]}"
