from __future__ import annotations

import msgspec

from coordinator.messages import Answer, Drain, Exited, FromCoordinator, Leave, Scale, State, View, Watch
from coordinator.operations import LAUNCHER_TIMEOUT, MAX_PENDING
from coordinator.records import Instruction, Note, Rules, Send
from coordinator.registry import Registry
from tests.coordinator.test_registry import heartbeat, joined, to


def mesh(*instances: str) -> Registry:
    membership = Registry(Rules(name="m", size=len(instances)))
    for instance in instances:
        joined(membership, instance)
        membership.handle(instance.encode(), heartbeat(instance), 0.0)
    return membership


def drain(rank: int, command: str = "c", **fields: object) -> Drain:
    return Drain(command=command, rank=rank, **fields)  # type: ignore[arg-type]


def status(instructions: list[Instruction], peer: bytes = b"o") -> int:
    (answer,) = to(peer, instructions)
    assert isinstance(answer, Answer)
    return answer.status


def wishes(instructions: list[Instruction], peer: bytes) -> list[FromCoordinator]:
    return [message for message in to(peer, instructions) if isinstance(message, Drain | Scale)]


def test_a_wish_is_passed_on_to_its_instance() -> None:
    membership = mesh("a", "b")
    done = membership.handle(b"o", drain(1, timeout=5.0), 1.0)
    assert wishes(done, b"b") == [drain(1, timeout=5.0)]
    assert status(done) == 202
    assert status(membership.handle(b"o", drain(7), 1.0)) == 404
    assert any(isinstance(note, Note) and "drain" in note.text for note in done)


def test_who_was_told_to_drain_is_shown_so_before_it_says_so() -> None:
    """A wish to scale may follow at once, and must not count it."""
    membership = mesh("a", "b")
    membership.handle(b"l", Watch("serve", launcher="m"), 1.0)
    (view,) = to(b"l", membership.handle(b"o", drain(1), 1.0))
    assert isinstance(view, View)
    assert [member.state for member in view.members] == [State.READY, State.DRAINING]
    membership.handle(b"b", heartbeat("b"), 1.1)
    assert membership.view().members == view.members


def test_the_last_one_goes_only_by_force() -> None:
    membership = mesh("a", "b")
    membership.handle(b"o", drain(1), 1.0)
    refused = membership.handle(b"o", drain(0, "d"), 1.0)
    assert status(refused) == 409, "1 was told to go, though it has not said yet that it does"
    assert not wishes(refused, b"a")
    forced = membership.handle(b"o", drain(0, "d", force=True), 1.0)
    assert status(forced) == 202
    assert wishes(forced, b"a")


def test_asking_again_is_no_new_wish() -> None:
    membership = mesh("a", "b")
    first = membership.handle(b"o", drain(1), 1.0)
    again = membership.handle(b"o", drain(1), 1.5)
    assert status(first) == status(again) == 202
    assert wishes(again, b"b") == wishes(first, b"b"), "the instance knows the command's name"


def test_a_rank_that_left_as_told_is_not_waited_for() -> None:
    membership = mesh("a", "b")
    membership.handle(b"b", heartbeat("b", State.DRAINING), 1.0)
    membership.handle(b"b", Leave("b"), 1.0)
    assert membership.view().waiting_for == ""
    assert status(membership.handle(b"o", drain(0), 1.0)) == 409
    joined(membership, "b2", 1)
    assert membership.view().waiting_for == "rank 1 (starting)"


def test_a_dead_process_is_out_at_once_and_waited_for() -> None:
    membership = mesh("a", "b")
    membership.handle(b"w", Watch("w"), 1.0)
    (view,) = to(b"w", membership.handle(b"l", Exited("b", "was killed by signal 9"), 1.0))
    assert isinstance(view, View)
    assert [member.rank for member in view.members] == [0]
    assert "rank 1 to register" in view.waiting_for
    assert joined(membership, "b2", 1) == 1, "its rank is free at once"
    assert membership.handle(b"l", Exited("b", "was killed by signal 9"), 1.0) == []


def test_scaling_asks_the_launcher_of_this_mesh() -> None:
    membership = mesh("a")
    wish = Scale(command="s", size=3)
    assert status(membership.handle(b"o", wish, 1.0)) == 503
    membership.handle(b"x", Watch("serve", launcher="another"), 1.0)
    assert status(membership.handle(b"o", wish, 1.0)) == 503
    membership.handle(b"l", Watch("serve", launcher="m"), 1.0)
    assert wishes(membership.handle(b"o", wish, 1.0), b"l") == [wish]
    answer = Answer(command="s", status=202, text="starting instance 1, 2")
    assert membership.handle(b"l", answer, 1.2) == [Send(b"o", answer)]
    assert membership.handle(b"l", answer, 1.3) == [], "answered"
    assert status(membership.handle(b"o", wish, 1.1 + LAUNCHER_TIMEOUT)) == 503, "the launcher is silent"


def test_pending_commands_are_bounded() -> None:
    membership = mesh("a")
    membership.handle(b"l", Watch("serve", launcher="m"), 1.0)
    for number in range(MAX_PENDING + 1):
        membership.handle(b"o", Scale(command=str(number), size=2), 1.0)
    answer = Answer(command="0", status=202, text="")
    assert membership.handle(b"l", answer, 1.0) == []
    assert membership.handle(b"l", msgspec.structs.replace(answer, command="1"), 1.0)


def test_a_wish_is_repeated_until_its_instance_drains() -> None:
    """The first one may be lost with the instance's connection."""
    membership = mesh("a", "b")
    membership.handle(b"o", drain(1), 1.0)
    assert wishes(membership.handle(b"b-again", heartbeat("b"), 1.5), b"b-again") == [drain(1)]
    assert not wishes(membership.handle(b"a", heartbeat("a"), 1.5), b"a")
    assert not wishes(membership.handle(b"b-again", heartbeat("b", State.DRAINING), 2.0), b"b-again")
