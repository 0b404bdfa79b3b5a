"""Which communicator a group gets."""

from __future__ import annotations

import pytest

from parallel.communicators import Backend
from parallel.groups import choose_backend, choose_transport
from parallel.rounds import memory_order

ONE, TWO, SOME = ["a", "a"], ["a", "b"], ["a", "b", "a"]


@pytest.mark.parametrize(
    ("asked", "hosts", "between", "chosen"),
    [
        ("auto", ONE, "auto", "shared_memory"),
        ("auto", ["a"], "auto", "shared_memory"),
        ("auto", TWO, "auto", "tcp"),
        ("auto", SOME, "auto", "mixed"),
        ("auto", TWO, "gloo", "gloo"),
        ("auto", SOME, "gloo", "gloo"),
        ("auto", ONE, "gloo", "shared_memory"),
        ("shared_memory", ONE, "auto", "shared_memory"),
        ("tcp", ONE, "auto", "tcp"),
        ("tcp", SOME, "auto", "tcp"),
        ("allgather_reducescatter", ONE, "auto", "gloo"),
        ("all_to_all", TWO, "tcp", "gloo"),
    ],
)
def test_the_choice_follows_from_flags_and_hosts(
    asked: str, hosts: list[str], between: str, chosen: Backend
) -> None:
    assert choose_backend(asked, hosts, between) == chosen


def test_shared_memory_is_for_one_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs all instances on one host, not on a, b"):
        choose_backend("shared_memory", SOME)
    monkeypatch.setattr(memory_order, "fence_here", lambda: None)
    assert [choose_transport(hosts) for hosts in (ONE, TWO, SOME)] == ["tcp", "tcp", "mixed"]
    assert choose_transport(ONE, "gloo") == "gloo"
