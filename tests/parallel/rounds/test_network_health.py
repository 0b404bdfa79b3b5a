"""Last words of members on control connections, and ends without one."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from parallel.communicators.base import CollectiveError
from parallel.rounds.network_health import NetworkHealth

SECONDS = 5.0


class Member:
    """The health of one member, and what it did to the links."""

    def __init__(self, rank: int, control: dict[int, socket.socket], processes: dict[int, int]) -> None:
        self.aborted = threading.Event()
        self.found: list[CollectiveError] = []
        self.control = control
        self.health = NetworkHealth(rank, len(control) + 1, control, 60.0, None, self.aborted.set)
        for peer, pid in processes.items():
            if peer != rank:
                self.health.watch_process(peer, pid)
        self.knows = threading.Event()
        self.health.on_broken = self._on_broken

    def _on_broken(self, error: CollectiveError) -> None:
        self.found.append(error)
        self.knows.set()

    def error(self, call: Callable[[], object]) -> tuple[str, int | None, str]:
        with pytest.raises(CollectiveError) as caught:
            call()
        return str(caught.value), caught.value.rank, caught.value.evidence


@contextmanager
def group(size: int, processes: dict[int, int] | None = None) -> Iterator[list[Member]]:
    """All members of a group; afterwards nothing of them is left."""
    before = len(os.listdir("/proc/self/fd"))
    control: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            control[low][high], control[high][low] = socket.socketpair()
    for sockets in control:
        for each in sockets.values():
            each.setblocking(False)
    members = [Member(rank, sockets, processes or {}) for rank, sockets in enumerate(control)]
    try:
        yield members
    finally:
        for member in members:
            member.health.close()
            member.health.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [each for each in threading.enumerate() if each.name.startswith("links-watch-")]


def test_who_gives_up_says_because_of_whom_and_all_links_are_aborted() -> None:
    with group(3) as (zero, one, two):
        zero.health.begin("all_gather")
        message = zero.error(lambda: zero.health.fail_on_bytes(2, 8, 12))[0]
        assert message == "all_gather on rank 0: rank 2 sends 8 bytes where 12 are expected"
        for other in (one, two):
            assert other.aborted.wait(SECONDS)
            found = other.error(lambda other=other: other.health.begin("all_reduce"))  # type: ignore[misc]
            rank = other.health.rank
            assert found[0].startswith(f"all_reduce on rank {rank}: rank ")
            assert found[0].endswith(
                " has given up because of rank 2"
            )  # zero, or the other that knew it first
            assert found[1:] == (2, "closed")
        assert zero.aborted.is_set()
        assert zero.found == []


def test_an_abort_is_known_everywhere_and_blames_nobody() -> None:
    with group(2) as (zero, one):
        zero.health.abort()
        assert one.aborted.wait(SECONDS)
        assert one.error(lambda: one.health.begin("x")) == ("x on rank 1: rank 0 has aborted", None, "closed")
        assert zero.error(lambda: zero.health.begin("x")) == ("x on rank 0: it was aborted", None, "aborted")
        assert one.knows.wait(SECONDS)
        assert [(str(each), each.rank) for each in one.found] == [("rank 0 has aborted", None)]


def test_who_closes_in_good_order_breaks_nothing_until_more_of_it_is_needed() -> None:
    with group(3) as (zero, one, two):
        two.health.close()
        zero.health.begin("receive")
        assert zero.error(lambda: zero.health.fail_on_links(2, 0)) == (
            "receive on rank 0: rank 2 has closed its end", 2, "closed",
        )  # fmt: skip
        assert one.knows.wait(SECONDS)
        assert [each.rank for each in one.found] == [2]  # by rank 0; that rank 2 has closed is no reason
        assert "has given up because of rank 2" in str(one.found[0])


def test_the_end_of_a_process_is_told_from_that_of_a_connection() -> None:
    for has_exited in (True, False):
        with subprocess.Popen(["sleep", "60"]) as process, group(2, {1: process.pid}) as (zero, one):
            if has_exited:
                process.kill()
            one.control[0].shutdown(socket.SHUT_RDWR)
            assert zero.aborted.wait(SECONDS)
            process.kill()
            assert zero.error(lambda: zero.health.begin("x")) == (
                ("x on rank 0: rank 1 has died", 1, "exited")
                if has_exited
                else ("x on rank 0: the connection to rank 1 broke", 1, "closed")
            )


@pytest.mark.parametrize("word", [b"\0" * 8, b"\xff" * 8, b"\x09" + b"\0" * 7, b"\1\0\0"])
def test_anything_but_a_last_word_is_a_broken_connection(word: bytes) -> None:
    with group(2) as (zero, one):
        one.control[0].send(word)
        if len(word) < 8:
            assert not zero.aborted.wait(0.05)  # the rest may come
            one.control[0].shutdown(socket.SHUT_WR)
        assert zero.aborted.wait(SECONDS)
        assert zero.error(lambda: zero.health.begin("x"))[1:] == (1, "closed")


def test_a_call_with_a_broken_link_waits_for_what_is_said_of_it() -> None:
    with group(2) as (zero, one):
        threading.Timer(0.01, one.health.abort).start()
        zero.health.begin("send")
        assert zero.error(lambda: zero.health.fail_on_links(1, 104)) == (
            "send on rank 0: rank 1 has aborted", None, "closed",
        )  # fmt: skip
    with group(2) as (zero, one):
        zero.health.begin("send")
        assert zero.error(lambda: zero.health.fail_on_links(1, 104)) == (
            "send on rank 0: the connection to rank 1 broke (Connection reset by peer)", 1, "closed",
        )  # fmt: skip


def test_closing_from_what_is_called_about_a_broken_group_ends_well() -> None:
    with group(2) as (zero, one):
        closed = threading.Event()

        def close(_error: CollectiveError) -> None:
            zero.health.close()
            closed.set()

        zero.health.on_broken = close
        one.health.abort()
        assert closed.wait(SECONDS)


def test_a_broken_connection_between_hosts_is_named_with_both_addresses() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        here = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0))
        there, _ = listener.accept()
    health = NetworkHealth(0, 2, {1: here}, 5.0, None, lambda: None)
    broken = threading.Event()
    health.on_broken = lambda error: broken.set()
    there.close()
    try:
        assert broken.wait(SECONDS)
        assert health.reason == "the connection to rank 1 (127.0.0.1 to 127.0.0.2) broke"
    finally:
        health.close()
