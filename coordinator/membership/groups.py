"""Groups of the mesh: losses that members report, removals, and the next group (pure).

:mod:`coordinator.membership.suspicion` decides which accused members are dead, and
:mod:`coordinator.membership.reach` which live instances are left out. :mod:`coordinator.membership.epochs`
numbers the groups. Where instances are independent there are no groups, and the epoch counts those that
become ready or go.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.membership.candidates import shortage
from coordinator.membership.epochs import Epochs
from coordinator.membership.operations import ACCEPTED, CONFLICT
from coordinator.membership.reach import Asked, Reachability
from coordinator.membership.records import Instruction, Note, Peer, Publish, Record, Send
from coordinator.membership.roster import Roster
from coordinator.membership.standing_orders import Orders
from coordinator.membership.suspicion import Suspicions
from coordinator.messages import (
    Evidence,
    ExpertBalance,
    Heartbeat,
    Lost,
    OperatorAnswer,
    Probe,
    Rebalance,
    Settings,
    State,
    Unknown,
)
from coordinator.views import ViewLog


class Groups:
    """The newest group, the suspicions against its members, and those that groups leave out."""

    def __init__(self, roster: Roster, orders: Orders, log: ViewLog) -> None:
        """``orders``: the standing orders, only read here."""
        self._roster = roster
        self._orders = orders
        self._records = roster.records
        self._log = log
        self.reach = Reachability(roster.rules, roster.records)
        self.epochs = Epochs(roster.rules, roster.records, self.reach, lambda: orders.current)
        self.suspicions = Suspicions(roster.rules)

    def __repr__(self) -> str:
        return f"<Groups {self.epochs!r} {self.suspicions!r} {self.reach!r}>"

    # ---- what instances report

    def heard(
        self, peer: Peer, record: Record, message: Heartbeat, now: float, *, was_ready: bool
    ) -> Iterator[Instruction]:
        """Take a heartbeat: answered probes, steps into a group, missing plans."""
        self.suspicions.answered(record.instance, message.answers)
        is_ready = record.state is State.READY
        if self._roster.spreads:
            self.epochs.heard(record)
            plan = self.epochs.delivery.sends_again(record, now)
            if plan is not None:
                yield Send(peer, plan)
        elif was_ready != is_ready:
            self.epochs.number += 1
        if was_ready != is_ready:
            yield Note(f"instance {record.rank} is {record.state}; epoch {self.epochs.number}")

    def lost(self, peer: Peer, message: Lost, now: float) -> Iterator[Instruction]:
        """Take a member's report that its group is broken, or could not form."""
        record = self._records.named(message.instance)
        if record is None:
            yield Send(peer, Unknown())
            return
        if not self._roster.spreads:
            return
        record.heard_at = now
        entered = record.epoch >= message.epoch
        news = self.epochs.lost(message.epoch, message.suspects, entered=entered)
        self.suspicions.waits(record.instance)
        if self.epochs.form is not None and message.epoch == self.epochs.form.epoch:
            # One that has not entered is late, or hangs: that is no evidence about the way to it.
            missed = [name for name in message.suspects if not entered or self._steps_in(name, message.epoch)]
            self.reach.reported(record.instance, missed, message.evidence, entered=entered)
        for name in dict.fromkeys(message.suspects):
            if (other := self._other_member(name, record)) is not None:
                yield from self.accuse(other, record.instance, message.evidence, now)
        if not news:
            return
        suspects = frozenset(message.suspects)
        for name in (peer.instance for peer in self.epochs.form.peers) if self.epochs.form else ():
            if name not in suspects and (other := self._other_member(name, record)) is not None:
                yield from self._probe(other, self.suspicions.ask(name, now))

    def _other_member(self, name: str, record: Record) -> Record | None:
        """The instance of this name, if it is another member of the newest group."""
        other = self._records.named(name)
        return other if other is not record and self.epochs.is_member(name) else None

    def _steps_in(self, instance: str, epoch: int) -> bool:
        """Whether an instance is known to have entered the group of this epoch."""
        record = self._records.named(instance)
        return record is not None and record.epoch >= epoch

    def accuse(self, record: Record, accuser: str, evidence: Evidence, now: float) -> Iterator[Instruction]:
        """Suspect an instance on another one's evidence, and probe it."""
        yield from self._probe(record, self.suspicions.accuse(record.instance, accuser, evidence, now))

    def _probe(self, record: Record, number: int | None) -> Iterator[Instruction]:
        if number is not None:
            yield Send(record.peer, Probe(number))

    # ---- who is taken out

    def remove(self, record: Record) -> None:
        """Take out an instance that is gone, dead or refused."""
        self.reach.forget(record.instance)
        self._take_out(record)

    def _take_out(self, record: Record) -> None:
        self._records.remove(record)
        self.suspicions.forget(record.instance)
        if record.state is State.READY and not self._roster.spreads:
            self.epochs.number += 1
        self._log.remove(record.instance)

    # ---- what follows

    @property
    def is_settled(self) -> bool:
        """Whether the newest group has begun and goes on; True where there are no groups."""
        return not self._roster.spreads or (not self.suspicions and self.epochs.is_well)

    def go_on(self, now: float) -> Iterator[Instruction]:
        """Act on all that is known by now: remove dead instances, form the next group."""
        self.epochs.adoption.age(now)
        if not self._roster.spreads:
            return
        settings = self._roster.settings
        assert settings is not None
        yield from self._remove_dead(now)
        if self.epochs.begins(now):
            self.suspicions.all_is_well()
            self.reach.has_begun()
            yield Note(f"epoch {self.epochs.number} has begun")
            self._log.touch_head()
        if self.suspicions:
            return
        yield from self._look_at_ways(settings, now)
        sleep = self._orders.current.sleep
        if self.reach.is_undecided(now) or (sleep is not None and sleep.lacks_weights):
            return
        self._records.follow_weights(self._orders.current.weights)
        size = self._roster.size or settings.data_parallel_size
        before = self.epochs.rebalancing.summary
        following = self.epochs.next_form(size, settings, now)
        yield from self._tell_balance(before)
        if following is None:
            return
        form, why = following
        self.suspicions.begin_group()
        self.reach.begin_group()
        yield Note(f"{len(form.peers)} instances form the group of epoch {form.epoch}: {why}")
        for records, plan in self.epochs.delivery.sends(now):
            yield Publish(tuple(record.peer for record in records), plan)
        self._log.touch_head()

    def _remove_dead(self, now: float) -> Iterator[Instruction]:
        """Take out members that are found dead, and newcomers that hold up the newest group."""
        dead = self.suspicions.settle(now)
        dead += [
            (record.instance, f"did not prepare epoch {self.epochs.number} in time")
            for record in self.epochs.stragglers(now)
        ]
        for instance, why in dead:
            record = self._records.named(instance)
            if record is not None:
                yield Note(f"instance {record.rank} taken out: {why}", warning=True)
                self.remove(record)

    def _look_at_ways(self, settings: Settings, now: float) -> Iterator[Instruction]:
        """Leave instances that others do not reach out of groups, and let them back."""
        failure = self.epochs.failure(now)
        if failure is not None:
            yield from _to_send(self.reach.failed(*failure, self.epochs.others(), now))
        if self.epochs.starved(settings):
            yield from _to_send(self.reach.reconsider(self._records.loaded(), now))
        for record, why in self.reach.choose(lambda stay: not shortage(settings, stay), now):
            yield Note(f"instance {record.rank} is left out: {why}", warning=True)
            self._take_out(record)  # it registers again, and gives up its group and its requests
        yield from _to_send(self.reach.look_again(self.epochs.members, now))
        for record in self.reach.let_back(now):
            yield Note(f"instance {record.rank} is let back: all reach it, and it them")
            self._log.touch(record.instance)

    # ---- experts that move for their load

    def _tell_balance(self, before: ExpertBalance) -> Iterator[Instruction]:
        """Log what the balance of experts has to say, and show it to watchers."""
        rebalancing = self.epochs.rebalancing
        notes, rebalancing.notes = rebalancing.notes, []
        for text, warning in notes:
            yield Note(text, warning)
        if rebalancing.summary != before:
            self._log.touch_head()

    def rebalance(self, message: Rebalance) -> OperatorAnswer:
        """Answer an operator who wants experts to move now."""
        if not self._roster.balances:
            problem = "the load of experts is not balanced here: start the instances with --enable-eplb"
            return OperatorAnswer(command=message.command, status=CONFLICT, text=problem)
        self.epochs.rebalancing.ask()
        text = "experts move now, where that makes steps faster: lockstep status shows it"
        return OperatorAnswer(command=message.command, status=ACCEPTED, text=text)


def _to_send(asked: list[Asked]) -> Iterator[Instruction]:
    for record, question in asked:
        yield Send(record.peer, question)
