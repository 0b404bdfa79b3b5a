"""The groups of a mesh whose experts are spread, one after another (pure).

Each group is a :class:`coordinator.messages.GroupPlan` with an epoch of its own, and each is sent to its
members again until they are in it. The next one is formed when

- the mesh starts: as many instances as ``-dp`` says have their weights;
- a member is gone (:mod:`coordinator.membership.suspicion` decides who), or the group broke though all live:
  at once;
- the group has begun everywhere, and somebody wants in, or is drained and wants out; or experts move
  (:mod:`coordinator.membership.rebalancing`); or the mesh goes over to other weights, which all members have
  prepared;
- forming took too long;
- somebody is left out whom others do not reach (:mod:`coordinator.membership.reach`), or is let back;
- a restarted coordinator finds that something was going on. It takes over the newest group that anybody
  steps in, and does nothing until all its members are back, or have had the time to.

So changes without a loss come one at a time, and a loss never waits for one. If the experts do not fit on
those who are left, nothing is formed until somebody comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from coordinator.membership.adoption import Adoption
from coordinator.membership.candidates import Candidates, shortage
from coordinator.membership.plan_delivery import PlanDelivery
from coordinator.membership.reach import Reachability
from coordinator.membership.rebalancing import Rebalancing
from coordinator.membership.records import Record, Records, Rules
from coordinator.messages import GroupPlan, Settings, StandingOrders, State
from parallel.placement import Placement

BACK_OFF = 0.1
MAX_BACK_OFF = 5.0
"""Seconds between two tries to form a group, rising, while each fails."""


class Epochs:
    """Numbers the groups, and decides when the next one is formed and of which members."""

    def __init__(
        self, rules: Rules, records: Records, reach: Reachability, orders: Callable[[], StandingOrders]
    ) -> None:
        """``records``, ``reach`` and the standing ``orders`` are the registry's; only read here."""
        self._orders = orders
        self._rules = rules
        self._records = records
        self.rebalancing = Rebalancing()
        self.adoption = Adoption(rules, records)
        self.delivery = PlanDelivery(rules, records)
        self._candidates = Candidates(records, reach, self.rebalancing)
        self.number = 0
        """The highest epoch known."""
        self.form: GroupPlan | None = None
        """The newest group, begun or not."""
        self.members: frozenset[str] = frozenset()
        """Instances in the newest group."""
        self._formed_at = 0.0
        self._begun = False
        self._begun_at = 0.0
        self._counted = 0
        """The newest epoch whose failure was returned by :meth:`failure`."""
        self._broken = 0
        """The newest epoch that is known to be broken after it began."""
        self._failed = 0
        """The newest epoch that is broken, or could not form."""
        self._failures = 0
        """Groups in a row that did not begin."""
        self._apart = False
        """A restarted coordinator found the members in different epochs."""
        self._settled: list[Record] | None = None
        """The instances that were found to be the members of the newest group."""

    def __repr__(self) -> str:
        state = "adopting" if self.adoption.is_open else "begun" if self._begun else "forming"
        return f"<Epochs {self.number} {state if self.form else 'no group'}>"

    # ---- what is learnt

    def learn(self, epoch: int, group: GroupPlan | None, now: float) -> None:
        """Take over the epoch and the group that a registering instance knows."""
        self.number = max(self.number, epoch, group.epoch if group is not None else 0)
        known = self.form.epoch if self.form is not None else 0
        if self.number > 0:
            self.adoption.hear_of_epoch(now)
        if group is None or group.epoch <= known:
            return
        if self.form is None or self.adoption.is_open:
            self.adoption.adopt(now)
            self._take(group)

    def fences(self, instance: str, epoch: int, group: GroupPlan | None) -> bool:
        """Whether a returning instance must give up its group: the others go on without it.

        The group is the one that it steps in, or is about to enter. It was a member before, and knows this
        epoch.
        """
        form = self.form
        if form is None or epoch == 0 or self.delivery.is_for(instance):
            return False
        return not self.adoption.is_open or (group is not None and group.epoch < form.epoch)

    def heard(self, record: Record) -> None:
        """Take over the epochs that a heartbeat names."""
        self.number = max(self.number, record.epoch, record.ready_epoch)

    def begins(self, now: float) -> bool:
        """Whether the newest group has begun by now; True once per group.

        It has when all its members are in it and its leavers have left. (A leaver that got yet another plan
        could not follow the others into this group.)
        """
        form = self.form
        if form is None or self._begun or self.adoption.is_open:
            return False
        progress = self._records.progress
        self._begun = not progress.outside and not progress.leaving
        self._begun_at = now
        if self._begun:
            self.rebalancing.begun(form, now)
        return self._begun

    def lost(self, epoch: int, suspects: Collection[str], *, entered: bool) -> bool:
        """Take a report that a group is broken, or, without ``entered``, could not form.

        Returns whether this is news about the newest group.
        """
        self.number = max(self.number, epoch)
        self.adoption.report_lost(suspects)
        if entered:
            self._broken = max(self._broken, epoch)
        news = epoch > self._failed and (self.form is None or epoch >= self.form.epoch)
        self._failed = max(self._failed, epoch)
        return news

    # ---- what is asked

    def is_member(self, instance: str) -> bool:
        """Whether an instance is in the newest group."""
        return instance in self.members

    def starved(self, settings: Settings | None) -> str:
        """What is missing until the experts fit on the live instances again.

        Empty if they fit, or if the group serves.
        """
        if self.form is None or settings is None or self.adoption.is_open:
            return ""
        if not self._gone() and self._failed < self.form.epoch:
            return ""
        return self._candidates.lack(settings)

    def stragglers(self, now: float) -> list[Record]:
        """Newcomers that have held the forming of a group up for too long.

        One that was taken out and is back did not hold this group up: the next one may have it.
        """
        form = self.form
        if form is None or self._begun or now - self._formed_at < self._rules.forming_timeout:
            return []
        if self.adoption.is_open or self._gone():  # a loss holds it up, and lack of room
            return []
        members = [record for record in self._records.values() if record.instance in self.members]
        late = [
            record
            for record in members
            if record.epoch == 0
            and record.ready_epoch < form.epoch
            and record.registered_at <= self._formed_at
        ]
        return late if len(late) < len(members) else []

    def failure(self, now: float) -> tuple[GroupPlan, float] | None:
        """The newest group and its seconds of stepping, if it failed with all members alive.

        It failed if it broke, or did not begin in time. Returned once per group. Call it only while no
        instance is under suspicion.
        """
        form = self.form
        if form is None or self.adoption.is_open or form.epoch <= self._counted or self._gone():
            return None
        late = not self._begun and now - self._formed_at >= self._rules.forming_timeout
        if self._failed < form.epoch and not late:
            return None
        self._counted = form.epoch
        return form, now - self._begun_at if self._begun else 0.0

    def others(self) -> list[Record]:
        """Instances with weights outside the newest group: new ones, and those left out."""
        return [record for record in self._records.loaded() if record.instance not in self.members]

    # ---- the next group

    def next_form(self, size: int | None, settings: Settings, now: float) -> tuple[GroupPlan, str] | None:
        """The group to form now, and why; None if things stay as they are.

        To be asked while nobody is under suspicion.
        """
        if self.adoption.is_open and not self._adoption_ends(size, now):
            return None
        self.rebalancing.begin()
        why = self._reason(size, settings, now)
        if why is None:
            return None
        is_well = self.is_well
        if self.form is not None and not is_well:
            self.rebalancing.failed(self.form, now)
        members = self._candidates.all() if is_well else self._candidates.survivors(settings)
        leavers = [record for record in self._records.values() if record.state is State.DRAINED]
        if shortage(settings, members) and (members or not leavers):
            return None
        again = self.form is not None and not self._gone() and not is_well
        in_a_row = again and now - self._formed_at < 2 * MAX_BACK_OFF
        self._failures = self._failures + 1 if in_a_row else 0
        self.number += 1
        placement = Placement((), 0)
        if members:
            placement = self._candidates.placement(settings, members, self.form, lost=not is_well)
        form = GroupPlan(
            epoch=self.number,
            store=members[0].store if members else "",
            peers=[member.group_peer() for member in members],
            owners=placement.owners,
            replicas=placement.replicas,
            ranks=settings.tensor_parallel_size,
            leavers=tuple(record.instance for record in leavers),
            broken=self._broken,
            token=self._rules.token,
            weights=self._weights,
        )
        self._formed_at, self._begun, self._apart = now, False, False
        self.rebalancing.formed(form, now)
        self._take(form)
        return form, why

    def _take(self, form: GroupPlan) -> None:
        self.delivery.begin(form, adopted=self.adoption.is_open)
        self.form, self._settled = form, None
        self.members = frozenset(peer.instance for peer in form.peers)
        self._records.progress.follow(form.epoch, self.members, form.leavers, self._records.values())

    def _reason(self, size: int | None, settings: Settings, now: float) -> str | None:
        """Why another group is to be formed."""
        form, gone, since = self.form, self._gone(), now - self._formed_at
        if form is None:
            if self.adoption.is_young(now):
                return None
            if size is not None and self._records.num_loaded >= size <= len(self._candidates.all()):
                return "all are loaded"
            waited = self.adoption.waited(now)
            return "the mesh had begun before" if waited >= self._rules.member_timeout else None
        if gone:
            return f"{len(gone)} of epoch {form.epoch} {'is' if len(gone) == 1 else 'are'} gone"
        if self._failed >= form.epoch:
            waits = min(BACK_OFF * 2**self._failures, MAX_BACK_OFF) if self._failures else 0.0
            return f"epoch {form.epoch} broke, though all its members live" if since >= waits else None
        if self._apart or self.number > form.epoch:
            return f"it is on its way to epoch {max(self.number, form.epoch)}, or beyond"
        if not self._begun:
            late = since >= self._rules.forming_timeout
            return f"epoch {form.epoch} did not begin within {since:.0f} s" if late else None
        candidates = self._candidates.all()
        if self._weights != form.weights:
            if self.members & self._records.lacking_weights:
                return None
            return f"weights {self._weights} take the place of {form.weights}"
        if self._settled is not candidates:
            before, after = self.members, {record.instance for record in candidates}
            joins, leaves = len(after - before), len(before - after)
            changes = [f"{joins} join" if joins else "", f"{leaves} leave" if leaves else ""]
            if why := ", ".join(filter(None, changes)):
                return why
            self._settled = candidates
        return self.rebalancing.reason(settings, form, candidates, now)

    @property
    def _weights(self) -> int:
        """Number of the weight version with which the next group steps."""
        return self._orders().weights.number

    @property
    def is_well(self) -> bool:
        """Whether the newest group has begun and goes on, as far as is known."""
        return self.form is not None and self._begun and self._failed < self.form.epoch and not self._gone()

    def _adoption_ends(self, size: int | None, now: float) -> bool:
        """Whether this restarted coordinator knows the fate of the group that it adopted."""
        assert self.form is not None
        if not self.adoption.is_over(self.form, size, now):
            return False
        epochs = {record.epoch for record in map(self._records.named, self.members) if record is not None}
        self._begun = epochs == {self.form.epoch}
        self._begun_at = now
        if self._begun:
            self.rebalancing.begun(self.form, now)
        older = [record.epoch for record in self._records.values() if record.epoch < self.form.epoch]
        self._broken = max([self._broken, *older])
        self.adoption.end()
        self.delivery.deliver_adopted()
        self._apart = not self._begun
        return True

    def _gone(self) -> set[str]:
        """Members of the newest group that are not here any more."""
        return self._records.progress.absent
