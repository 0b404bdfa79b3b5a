"""The groups of a mesh whose experts are spread, one after another (pure).

Each group is a :class:`coordinator.messages.GroupPlan` with an epoch of its own, and each is sent to its
members again until they are in it. The next one is formed when

- the mesh starts: as many instances as ``-dp`` says have their weights;
- a member is gone (:mod:`coordinator.membership.suspicion` decides who), or the group broke though all live:
  at once;
- the group has begun everywhere, and somebody wants in, or is drained and wants out; or experts move
  (:mod:`coordinator.membership.rebalancing`);
- forming took too long;
- somebody is left out whom others do not reach (:mod:`coordinator.membership.reach`), or is let back;
- a restarted coordinator finds that something was going on. It takes over the newest group that anybody
  steps in, and does nothing until all its members are back, or have had the time to.

So changes without a loss come one at a time, and a loss never waits for one. If the experts do not fit on
those who are left, nothing is formed until somebody comes.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.membership.reach import Reachability
from coordinator.membership.rebalancing import Rebalancing
from coordinator.membership.records import Record, Records, Rules
from coordinator.messages import GroupPlan, PlanChange, PlanName, Settings, State
from coordinator.plans import change_of
from parallel.placement import Placement, assign_experts, cover

BACK_OFF = 0.1
MAX_BACK_OFF = 5.0
"""Seconds between two tries to form a group, rising, while each fails."""
STILL_UNDER_WAY = 0.5
"""Part of the interval between heartbeats for which one may have been under way."""


class Epochs:
    """Numbers the groups, and decides when the next one is formed and of which members."""

    def __init__(self, rules: Rules, records: Records, reach: Reachability) -> None:
        """``records`` and ``reach`` are the registry's; only read here."""
        self._rules = rules
        self._records = records
        self._reach = reach
        self.rebalancing = Rebalancing()
        self.number = 0
        """The highest epoch known."""
        self.form: GroupPlan | None = None
        """The newest group, begun or not."""
        self._form_name: PlanName | None = None
        self._change: PlanChange | None = None
        """What makes it from the one before; None if they have little in common."""
        self._names: frozenset[str] = frozenset()
        """Its members."""
        self._recipients: frozenset[str] = frozenset()
        """The members, and the leavers: instances that the plan is sent to."""
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
        self._adopted_at: float | None = None
        """When this restarted coordinator adopted its predecessor's group.

        None once the fate of that group is known.
        """
        self._apart = False
        """It found the members in different epochs."""
        self._began_at: float | None = None
        """When this coordinator began."""
        self._heard_of_at: float | None = None
        """When it first heard of an epoch, restarted."""
        self._reported_lost: set[str] = set()
        """Members of the adopted group that others report as lost."""
        self._chosen: tuple[list[Record], frozenset[str], list[Record]] | None = None
        """Loaded instances, those that are left out, and the others."""
        self._lack: tuple[list[Record], int, str] | None = None
        """Instances, changes of their room so far, and what room is missing."""
        self._settled: list[Record] | None = None
        """The instances that were found to be the members of the newest group."""

    def __repr__(self) -> str:
        state = "adopting" if self._adopted_at is not None else "begun" if self._begun else "forming"
        return f"<Epochs {self.number} {state if self.form else 'no group'}>"

    # ---- what is learnt

    def age(self, now: float) -> float:
        """Seconds since this was asked first: since this coordinator began."""
        self._began_at = now if self._began_at is None else self._began_at
        return now - self._began_at

    def learn(self, epoch: int, group: GroupPlan | None, now: float) -> None:
        """An instance that registers knows this epoch, and steps in this group."""
        self.number = max(self.number, epoch, group.epoch if group is not None else 0)
        known = self.form.epoch if self.form is not None else 0
        if self._heard_of_at is None and self.number > 0:
            self._heard_of_at = now
        if group is None or group.epoch <= known:
            return
        if self.form is None or self._adopted_at is not None:
            self._adopted_at = now
            self._take(group)

    def fences(self, instance: str, epoch: int, group: GroupPlan | None) -> bool:
        """Whether a returning instance must give up its group: the others go on without it.

        The group is the one that it steps in, or is about to enter. It was a member before, and knows this
        epoch.
        """
        form = self.form
        if form is None or epoch == 0 or instance in self._recipients:
            return False
        return self._adopted_at is None or (group is not None and group.epoch < form.epoch)

    def heard(self, record: Record) -> None:
        """After a heartbeat."""
        self.number = max(self.number, record.epoch, record.ready_epoch)

    def begins(self, now: float) -> bool:
        """Whether the newest group has begun by now; True once per group.

        It has when all its members are in it and its leavers have left. (A leaver that got yet another plan
        could not follow the others into this group.)
        """
        form = self.form
        if form is None or self._begun or self._adopted_at is not None:
            return False
        progress = self._records.progress
        self._begun = not progress.outside and not progress.leaving
        self._begun_at = now
        if self._begun:
            self.rebalancing.begun(form, now)
        return self._begun

    def lost(self, epoch: int, suspects: Collection[str], *, entered: bool) -> bool:
        """A report that a group is broken, or, without ``entered``, could not form.

        Returns whether this is news about the newest group.
        """
        self.number = max(self.number, epoch)
        if self._adopted_at is not None:
            self._reported_lost.update(suspects)
        if entered:
            self._broken = max(self._broken, epoch)
        news = epoch > self._failed and (self.form is None or epoch >= self.form.epoch)
        self._failed = max(self._failed, epoch)
        return news

    # ---- what is asked

    def is_member(self, instance: str) -> bool:
        """Whether an instance is in the newest group."""
        return instance in self._names

    def awaits(self, record: Record) -> GroupPlan | PlanChange | None:
        """What an instance needs that does not have the plan of its next group."""
        form = self.form
        if form is None or self._adopted_at is not None or record.epoch >= form.epoch:
            return None
        if record.instance not in self._recipients or record.plan == self._form_name:
            return None
        change = self._change
        return change if change is not None and record.plan == change.base else form

    def sends(self, now: float) -> list[tuple[list[Record], GroupPlan | PlanChange]]:
        """The newest plan, or its change, with the instances that need it."""
        found: dict[int, tuple[list[Record], GroupPlan | PlanChange]] = {}
        members = [peer.instance for peer in self.form.peers] if self.form is not None else []
        leavers = self.form.leavers if self.form is not None else ()
        for instance in dict.fromkeys((*members, *leavers)):
            record = self._records.named(instance)
            message = self.awaits(record) if record is not None else None
            if record is not None and message is not None:
                found.setdefault(id(message), ([], message))[0].append(record)
                record.planned = message.epoch, now
        return list(found.values())

    def sends_again(self, record: Record, now: float) -> GroupPlan | PlanChange | None:
        """The same for an instance that has just sent a heartbeat.

        One that may have been under way when the plan was sent proves nothing.
        """
        message = self.awaits(record)
        if message is None:
            return None
        epoch, at = record.planned
        if epoch == message.epoch and now - at < self._rules.heartbeat_interval * STILL_UNDER_WAY:
            return None
        record.planned = message.epoch, now
        return message

    def starved(self, settings: Settings | None) -> str:
        """What is missing until the experts fit on the live instances again.

        Empty if they fit, or if the group serves.
        """
        if self.form is None or settings is None or self._adopted_at is not None:
            return ""
        if not self._gone() and self._failed < self.form.epoch:
            return ""
        candidates, changes = self._candidates(), self._records.num_room_changes
        if self._lack is None or self._lack[0] is not candidates or self._lack[1] != changes:
            self._lack = candidates, changes, _shortage(settings, candidates)
        return self._lack[2]

    def stragglers(self, now: float) -> list[Record]:
        """Newcomers that have held the forming of a group up for too long.

        One that was taken out and is back did not hold this group up: the next one may have it.
        """
        form = self.form
        if form is None or self._begun or now - self._formed_at < self._rules.forming_timeout:
            return []
        if self._adopted_at is not None or self._gone():  # a loss holds it up, and lack of room
            return []
        members = [record for record in self._records.values() if record.instance in self._names]
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
        if form is None or self._adopted_at is not None or form.epoch <= self._counted or self._gone():
            return None
        late = not self._begun and now - self._formed_at >= self._rules.forming_timeout
        if self._failed < form.epoch and not late:
            return None
        self._counted = form.epoch
        return form, now - self._begun_at if self._begun else 0.0

    def fits(self, settings: Settings, members: list[Record]) -> bool:
        """Whether all experts have room on some instances."""
        return not _shortage(settings, members)

    @property
    def members(self) -> frozenset[str]:
        """Instances in the newest group."""
        return self._names

    def others(self) -> list[Record]:
        """Instances with weights outside the newest group: new ones, and those left out."""
        return [record for record in self.loaded() if record.instance not in self._names]

    # ---- the next group

    def next_form(self, size: int | None, settings: Settings, now: float) -> tuple[GroupPlan, str] | None:
        """The group to form now, and why; None if things stay as they are.

        To be asked while nobody is under suspicion.
        """
        if self._adopted_at is not None and not self._adoption_ends(size, now):
            return None
        self.rebalancing.begin()
        why = self._reason(size, settings, now)
        if why is None:
            return None
        if self.form is not None and not self._is_well():
            self.rebalancing.failed(self.form, now)
        members = self._members(settings)
        leavers = [record for record in self._records.values() if record.state is State.DRAINED]
        if _shortage(settings, members) and (members or not leavers):
            return None
        again = self.form is not None and not self._gone() and not self._is_well()
        in_a_row = again and now - self._formed_at < 2 * MAX_BACK_OFF
        self._failures = self._failures + 1 if in_a_row else 0
        self.number += 1
        placement = self._placement(settings, members) if members else Placement((), 0)
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
        )
        self._formed_at, self._begun, self._apart = now, False, False
        self.rebalancing.formed(form, now)
        self._take(form)
        return form, why

    def _take(self, form: GroupPlan) -> None:
        self._change = None if self.form is None else change_of(self.form, form)
        self.form, self._form_name, self._settled = form, form.name, None
        self._names = frozenset(peer.instance for peer in form.peers)
        self._recipients = self._names.union(form.leavers)
        self._records.progress.follow(form.epoch, self._names, form.leavers, self._records.values())

    def _reason(self, size: int | None, settings: Settings, now: float) -> str | None:
        """Why another group is to be formed."""
        form, gone, since = self.form, self._gone(), now - self._formed_at
        if form is None:
            if self._is_young(now):
                return None  # there may be a mesh already, which has not noticed this coordinator yet
            if size is not None and self._records.num_loaded >= size and len(self._candidates()) >= size:
                return "all are loaded"
            waited = now - self._heard_of_at if self._heard_of_at is not None else 0.0
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
        candidates = self._candidates()
        if self._settled is not candidates:
            before, after = self._names, {record.instance for record in candidates}
            joins, leaves = len(after - before), len(before - after)
            changes = [f"{joins} join" if joins else "", f"{leaves} leave" if leaves else ""]
            if why := ", ".join(filter(None, changes)):
                return why
            self._settled = candidates
        return self.rebalancing.reason(settings, form, candidates, now)

    def _is_well(self) -> bool:
        """Whether the newest group has begun and goes on, as far as is known."""
        return self.form is not None and self._begun and self._failed < self.form.epoch and not self._gone()

    def _members(self, settings: Settings) -> list[Record]:
        """The members of the next group.

        After a loss it is only those who were in one: they need not wait until a newcomer has read its
        experts. But all, where they alone have no room.
        """
        candidates = self._candidates()
        if self._is_well():
            return candidates
        survivors = [record for record in candidates if record.epoch > 0]
        fit = survivors and not _shortage(settings, survivors)
        return survivors if fit else candidates

    def _all_are_back(self, size: int | None) -> bool:
        """Whether the adopted group is whole and steps: ``-dp`` members, all in it.

        A smaller one may be the remains of a group whose other members go on in a newer one.
        """
        assert self.form is not None
        return len(self.form.peers) >= max(2, size or 0) and not self._records.progress.elsewhere

    def _adoption_ends(self, size: int | None, now: float) -> bool:
        """Whether this restarted coordinator knows the fate of the group that it adopted."""
        assert self.form is not None
        assert self._adopted_at is not None
        since = now - self._adopted_at
        if self._is_young(now) and not self._all_are_back(size):
            return False  # there may be a newer group, of which nobody has registered yet
        missing, rules = self._records.progress.loading, self._rules
        if since < rules.return_grace and (missing & self._reported_lost):
            return False
        if since < rules.member_timeout and not missing <= self._reported_lost:
            return False
        epochs = {record.epoch for record in map(self._records.named, self._names) if record is not None}
        self._begun = epochs == {self.form.epoch}
        self._begun_at = now
        if self._begun:
            self.rebalancing.begun(self.form, now)
        older = [record.epoch for record in self._records.values() if record.epoch < self.form.epoch]
        self._broken = max([self._broken, *older])
        self._adopted_at = None
        self._apart = not self._begun
        return True

    def _is_young(self, now: float) -> bool:
        return self.age(now) < self._rules.return_grace

    def _candidates(self) -> list[Record]:
        """The instances that would be in a group formed now, by rank."""
        loaded, out = self._records.loaded(), self._reach.left_out
        if not out:
            return loaded
        if self._chosen is None or self._chosen[0] is not loaded or self._chosen[1] != out:
            chosen = [record for record in loaded if not self._reach.leaves_out(record.instance)]
            self._chosen = loaded, out, chosen
        return self._chosen[2]

    def loaded(self) -> list[Record]:
        """The instances that have their weights and are not leaving, by rank."""
        return self._records.loaded()

    def _gone(self) -> set[str]:
        """Members of the newest group that are not here any more."""
        return self._records.progress.absent

    def _placement(self, settings: Settings, members: list[Record]) -> Placement:
        """Over all tensor-parallel ranks of all members."""
        ranks = settings.tensor_parallel_size
        room = [member.max_experts for member in members for _ in range(ranks)]
        if self.form is None and settings.num_experts >= len(room):
            dealt = settings.expert_placement_strategy == "round_robin"
            first = assign_experts(settings.num_experts, len(room), "round_robin" if dealt else "linear")
            if all(not limit or len(first.experts_of(rank)) <= limit for rank, limit in enumerate(room)):
                return self.rebalancing.first_placement(settings, members, first)
        if self.form is not None:
            balanced = self.rebalancing.placement(settings, members, lost=not self._is_well())
            if balanced is not None:
                return balanced
        held = [member.held(rank, 0) for member in members for rank in range(ranks)]
        return cover(settings.num_experts, held, room)


def _shortage(settings: Settings, members: list[Record]) -> str:
    """What is missing until the experts fit on some instances; "" if they do."""
    num_experts = settings.num_experts
    limits = [member.max_experts * settings.tensor_parallel_size or num_experts for member in members]
    missing = num_experts - sum(limits)
    if missing <= 0:
        return ""
    more = -(-missing // max(limits, default=num_experts)) if members else 1
    return f"{more} more instance{'s' * (more != 1)}: the {num_experts} experts do not fit on {len(members)}"
