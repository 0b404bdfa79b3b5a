"""Roles of instances that operators have set (pure).

Part of :mod:`coordinator.membership.registry`. A role belongs to a rank, so an instance that is started again
has it, too. Instances keep the role that they were given and name it in heartbeats. So a coordinator that is
started again has it from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coordinator.membership.operations import ACCEPTED, NOT_FOUND
from coordinator.messages import OperatorAnswer, Role, SetRole, TakeRole


class RoleHolder(Protocol):
    """The part of a record that roles need."""

    @property
    def rank(self) -> int: ...
    @property
    def role(self) -> Role: ...
    @property
    def is_role_set(self) -> bool: ...


class SetRoles:
    """Roles by rank."""

    def __init__(self) -> None:
        self._roles: dict[int, Role] = {}

    def __repr__(self) -> str:
        return f"<SetRoles {self._roles}>"

    def of(self, known: RoleHolder) -> Role:
        """The role of an instance: the one that was set, or else its own."""
        return self._roles.get(known.rank, known.role)

    def set(self, wish: SetRole, instances: Mapping[int, RoleHolder]) -> OperatorAnswer:
        """Give a rank another role."""
        known = instances.get(wish.rank)
        if known is None:
            ranks = ", ".join(map(str, sorted(instances))) or "none"
            problem = f"there is no instance {wish.rank}; ranks now: {ranks}"
            return OperatorAnswer(command=wish.command, status=NOT_FOUND, text=problem)
        before = self.of(known)
        self._roles[wish.rank] = wish.role
        text = f"instance {wish.rank} is {wish.role} from now on"
        if before is not wish.role:
            text += f"; it was {before}"
        if all(self.of(each) is Role.PREFILL for each in instances.values()):
            text += ". No instance is left that decodes: requests stay where they begin"
        return OperatorAnswer(command=wish.command, status=ACCEPTED, text=text)

    def heard(self, known: RoleHolder) -> TakeRole | None:
        """Compare an instance's role with the one that was set, to send that.

        A role that only the instance knows was set before this coordinator was started.
        """
        if known.is_role_set and known.rank not in self._roles:
            self._roles[known.rank] = known.role
        wanted = self._roles.get(known.rank)
        if wanted is None or (known.is_role_set and known.role is wanted):
            return None
        return TakeRole(wanted)

    def forget(self, rank: int) -> None:
        """Forget the role of an instance that has left in good order.

        Its successor has the one of its command line.
        """
        self._roles.pop(rank, None)
