"""How long ``lockstep drain`` waits, and what it prints if an instance stays."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from coordinator.commands import has_size
from coordinator.messages import Load, Member, OperatorAnswer, OperatorCommand, State, View
from router.tools import operate
from router.tools.operate import (
    LEAVE_TIMEOUT,
    WAIT_TIMEOUT,
    DrainConfig,
    _is_gone,
    _why_it_stays,
    main_drain,
    main_role,
    main_scale,
)


def view(*members: Member) -> View:
    return View(epoch=1, size=2, settings=None, members=list(members), waiting_for="")


def member(name: str, rank: int, state: State, load: Load) -> Member:
    return Member(
        instance=name, rank=rank, state=state, phase="", address="", host="alpha", pid=77, load=load
    )


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, WAIT_TIMEOUT),
        ({"timeout": 5.0}, 5.0 + LEAVE_TIMEOUT),
        ({"timeout": 5.0, "wait_timeout": 2.0}, 2.0),
    ],
)
def test_it_never_waits_without_end(given: dict[str, float], seconds: float) -> None:
    assert DrainConfig(rank=1, **given).patience == seconds  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--no-wait waits for nothing"):
        DrainConfig(rank=1, wait=False, wait_timeout=1.0)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (Load(running=2, waiting=1), "2 requests run and 1 wait there.* lockstep drain 1 --timeout 0"),
        (Load(running=2, stalled_for=9.0), "no step has ended for 9 s.* kill -9 77 on alpha"),
        (Load(), "0 requests run and 0 wait there.* its log says what it waits for"),
    ],
)
def test_what_still_runs_is_said(load: Load, says: str) -> None:
    before = view(member("a", 0, State.READY, Load()), member("b", 1, State.READY, load))
    now = view(member("a", 0, State.READY, Load()), member("b", 1, State.DRAINING, load))
    assert not _is_gone(before, 1)(now)
    said = _why_it_stays(before, now, 1)
    assert said.startswith("instance 1 is draining, ")
    assert re.search(says, said)


def test_another_instance_of_its_rank_is_not_the_one_that_was_told() -> None:
    before = view(member("b", 1, State.READY, Load()))
    successor = view(member("c", 1, State.READY, Load(running=1)))
    assert _is_gone(before, 1)(successor)
    assert "gone by now" in _why_it_stays(before, successor, 1)


def test_a_coordinator_that_has_just_been_started_again_knows_nobody_yet() -> None:
    ready = [member("ab"[rank], rank, State.READY, Load()) for rank in (0, 1)]
    before, early = view(*ready), msgspec.structs.replace(view(*ready[:1]), complete=False)
    assert not _is_gone(before, 1)(early)
    assert "has not heard of instance 1 yet" in _why_it_stays(before, early, 1)
    assert not has_size(early, 1), "1 may still be there"
    assert _is_gone(before, 1)(view(*ready[:1]))
    assert has_size(view(*ready[:1]), 1)


@pytest.mark.parametrize(
    ("command", "argv", "said"),
    [
        (main_scale, ["0"], "lockstep scale: error: SIZE: Expected `int` >= 1"),
        (main_scale, ["many"], "lockstep scale: error: SIZE must be a number, not 'many'"),
        (main_drain, ["x"], "lockstep drain: error: RANK must be a number, not 'x'"),
        (main_role, ["1"], "lockstep role: error: give the RANK of an instance and its role"),
        (
            main_role,
            ["1", "null"],
            "lockstep role: error: ROLE must be one of prefill, decode, mixed, not 'null'",
        ),
    ],
)
def test_errors_name_what_was_given(
    command: Callable[[list[str]], int], argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("is_lost", [False, True])
def test_scale_ends_at_once_when_what_it_waits_for_is_lost(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = [member("abc"[rank], rank, State.READY, Load()) for rank in range(3)]
    views = iter([view(*ready[:2]), view(*ready[:2]), view(*ready[:2]), view(*ready)])
    statuses = iter([202, 202, 500 if is_lost else 202])
    commands = []

    async def look(*_: object) -> View:
        return next(views)

    async def ask(_endpoint: str, wish: OperatorCommand, *_: object) -> OperatorAnswer:
        commands.append(wish.command)
        status = next(statuses)
        text = "Engine_2 ended with status 3: it differs" if status == 500 else "starting instance 2"
        return OperatorAnswer(command=wish.command, status=status, text=text)

    monkeypatch.setattr(operate, "find_view", look)
    monkeypatch.setattr(operate, "fetch_view", look)
    monkeypatch.setattr(operate, "ask", ask)
    monkeypatch.setattr(operate, "LOOK_INTERVAL", 0.0)
    status = main_scale(["3", "--insecure-mesh"])
    printed = capsys.readouterr()
    assert printed.out.startswith("starting instance 2\n")
    assert len(set(commands)) == 1
    if is_lost:
        assert status == 1
        assert re.search(r"not done after .* s: Engine_2 ended with status 3: it differs", printed.err)
        assert next(views).members == ready, "it did not look again"
    else:
        assert (status, "done after" in printed.out) == (0, True)
