"""Roles that operators set, over restarts of instances and of the coordinator."""

from __future__ import annotations

import msgspec

from coordinator.member_state import MemberState
from coordinator.membership.records import Rules
from coordinator.membership.registry import Registry
from coordinator.messages import (
    FromCoordinator,
    Leave,
    Load,
    OperatorAnswer,
    Role,
    SetRole,
    State,
    TakeRole,
    ToCoordinator,
    Unknown,
)
from tests.coordinator.membership.test_registry import Follower, register, to


class Mesh:
    """A coordinator and its instances, which say all that they have to say."""

    def __init__(self, *roles: Role) -> None:
        self.members = [self.started(rank, role) for rank, role in enumerate(roles)]
        self.restart()

    def started(self, rank: int, role: Role, name: str = "") -> MemberState:
        member = MemberState(register(name or "abc"[rank], rank), role)
        member.state, member.address = State.READY, f"tcp://{member.register.instance}:1"
        return member

    def restart(self) -> None:
        """Start the coordinator again, which keeps no file."""
        self.registry = Registry(Rules(name="m", size=len(self.members)))
        for member in self.members:
            member.take(Unknown())
            self.talk(member)

    def talk(self, member: MemberState) -> None:
        """Let an instance and the coordinator exchange all that they want to."""
        for _ in range(4):
            for message in member.outgoing(Load()):
                for answer in self.send(member.register.instance, message):
                    member.take(answer)

    def send(self, name: str, message: ToCoordinator) -> list[FromCoordinator]:
        return to(name.encode(), self.registry.handle(name.encode(), message, 1.0))

    def set(self, rank: int, role: Role) -> OperatorAnswer:
        done = self.registry.handle(b"o", SetRole(command="c", rank=rank, role=role), 1.0)
        for member in self.members:
            for message in to(member.register.instance.encode(), done):
                member.take(message)
        (answer,) = to(b"o", done)
        assert isinstance(answer, OperatorAnswer)
        return answer

    @property
    def roles(self) -> list[Role]:
        return [member.role for member in self.registry.view().members]


def test_roles_of_the_command_line_are_seen() -> None:
    mesh = Mesh(Role.PREFILL, Role.DECODE, Role.MIXED)
    assert mesh.roles == [Role.PREFILL, Role.DECODE, Role.MIXED]


def test_another_role_counts_from_the_moment_of_the_command() -> None:
    mesh = Mesh(Role.MIXED, Role.MIXED)
    follower = Follower(mesh.registry, b"w", 1.0)
    answer = mesh.set(1, Role.PREFILL)
    assert (answer.status, answer.text) == (202, "instance 1 is prefill from now on; it was mixed")
    view = follower.sees(1.1)
    assert view is not None
    assert [member.role for member in view.members] == [Role.MIXED, Role.PREFILL]
    assert mesh.members[1].role is Role.PREFILL
    mesh.talk(mesh.members[1])
    assert mesh.set(1, Role.MIXED).text == "instance 1 is mixed from now on; it was prefill"
    assert mesh.roles == [Role.MIXED, Role.MIXED]


def test_it_is_sent_until_the_instance_has_it() -> None:
    mesh = Mesh(Role.MIXED, Role.MIXED)
    mesh.registry.handle(b"o", SetRole(command="c", rank=1, role=Role.DECODE), 1.0)  # what it sends is lost
    (heartbeat,) = mesh.members[1].outgoing(Load())
    for _ in range(2):
        assert TakeRole(Role.DECODE) in mesh.send("b", heartbeat)
    mesh.talk(mesh.members[1])
    (heartbeat,) = mesh.members[1].outgoing(Load())
    assert TakeRole(Role.DECODE) not in mesh.send("b", heartbeat)


def test_it_outlives_a_coordinator() -> None:
    mesh = Mesh(Role.PREFILL, Role.DECODE)
    mesh.set(0, Role.DECODE)
    mesh.set(1, Role.MIXED)
    mesh.restart()
    assert mesh.roles == [Role.DECODE, Role.MIXED]
    assert mesh.set(1, Role.PREFILL).text.startswith("instance 1 is prefill from now on; it was mixed")


def test_it_outlives_an_instance_also_after_the_coordinator_was_started_again() -> None:
    mesh = Mesh(Role.PREFILL, Role.DECODE)
    mesh.set(1, Role.PREFILL)
    mesh.restart()
    mesh.registry.tick(1.0)
    mesh.registry.tick(100.0)  # all are silent
    assert mesh.roles == []
    mesh.members = [mesh.started(0, Role.PREFILL), mesh.started(1, Role.DECODE, name="successor")]
    for member in mesh.members:
        mesh.talk(member)
    assert mesh.roles == [Role.PREFILL, Role.PREFILL]
    assert mesh.members[1].role is Role.PREFILL


def test_it_ends_with_an_instance_that_leaves_in_good_order() -> None:
    mesh = Mesh(Role.PREFILL, Role.DECODE)
    mesh.set(1, Role.MIXED)
    mesh.talk(mesh.members[1])
    mesh.send("b", Leave("b"))
    mesh.members[1] = mesh.started(1, Role.DECODE, name="successor")
    mesh.talk(mesh.members[1])
    assert mesh.roles == [Role.PREFILL, Role.DECODE]


def test_no_such_instance() -> None:
    answer = Mesh(Role.MIXED, Role.MIXED).set(7, Role.PREFILL)
    assert (answer.status, answer.text) == (404, "there is no instance 7; ranks now: 0, 1")


def test_a_mesh_that_only_begins_requests_is_remarked_upon() -> None:
    mesh = Mesh(Role.PREFILL, Role.MIXED)
    assert mesh.set(1, Role.PREFILL).text.endswith(
        "No instance is left that decodes: requests stay where they begin"
    )
    assert "No instance is left" not in mesh.set(0, Role.DECODE).text


def test_a_heartbeat_of_an_older_version_has_no_role() -> None:
    mesh = Mesh(Role.PREFILL, Role.DECODE)
    (heartbeat,) = mesh.members[0].outgoing(Load())
    fields = msgspec.to_builtins(heartbeat)
    del fields["role"], fields["is_role_set"]
    mesh.send("a", msgspec.convert(fields, type(heartbeat)))
    assert mesh.roles == [Role.MIXED, Role.DECODE]
