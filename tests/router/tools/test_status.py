"""The table of ``lockstep status``."""

from __future__ import annotations

import pytest

from router.tools.status import _console, as_table
from tests.router.dispatch.test_mesh_parts import member, view


def test_addresses_of_ipv6_stand_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = ("tcp://[fd00::1]:29551", "tcp://[fd00:a::b:1]:29551")
    members = [member(f"m{rank}", rank, address=address) for rank, address in enumerate(addresses)]
    _console().print(as_table(view(*members)))
    printed = capsys.readouterr().out
    for address in addresses:
        assert address in printed
