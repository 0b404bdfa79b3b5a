"""The command by which a Python program changes the weights of its mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE, FAILED
from coordinator.messages import InFlight, OperatorAnswer, UpdateWeights
from router.offline import weights
from router.offline.weights import carry_out, update_command


class Coordinator:
    """Answers in turn; an error in place of one is raised."""

    def __init__(self, *answers: tuple[int, str] | type[Exception]) -> None:
        self._answers: Iterator[tuple[int, str] | type[Exception]] = iter(answers)
        self.asked: list[tuple[str, UpdateWeights]] = []

    async def ask(self, endpoint: str, wish: UpdateWeights, timeout: float, keys: object) -> OperatorAnswer:
        self.asked.append((endpoint, wish))
        answer = next(self._answers)
        if isinstance(answer, type):
            raise answer
        return OperatorAnswer(command=wish.command, status=answer[0], text=answer[1])


def run(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, wish: UpdateWeights) -> str:
    monkeypatch.setattr(weights, "ask", coordinator.ask)
    monkeypatch.setattr(weights, "ASK_INTERVAL", 0.0)
    return asyncio.run(carry_out("tcp://there", None, wish))


def test_a_command_is_repeated_until_all_have_gone_over(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator((ACCEPTED, "reading"), TimeoutError, (ACCEPTED, "reading"), (DONE, "in use"))
    wish = update_command("/new", "step 1", "recompute")
    assert (wish.source, wish.label, wish.in_flight) == ("/new", "step 1", InFlight.RECOMPUTE)
    assert run(coordinator, monkeypatch, wish) == "in use"
    assert coordinator.asked == [("tcp://there", wish)] * 4


@pytest.mark.parametrize("status", [CONFLICT, FAILED])
def test_weights_that_are_not_used_are_an_error(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator((ACCEPTED, "reading"), (status, "instance 0: a tensor is missing"))
    with pytest.raises(ValueError, match="the weights are not used: instance 0: a tensor is missing"):
        run(coordinator, monkeypatch, update_command("/new", "", "keep"))


def test_an_update_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(*[(ACCEPTED, "reading")] * 1000000)
    monkeypatch.setattr(weights, "UPDATE_TIMEOUT", 0.0)
    with pytest.raises(TimeoutError):
        run(coordinator, monkeypatch, update_command("/new", "", "keep"))


def test_modes_for_requests_in_flight_are_named() -> None:
    with pytest.raises(ValueError, match="in_flight is one of keep, recompute, abort, finish, not 'drain'"):
        update_command("/new", "", "drain")
