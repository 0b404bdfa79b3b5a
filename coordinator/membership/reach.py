"""Which instances groups leave out, because others do not reach them (pure).

Instances may all reach the coordinator and yet not each other: data takes other ways, through other
firewalls. Then the same members form a group that breaks, again and again, and no probe finds anybody dead.
After some such tries the members are asked to connect to each other (:class:`coordinator.messages.Reach`).
Where that fails, the instance that fewest others reach is left out, until all who stay reach each other.
An instance that was left out is asked again and again, and let back when all connections work.

:mod:`coordinator.membership.registry` reports tries and answers, sends the questions and carries out the
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from coordinator.membership.records import Record, Records, Rules
from coordinator.messages import MAX_REACH_PEERS, Evidence, GroupPlan, Reach, Reached

MAX_REMEMBERED = 16
"""Sets of members whose failed tries are counted; of more, the oldest are forgotten."""

MAX_CHOICES = 16
"""Sets of members that are looked at for one in which the experts fit."""

MAX_NAMED_ADDRESSES = 4
"""Most addresses of others that one message names."""

Pair = frozenset[str]
"""Two instances between which data does not pass."""
Asked = tuple[Record, Reach]
"""An instance, and the question for it."""


@dataclass
class _Tries:
    """The failed groups in a row with the same members."""

    count: int = 0
    pairs: set[Pair] = field(default_factory=set)
    """Reported in each of these groups."""


@dataclass
class _Question:
    """A question to some instances: which of some others each of them reaches."""

    number: int
    asked_at: float
    peers: dict[str, dict[str, str]]
    """The addresses of the others, by name, for each instance that is asked."""
    reached: dict[str, frozenset[str]] = field(default_factory=dict)
    """The answers so far."""

    def answer(self, message: Reached) -> None:
        if message.number == self.number and message.instance in self.peers:
            self.reached[message.instance] = frozenset(message.reached)

    def is_over(self, now: float, timeout: float) -> bool:
        return len(self.reached) == len(self.peers) or now - self.asked_at >= timeout

    def cut(self) -> set[Pair]:
        """Pairs of which one does not reach the other. No answer is no evidence."""
        return {
            frozenset((name, other))
            for name, reached in self.reached.items()
            for other in self.peers[name]
            if other not in reached
        }


@dataclass
class _LeftOut:
    """An instance that is in no group for now."""

    why: str
    look_at: float
    """When it is asked next whether it reaches the others."""
    question: _Question | None = None


class Reachability:
    """The tries that failed, the questions under way, and the instances that are left out."""

    def __init__(self, rules: Rules, records: Records) -> None:
        """``records`` are the registry's; only read here."""
        self._rules = rules
        self._records = records
        self._tries: dict[frozenset[str], _Tries] = {}
        self._reported: set[Pair] = set()
        """Pairs that members of the newest group reported."""
        self._question: _Question | None = None
        """The question to members of a group that failed too often, and to possible replacements."""
        self._is_void = False
        """One of its instances is gone, so the next group is another one."""
        self._members: list[Record] = []
        """The instances that the question goes to, by rank."""
        self._reported_often: set[Pair] = set()
        """Pairs that the failed group's members reported in each of its tries."""
        self._reconsider_at = 0.0
        """When those who lack room are looked at again at the earliest."""
        self._numbers = 0
        self._out: dict[str, _LeftOut] = {}
        self._times_out: dict[str, int] = {}
        self.problem = ""
        """What is missing while groups of the same members break in a row; else empty."""

    def __repr__(self) -> str:
        return f"<Reachability {len(self._tries)} sets of members failed, left out: {sorted(self._out)}>"

    # ---- what is learnt

    def reported(self, accuser: str, suspects: Collection[str], evidence: Evidence, *, entered: bool) -> None:
        """Take a report of a member of the newest group that others are lost.

        In a group that had begun, a closed connection is no evidence about the way between two instances.
        Every instance that gives up its group leaves one.
        """
        if evidence is Evidence.DEADLINE or not entered:
            self._reported |= {frozenset((accuser, suspect)) for suspect in suspects if suspect != accuser}

    def failed(self, form: GroupPlan, lasted: float, others: Collection[Record], now: float) -> list[Asked]:
        """Count a group that broke, or could not form, though all its members live.

        ``lasted``: seconds since it began. Returns the questions to send, if that happened too often. They go
        to the members, and to the ``others`` that have their weights, since a group may need them in place of
        a member.
        """
        names = frozenset(peer.instance for peer in form.peers)
        tries = self._count(names, forget=lasted >= self._rules.steady_after)
        if tries.count < self._rules.reach_tries or len(names) < 2:
            return []
        self.problem = f"a group that holds (epoch {form.epoch} was try {tries.count} of the same members)"
        self._reported_often = tries.pairs
        return self._ask_all(names.union(other.instance for other in others), now)

    def reconsider(self, instances: Collection[Record], now: float) -> list[Asked]:
        """Look again at those who were left out: the others lack room.

        Returns the questions to send to all these ``instances``, at intervals.
        """
        if not self._out or self._question is not None or now < self._reconsider_at:
            return []
        self._reconsider_at = now + self._rules.reach_interval
        return self._ask_all({record.instance for record in instances}, now)

    def _ask_all(self, names: Collection[str], now: float) -> list[Asked]:
        """Ask these instances which of the others each of them reaches."""
        self._members = [record for _, record in sorted(self._records.items()) if record.instance in names]
        self._is_void = False
        self._question = self._ask({member.instance: self._members for member in self._members}, now)
        return self._to_send(self._question)

    def _count(self, names: frozenset[str], *, forget: bool) -> _Tries:
        """Count one more failed try of these members."""
        before = self._tries.pop(names, None)
        if before is None or forget:
            tries = _Tries(1, self._reported)
        else:
            tries = _Tries(before.count + 1, before.pairs & self._reported)
        self._tries[names], self._reported = tries, set()
        while len(self._tries) > MAX_REMEMBERED:
            self._tries.pop(next(iter(self._tries)))
        return tries

    def begin_group(self) -> None:
        """Forget reports about the group before the one that is being formed."""
        self._reported = set()

    def has_begun(self) -> None:
        """Note that the newest group has begun."""
        self.problem = ""

    def answered(self, message: Reached) -> None:
        """Take an instance's answer: the others that it reaches."""
        for question in self._questions():
            question.answer(message)

    def forget(self, instance: str) -> None:
        """Forget an instance that is gone."""
        if self._question is not None and instance in self._question.peers:
            self._is_void = True
        self._out.pop(instance, None)
        self._times_out.pop(instance, None)

    # ---- what is asked

    def leaves_out(self, instance: str) -> bool:
        """Whether an instance is to be in no group for now."""
        return instance in self._out

    @property
    def left_out(self) -> frozenset[str]:
        """The instances that are to be in no group for now."""
        return frozenset(self._out)

    def why(self, instance: str) -> str:
        """Why an instance is left out, for people; empty if it is not."""
        out = self._out.get(instance)
        return "" if out is None else f"left out: {out.why}"

    def is_undecided(self, now: float) -> bool:
        """Whether the next group has to wait for answers."""
        return self._question is not None and not self._is_over(self._question, now)

    # ---- what follows

    def choose(self, fits: Callable[[list[Record]], bool], now: float) -> list[tuple[Record, str]]:
        """The instances that groups leave out from now on, and why.

        Returned once, when the question is over. Some that were left out before may come in instead.
        ``fits``: whether all experts fit on some instances.
        """
        question, members = self._question, self._members
        if question is None:
            return []
        gone = self._is_void
        if not gone and not self._is_over(question, now):
            return []
        self._question, self._members = None, []
        if gone:  # the next group is another one
            return []
        cut = question.cut()
        found = frozenset[str]().union(*cut)
        cut |= self._reported_often
        stays = list(choices(members, cut))
        stay = next(filter(fits, stays), None)
        left = members if stay is None else stay
        out = [(member, _why(member, members, cut)) for member in members if member not in left]
        worst = next((member for member in members if member not in stays[0]), None)
        if stay is None and worst is not None:
            why = _why(worst, members, cut)
            self.problem = f"a way to rank {worst.rank}, without which the experts do not fit: it has {why}"
        for member in stay or []:
            self._out.pop(member.instance, None)
        out = [(member, why) for member, why in out if member.instance not in self._out]
        for member, why in out:
            self._leave_out(member.instance, why, now, was_found=member.instance in found)
        return out

    def _leave_out(self, name: str, why: str, now: float, *, was_found: bool) -> None:
        """Without a connection that was tried and failed, trying one again proves nothing soon."""
        self._out = {other: out for other, out in self._out.items() if self._records.named(other) is not None}
        times = self._times_out[name] = self._times_out.get(name, 0) + 1
        first = self._rules.reach_interval if was_found else self._rules.steady_after
        patience = min(first * 2 ** min(times - 1, 20), self._rules.reach_patience)
        self._out[name] = _LeftOut(why, now + patience)

    def let_back(self, now: float) -> list[Record]:
        """Instances left out before that now reach all others asked, and are reached by them."""
        back = []
        for name, out in list(self._out.items()):
            question = out.question
            if question is None or not self._is_over(question, now):
                continue
            out.question, out.look_at = None, now + self._rules.reach_interval
            record = self._records.named(name)
            if record is not None and name in question.reached and not question.cut():
                del self._out[name]
                back.append(record)
        return back

    def look_again(self, members: Collection[str], now: float) -> list[Asked]:
        """The questions to send now about instances that are left out.

        Each of them is asked about the ``members`` of the newest group, and these about it.
        """
        asked = []
        for name, out in self._out.items():
            record = self._records.named(name)
            if out.question is None and record is not None and record.store and now >= out.look_at:
                inside = [each for _, each in sorted(self._records.items()) if each.instance in members]
                inside = inside[:MAX_REACH_PEERS]
                out.question = self._ask({name: inside, **{each.instance: [record] for each in inside}}, now)
                asked += self._to_send(out.question)
        return asked

    # ----

    def _is_over(self, question: _Question, now: float) -> bool:
        return question.is_over(now, self._rules.reach_timeout)

    def _questions(self) -> Iterator[_Question]:
        if self._question is not None:
            yield self._question
        for out in self._out.values():
            if out.question is not None:
                yield out.question

    def _ask(self, peers: dict[str, list[Record]], now: float) -> _Question:
        self._numbers += 1
        places: dict[int, dict[str, int]] = {}  # by list: most of them are one and the same
        for others in peers.values():
            if id(others) not in places:
                places[id(others)] = {other.instance: at for at, other in enumerate(others)}
        asked = {name: _addresses(others, places[id(others)].get(name)) for name, others in peers.items()}
        return _Question(self._numbers, now, asked)

    def _to_send(self, question: _Question) -> list[Asked]:
        asked = [(self._records.named(name), peers) for name, peers in question.peers.items()]
        return [(record, Reach(question.number, peers)) for record, peers in asked if record is not None]


def choices(members: Sequence[Record], cut: Collection[Pair]) -> Iterator[list[Record]]:
    """Sets of members that reach each other, the best one first.

    It may lack room where another one has it: the next ones hold on to one member each.
    """
    yield without_cuts(members, cut)
    lacks = _cut_from(members, cut)
    kinds = {frozenset(lacks[member.instance]): member for member in reversed(members)}
    for kind, _ in sorted(kinds.items(), key=lambda item: item[1].rank)[:MAX_CHOICES]:
        yield without_cuts([member for member in members if member.instance not in kind], cut)


def without_cuts(members: Sequence[Record], cut: Collection[Pair]) -> list[Record]:
    """The members that stay, by rank, once no pair of them is cut.

    The member with most cut pairs goes first. Between equals, one that was in no group yet goes first, then
    the highest rank.
    """
    stay, lacks = list(members), _cut_from(members, cut)
    while any(lacks[member.instance] for member in stay):
        worst = max(stay, key=lambda each: (len(lacks[each.instance]), each.epoch == 0, each.rank))
        stay.remove(worst)
        for other in lacks.pop(worst.instance):
            lacks[other].discard(worst.instance)
    return stay


def _cut_from(members: Sequence[Record], cut: Collection[Pair]) -> dict[str, set[str]]:
    """The others that each member does not reach, or is not reached by."""
    lacks: dict[str, set[str]] = {member.instance: set() for member in members}
    for pair in cut:
        if pair <= lacks.keys():
            one, other = pair
            lacks[one].add(other)
            lacks[other].add(one)
    return lacks


def _why(member: Record, members: Sequence[Record], cut: Collection[Pair]) -> str:
    """What a member lacks, with addresses between which to look for a firewall."""
    others = [other for other in members if frozenset((member.instance, other.instance)) in cut]
    ranks = ", ".join(str(other.rank) for other in others)
    there = ", ".join(_host(other) for other in others[:MAX_NAMED_ADDRESSES])
    there += ", ..." * (len(others) > MAX_NAMED_ADDRESSES)
    between = f" ({_host(member)} to {there})"
    return f"no connection to instance{'s' * (len(others) > 1)} {ranks}{between}"


def _host(member: Record) -> str:
    """The address of a member's data, without the port, which changes."""
    return member.store.rpartition(":")[0] or member.host


def _addresses(members: Sequence[Record], at: int | None) -> dict[str, str]:
    """Where the others are tried, by name.

    ``at`` is the place of the one that tries, if it is among them.

    In a large mesh these are not all: those on other hosts come first, in the order of ranks, beginning after
    the one that tries.
    """
    host = "" if at is None else members[at].host
    ring = members if at is None else [*members[at + 1 :], *members[:at]]
    far = (member for member in ring if member.store and member.host != host)
    near = (member for member in ring if member.store and member.host == host)
    return {member.instance: member.store for member in islice(chain(far, near), MAX_REACH_PEERS)}
