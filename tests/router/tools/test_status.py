"""The table of ``lockstep status``."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.messages import AnswerChecks, BusyExpert, ExpertBalance, Load, Role
from coordinator.numerics import Numerics
from router.tools.status import _console, as_table
from tests.router.dispatch.test_mesh_parts import member, view


def test_addresses_of_ipv6_stand_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = ("tcp://[fd00::1]:29551", "tcp://[fd00:a::b:1]:29551")
    members = [member(f"m{rank}", rank, address=address) for rank, address in enumerate(addresses)]
    _console().print(as_table(view(*members)))
    printed = capsys.readouterr().out
    for address in addresses:
        assert address in printed


def test_the_numerics_class_of_each_instance_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    classes = [Numerics(f"fp_{kind}", kind, "bfloat16", True) for kind in ("amx", "avx2")]
    members = [
        msgspec.structs.replace(member(f"m{rank}", rank), numerics=numerics)
        for rank, numerics in enumerate([*classes, None])
    ]
    _console().print(as_table(view(*members)))
    printed = capsys.readouterr().out
    assert "numerics" in printed
    for kind in ("amx", "avx2"):
        assert f"{kind} fp_{kind}" in printed


def test_an_instance_that_shadow_checks_name_is_shown_so(capsys: pytest.CaptureFixture[str]) -> None:
    members = [msgspec.structs.replace(member(f"m{rank}", rank), odd=rank) for rank in range(3)]
    _console().print(as_table(view(*members)))
    printed = capsys.readouterr().out
    assert printed.count("odd in") == 2
    assert "ready (odd in 1 shadow check)" in printed
    assert "ready (odd in 2 shadow checks)" in printed


def test_checks_of_answers_and_of_the_cache_stand_below(capsys: pytest.CaptureFixture[str]) -> None:
    members = [member(f"m{rank}", rank) for rank in range(2)]
    _console().print(as_table(view(*members)))
    assert "checked" not in capsys.readouterr().out
    members = [
        msgspec.structs.replace(each, load=Load(cache_checked=1200 + number, cache_wrong=number))
        for number, each in enumerate(members)
    ]
    shown = msgspec.structs.replace(view(*members), answers=AnswerChecks(1204, 1))
    _console().print(as_table(shown))
    printed = " ".join(capsys.readouterr().out.split())
    assert "checked: 1,204 answers, 2,401 cache pieces, 2 wrong (24 h): see the logs" in printed


def test_roles_are_shown_where_an_instance_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    members = [member(f"m{rank}", rank) for rank in range(2)]
    _console().print(as_table(view(*members)))
    assert "role" not in capsys.readouterr().out
    _console().print(as_table(view(members[0], msgspec.structs.replace(members[1], role=Role.PREFILL))))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("role", "mixed", "prefill"))


def test_balance_and_the_busiest_experts_stand_below(capsys: pytest.CaptureFixture[str]) -> None:
    busiest = (BusyExpert(3, 0.25, (0, 1)), BusyExpert(7, 0.125, (1,)), BusyExpert(2, 0.1, ()))
    balance = ExpertBalance(
        windows=4, balancedness=0.93, changes=2, moves=5, held={0: 12, 1: 10}, busiest=busiest
    )
    shown = msgspec.structs.replace(view(member("a", 0), member("b", 1)), balance=balance)
    _console().print(as_table(shown))
    printed = " ".join(capsys.readouterr().out.split())
    assert "balancedness 0.93; 2 changes moved 5 copies" in printed
    assert "busiest: 3 (25% of rows, on 0 1), 7 (12% of rows, on 1), 2 (10% of rows, on none)" in printed
    assert "NOT BALANCED" not in printed
    failing = msgspec.structs.replace(balance, failures=3, is_failing=True)
    _console().print(as_table(msgspec.structs.replace(shown, balance=failing)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 failed; NOT BALANCED lately: see the coordinator's log for the reason" in printed
