from __future__ import annotations

import msgspec

from coordinator.membership.operations import LAUNCHER_TIMEOUT, MAX_PENDING
from coordinator.membership.records import Instruction, Note, Rules, Send
from coordinator.membership.registry import Registry
from coordinator.messages import (
    AnswerChecks,
    Drain,
    Exited,
    FromCoordinator,
    Leave,
    OperatorAnswer,
    Scale,
    State,
    Watch,
)
from tests.coordinator.membership.test_registry import Follower, heartbeat, joined, to


def mesh(*instances: str) -> Registry:
    registry = Registry(Rules(name="m", size=len(instances)))
    for instance in instances:
        joined(registry, instance)
        registry.handle(instance.encode(), heartbeat(instance), 0.0)
    return registry


def drain(rank: int, command: str = "c", **fields: object) -> Drain:
    return Drain(command=command, rank=rank, **fields)  # type: ignore[arg-type]


def status(instructions: list[Instruction], peer: bytes = b"o") -> int:
    (answer,) = to(peer, instructions)
    assert isinstance(answer, OperatorAnswer)
    return answer.status


def wishes(instructions: list[Instruction], peer: bytes) -> list[FromCoordinator]:
    return [message for message in to(peer, instructions) if isinstance(message, Drain | Scale)]


def test_a_wish_is_passed_on_to_its_instance() -> None:
    registry = mesh("a", "b")
    done = registry.handle(b"o", drain(1, timeout=5.0), 1.0)
    assert wishes(done, b"b") == [drain(1, timeout=5.0)]
    assert status(done) == 202
    assert status(registry.handle(b"o", drain(7), 1.0)) == 404
    assert any(isinstance(note, Note) and "drain" in note.text for note in done)


def test_who_was_told_to_drain_is_shown_so_before_it_says_so() -> None:
    """A wish to scale may follow at once, and must not count it."""
    registry = mesh("a", "b")
    follower = Follower(registry, b"l", 1.0)
    view = follower.sees(1.0, registry.handle(b"o", drain(1), 1.0))
    assert view is not None
    assert [member.state for member in view.members] == [State.READY, State.DRAINING]
    registry.handle(b"b", heartbeat("b"), 1.1)
    assert registry.view().members == view.members


def test_the_last_one_goes_only_by_force() -> None:
    registry = mesh("a", "b")
    registry.handle(b"o", drain(1), 1.0)
    refused = registry.handle(b"o", drain(0, "d"), 1.0)
    assert status(refused) == 409, "1 was told to go, though it has not said yet that it does"
    assert not wishes(refused, b"a")
    forced = registry.handle(b"o", drain(0, "d", force=True), 1.0)
    assert status(forced) == 202
    assert wishes(forced, b"a")


def test_asking_again_is_no_new_wish() -> None:
    registry = mesh("a", "b")
    first = registry.handle(b"o", drain(1), 1.0)
    again = registry.handle(b"o", drain(1), 1.5)
    assert status(first) == status(again) == 202
    assert wishes(again, b"b") == wishes(first, b"b"), "the instance knows the command's name"


def test_a_rank_that_left_as_told_is_not_waited_for() -> None:
    registry = mesh("a", "b")
    registry.handle(b"b", heartbeat("b", State.DRAINING), 1.0)
    registry.handle(b"b", Leave("b"), 1.0)
    assert registry.view().waiting_for == ""
    assert status(registry.handle(b"o", drain(0), 1.0)) == 409
    joined(registry, "b2", 1)
    assert registry.view().waiting_for == "rank 1 (starting)"


def test_a_dead_process_is_out_at_once_and_waited_for() -> None:
    registry = mesh("a", "b")
    follower = Follower(registry, b"w", 1.0)
    view = follower.sees(1.0, registry.handle(b"l", Exited("b", "was killed by signal 9"), 1.0))
    assert view is not None
    assert [member.rank for member in view.members] == [0]
    assert "rank 1 to register" in view.waiting_for
    assert joined(registry, "b2", 1) == 1, "its rank is free at once"
    assert registry.handle(b"l", Exited("b", "was killed by signal 9"), 1.0) == []


def test_scaling_asks_the_launcher_of_this_mesh() -> None:
    registry = mesh("a")
    wish = Scale(command="s", size=3)
    assert status(registry.handle(b"o", wish, 1.0)) == 503
    registry.handle(b"x", Watch("serve", launcher="another"), 1.0)
    assert status(registry.handle(b"o", wish, 1.0)) == 503
    registry.handle(b"l", Watch("serve", launcher="m"), 1.0)
    assert wishes(registry.handle(b"o", wish, 1.0), b"l") == [wish]
    registry.push(1.1)
    answer = OperatorAnswer(command="s", status=202, text="starting instance 1, 2")
    assert registry.handle(b"l", answer, 1.2) == [Send(b"o", answer)]
    assert registry.handle(b"l", answer, 1.3) == [], "answered"
    assert status(registry.handle(b"o", wish, 1.1 + LAUNCHER_TIMEOUT)) == 503, "the launcher is silent"


def test_pending_commands_are_bounded() -> None:
    registry = mesh("a")
    registry.handle(b"l", Watch("serve", launcher="m"), 1.0)
    for number in range(MAX_PENDING + 1):
        registry.handle(b"o", Scale(command=str(number), size=2), 1.0)
    answer = OperatorAnswer(command="0", status=202, text="")
    assert registry.handle(b"l", answer, 1.0) == []
    assert registry.handle(b"l", msgspec.structs.replace(answer, command="1"), 1.0)


def test_a_wish_is_repeated_until_its_instance_drains() -> None:
    """The first one may be lost with the instance's connection."""
    registry = mesh("a", "b")
    registry.handle(b"o", drain(1), 1.0)
    assert wishes(registry.handle(b"b-again", heartbeat("b"), 1.5), b"b-again") == [drain(1)]
    assert not wishes(registry.handle(b"a", heartbeat("a"), 1.5), b"a")
    assert not wishes(registry.handle(b"b-again", heartbeat("b", State.DRAINING), 2.0), b"b-again")


def test_a_drain_of_another_instance_than_the_one_that_has_the_rank_is_refused() -> None:
    """It was meant for its predecessor, which a shadow check had named."""
    registry = mesh("a", "b")
    refused = registry.handle(b"o", drain(1, instance="old b"), 1.0)
    assert status(refused) == 404
    assert not wishes(refused, b"b")
    done = registry.handle(b"o", drain(1, "d", instance="b"), 1.0)
    assert status(done) == 202
    assert wishes(done, b"b")
    again = registry.handle(b"p", drain(1, "e", instance="b"), 1.0)
    assert status(again, b"p") == 202, "another router found the same"
    assert [member.state for member in registry.view().members] == [State.READY, State.DRAINING]


def test_shadow_checks_of_all_routers_are_counted_for_the_instance_that_they_name() -> None:
    registry = mesh("a", "b")
    follower = Follower(registry, b"w", 1.0)

    def seen(router: str, odd: dict[str, int]) -> list[int] | None:
        watch = Watch(router, odd=odd, number=1)
        view = follower.sees(1.0, registry.handle(router.encode(), watch, 1.0))
        return None if view is None else [member.odd for member in view.members]

    assert seen("r1", {}) is None
    assert seen("r1", {"b": 1, "gone": 3}) == [0, 1]
    assert seen("r1", {"b": 1, "gone": 3}) is None, "a sign of life brings nothing new"
    assert seen("r2", {"b": 2}) == [0, 3]
    assert seen("r1", {"b": 2}) == [0, 4]
    registry.handle(b"b", heartbeat("b"), 2.0)
    assert registry.view().members[1].odd == 4


def test_answers_that_routers_checked_are_added_up_while_they_are_there() -> None:
    registry = mesh("a", "b")
    follower = Follower(registry, b"w", 1.0)
    for router, checked in (("r1", 3), ("r2", 5), ("r1", 7)):
        registry.handle(router.encode(), Watch(router, answers=AnswerChecks(checked, 1)), 1.0)
    assert registry.view().answers == AnswerChecks(12, 2)
    view = follower.sees(2.5, registry.tick(2.5))
    assert view is not None
    assert view.answers == AnswerChecks(12, 2), "it goes along with the next change"
    registry.handle(b"r1", Watch("r1", answers=AnswerChecks(8, 1)), 100.0)
    registry.tick(101.0)
    assert registry.view().answers == AnswerChecks(8, 1), "the other router is gone"
