"""State machine of an instance's messages with the coordinator (pure).

Messages go in, messages come out. The coordinator may be away at any time, and a new one may know nothing. So
every message is sent again and again, and a lost one does no harm.
:class:`coordinator.member_connection.MemberConnection` is the thread and the socket around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from coordinator.messages import (
    AdaptersReport,
    AdmissionRefused,
    AdmissionWait,
    Beat,
    ExpertLoads,
    FromCoordinator,
    GroupPlan,
    Heartbeat,
    Load,
    Lost,
    OrdersReport,
    PlanChange,
    Probe,
    Reach,
    Register,
    Role,
    StandingOrders,
    State,
    TakeRole,
    ToCoordinator,
    Unknown,
    View,
    ViewChange,
    ViewCurrent,
    WeightsReport,
    Welcome,
    is_same_but_name,
)
from coordinator.numerics import Numerics
from coordinator.plans import changed


class MemberState:
    """Registration, epoch and reports of one instance.

    Before each message it is set what is new, by assignment.
    """

    def __init__(self, register: Register, role: Role = Role.MIXED) -> None:
        self.register = register
        self.role = role
        self.is_role_set = False
        """Whether an operator has set the role."""
        self.state = State.LOADING
        self.phase = "starting"
        self.address = self.store = ""
        self.experts: tuple[tuple[int, ...], ...] = ()
        self.experts_by_layer: tuple[tuple[tuple[int, ...], ...], ...] = ()
        self.expert_layers = self.expert_bytes = 0
        self.loads: ExpertLoads | None = None
        """Loads of the last window of steps, sent again until the next one."""
        self.max_experts = self.ready_epoch = 0
        self.numerics: Numerics | None = None
        """Its numerics class, once it has its weights."""
        self.welcome: Welcome | None = None
        """None before the coordinator has answered, and again when it does not know this instance."""
        self.refusal: str | None = None
        self.waits_for: str | None = None
        """Why the coordinator has neither admitted nor refused this instance yet."""
        self.neighbours = 1
        self.heartbeat_interval: float | None = None
        """Seconds from one heartbeat to the next; None before the coordinator has answered."""
        self.epoch = register.epoch
        """The highest one heard of."""
        self.form: GroupPlan | None = None
        """The newest one."""
        self.orders = StandingOrders()
        """The newest ones."""
        self.in_effect = 0
        """Revision of the orders that are in effect here."""
        self.weights = WeightsReport()
        """How far this instance is with weight versions."""
        self.adapters = AdaptersReport()
        """How far this instance is with an adapter to read."""
        self.on_orders: Callable[[], None] | None = None
        self.on_form: Callable[[GroupPlan], None] | None = None
        self.on_fenced: Callable[[], None] | None = None
        self._fenced_up_to = 0
        """Epoch up to which the others go on without this instance.

        Plans up to it that come late are void."""
        self._group: GroupPlan | None = None
        self._lost: Lost | None = None
        self._answers = 0

    def __repr__(self) -> str:
        rank = self.welcome.rank if self.welcome else "?"
        return f"<MemberState rank {rank} {self.state} epoch {self.epoch}>"

    def hold(self, experts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Record the experts that this instance holds, by tensor-parallel rank and layer."""
        alike = all(of_layer == of_rank[0] for of_rank in experts for of_layer in of_rank)
        self.experts = tuple(tuple(of_rank[0]) if of_rank else () for of_rank in experts) if alike else ()
        self.experts_by_layer = () if alike else tuple(tuple(map(tuple, of_rank)) for of_rank in experts)

    def enter(self, group: GroupPlan | None) -> None:
        """Record the group in which this instance steps, or none."""
        self._group = group
        if group is not None and self._lost is not None and self._lost.epoch < group.epoch:
            self._lost = None

    def report(self, lost: Lost) -> None:
        """Report a lost group until another GroupPlan arrives or a later group is entered."""
        self._lost = lost

    def outgoing(self, load: Load) -> list[ToCoordinator]:
        """Messages to send now: at every interval, and at each change."""
        if self.welcome is None:
            orders = self.orders if self.orders.revision else None
            return [msgspec.structs.replace(self.register, numerics=self.numerics, orders=orders)]
        heartbeat = Heartbeat(
            instance=self.register.instance,
            state=self.state,
            phase=self.phase,
            address=self.address,
            store=self.store,
            load=load,
            experts=self.experts,
            experts_by_layer=self.experts_by_layer,
            expert_layers=self.expert_layers,
            loads=self.loads,
            expert_bytes=self.expert_bytes,
            max_experts=self.max_experts,
            epoch=self._group.epoch if self._group is not None else 0,
            ready_epoch=self.ready_epoch,
            plan=self.form.name if self.form is not None else None,
            answers=self._answers,
            numerics=self.numerics,
            role=self.role,
            is_role_set=self.is_role_set,
            orders=OrdersReport(
                self.orders.revision, self.orders.token, self.in_effect >= self.orders.revision
            ),
            weights=self.weights,
            adapters=self.adapters,
        )
        return [heartbeat] if self._lost is None else [heartbeat, self._lost]

    def take(self, message: FromCoordinator) -> bool:
        """Take a message; returns whether something must be sent at once."""
        match message:
            case Welcome():
                self._welcomed(message)
                return True
            case AdmissionWait(reason):
                self.waits_for = reason
            case AdmissionRefused(reason):
                self.refusal = reason
                return True
            case Beat(epoch, neighbours, interval):
                self.epoch, self.neighbours = max(self.epoch, epoch), neighbours
                usual = self.welcome.heartbeat_interval if self.welcome is not None else None
                self.heartbeat_interval = interval if interval is not None else usual
            case GroupPlan():
                self._take_form(message)
            case PlanChange():
                if self.form is not None and self.form.name == message.base:  # else the plan itself comes
                    self._take_form(changed(self.form, message))
            case Probe(number):
                self._answers = number
                return True
            case TakeRole(role):
                self.role, self.is_role_set = role, True
                return True
            case StandingOrders():
                return self._take_orders(message)
            case Unknown():
                return self._register_again()
            case Reach() | View() | ViewChange() | ViewCurrent():
                pass  # one takes connections to answer, the others are for watchers
        return False

    def _take_orders(self, orders: StandingOrders) -> bool:
        """Take over newer orders; returns whether they are."""
        before = self.orders
        if orders.revision <= before.revision:
            return False
        self.orders = orders
        if is_same_but_name(orders, before) and self.in_effect >= before.revision:
            self.in_effect = orders.revision
        elif self.on_orders is not None:
            self.on_orders()
        return True

    def _welcomed(self, message: Welcome) -> None:
        self._take_orders(message.orders)
        self.welcome, self.epoch = message, max(self.epoch, message.epoch)
        self.heartbeat_interval = message.heartbeat_interval
        self.register = msgspec.structs.replace(
            self.register,
            rank=message.rank,
            rank_was_given=self.register.rank_was_given or self.register.rank is None,
            settings=message.settings,
            size=None,
        )
        if message.fenced:
            self._fenced_up_to = message.epoch
        if message.fenced and (self._group is not None or self.form is not None):
            self._group = self.form = self._lost = None
            self.ready_epoch = 0
            self.state = State.LOADED if self.state is State.READY else self.state
            if self.on_fenced is not None:
                self.on_fenced()

    def _take_form(self, form: GroupPlan) -> None:
        newest = self.form.epoch if self.form is not None else 0
        if form.epoch < newest or form.epoch <= self._fenced_up_to:
            return
        self.form, self.epoch = form, max(self.epoch, form.epoch)
        if self._lost is not None and form.epoch > max(self._lost.epoch, newest):
            self._lost = None
        if self.on_form is not None:
            self.on_form(form)

    def _register_again(self) -> bool:
        """Register again: the coordinator does not know this instance.

        What it asked before is forgotten: the probes of another one bear the same numbers.
        """
        if self.welcome is None:
            return False
        self.register = msgspec.structs.replace(self.register, epoch=self.epoch, group=self._group)
        self.welcome, self.heartbeat_interval, self._answers = None, None, 0
        return True
