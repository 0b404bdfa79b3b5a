"""Native collectives over links against sums of torch; members are threads of this process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn

import pytest
import torch

from parallel.communicators.base import CollectiveError
from parallel.links.native_links import NativeLinks
from parallel.rounds.arithmetic import even_sizes, sum_in_rank_order
from parallel.rounds.contract import CallForm
from parallel.rounds.native_network_rounds import NativeNetworkRounds, NetworkLibrary, load
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from tests.parallel.link_pairs import linked

SECONDS = 10.0
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int8)


class Health(SharedMemoryHealth):
    """Health of a member without words of the others: a deadline, and broken links."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, timeout, None)
        for peer in range(size):
            self.know(peer, memoryview(bytearray(8)).cast("q"))

    def fail_on_links(self, peer: int | None, error: int) -> NoReturn:
        self.fail(f"link to rank {peer}: {os.strerror(error)}", peer, "closed")


class Member:
    """One member's rounds and what belongs to them."""

    def __init__(self, library: NetworkLibrary, links: NativeLinks, timeout: float = SECONDS) -> None:
        self.links = links
        self.health = Health(links.rank, links.size, timeout)
        self.rounds = NativeNetworkRounds(library, links, self.health, crowded=True)

    def call(self, name: str, given: torch.Tensor, result: torch.Tensor, *sizes: Sequence[int]) -> None:
        """A call as communicators make it."""
        self.rounds.prepare(CallForm(name, given.shape, given.dtype, *sizes))(given, result)


class Threads:
    """Members of a group, each with a thread."""

    def __init__(self, size: int, streams: int = 1, timeout: float = SECONDS) -> None:
        library = load()
        assert library is not None
        self.members = [Member(library, links, timeout) for links in linked(size, streams)]
        self.pool = ThreadPoolExecutor(size)

    def run(self, *calls: Callable[[Member], object]) -> list[object]:
        """Results, or errors, of all members; one call is made by all."""
        given = calls if len(calls) > 1 else calls * len(self.members)

        def run(member: Member, call: Callable[[Member], object]) -> object:
            try:
                member.health.begin("call")
                return call(member)
            except CollectiveError as error:
                return error

        futures = [
            self.pool.submit(run, member, call) for member, call in zip(self.members, given, strict=True)
        ]
        return [each.result(timeout=2 * SECONDS) for each in futures]

    def close(self) -> None:
        self.pool.shutdown()
        for member in self.members:
            member.links.close()


@pytest.fixture(params=((2, 1), (3, 2), (4, 1)), ids=str)
def threads(request: pytest.FixtureRequest) -> Iterator[Threads]:
    group = Threads(*request.param)
    yield group
    group.close()


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sums depend on their order, where they can."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)
    return made.to(dtype)


def total_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    parts = [numbers(rank, shape, dtype) for rank in range(size)]
    return sum_in_rank_order(parts, out=torch.empty(shape, dtype=dtype))


def assert_same(result: object, expected: torch.Tensor) -> None:
    assert isinstance(result, torch.Tensor), result
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_of_integers(threads: Threads) -> None:
    size = len(threads.members)
    for width in (0, 1, 7, 3000):
        rows = threads.run(
            lambda member, width=width: member.rounds.all_gather_ints([member.rounds.rank - 1] * width)
        )
        assert rows == [[[rank - 1] * width for rank in range(size)]] * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_the_bits_of_rank_order(threads: Threads, dtype: torch.dtype) -> None:
    size = len(threads.members)
    for shape in ((3, 5), (1,), (0, 4), (50_000, 3)):  # the last in several chunks, and in parts

        def reduce(member: Member, shape: tuple[int, ...] = shape) -> torch.Tensor:
            given = numbers(member.rounds.rank, shape, dtype)
            total = torch.empty_like(given)
            member.call("all_reduce", given, total)
            return total

        def scatter(member: Member, shape: tuple[int, ...] = shape) -> torch.Tensor:
            given, sizes = numbers(member.rounds.rank, shape, dtype), even_sizes(shape[0], size)
            total = given.new_empty((sizes[member.rounds.rank], *shape[1:]))
            member.call("reduce_scatter", given, total, sizes)
            return total

        expected = total_of(size, shape, dtype)
        for result in threads.run(reduce):
            assert_same(result, expected)
        parts = expected.split(even_sizes(shape[0], size))
        for result, part in zip(threads.run(scatter), parts, strict=True):
            assert_same(result, part)


def test_sums_that_native_code_does_not_know_go_by_the_same_messages(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sums bfloat16 in torch, as where the CPU lacks instructions."""
    size, dtype = len(threads.members), torch.bfloat16
    library = threads.members[0].rounds._library
    less = NetworkLibrary.__new__(NetworkLibrary)
    less.__dict__ |= library.__dict__ | {
        "kinds": {known: kind for known, kind in library.kinds.items() if known is not dtype}
    }
    threads.members[0].rounds._library = less
    for shape in ((3, 5), (50_000, 3)):

        def reduce(member: Member, shape: tuple[int, ...] = shape) -> torch.Tensor:
            given, sizes = numbers(member.rounds.rank, shape, dtype), even_sizes(shape[0], size)
            total, part = torch.empty_like(given), given.new_empty((sizes[member.rounds.rank], *shape[1:]))
            member.call("all_reduce", given, total)
            member.call("reduce_scatter", given, part, sizes)
            return torch.cat((total, part))

        expected = total_of(size, shape, dtype)
        parts = expected.split(even_sizes(shape[0], size))
        for result, part in zip(threads.run(reduce), parts, strict=True):
            assert_same(result, torch.cat((expected, part)))


@pytest.mark.parametrize("scale", [1, 40_000])
def test_gathered_and_exchanged_rows(threads: Threads, scale: int) -> None:
    size = len(threads.members)
    sizes = [scale * (rank * 2 % 5) for rank in range(size)]  # rank 0 has nothing
    moved = [[scale * ((source + 2 * to) % 4) for to in range(size)] for source in range(size)]

    def gather(member: Member) -> torch.Tensor:
        rank = member.rounds.rank
        whole = torch.full((sum(sizes), 2), -1.0)
        member.call("all_gather", numbers(rank, (sizes[rank], 2), torch.float32), whole, sizes)
        return whole

    def exchange(member: Member) -> torch.Tensor:
        rank = member.rounds.rank
        received = [row[rank] for row in moved]
        incoming = torch.full((sum(received), 3), -1.0)
        outgoing = numbers(rank, (sum(moved[rank]), 3), torch.float32)
        member.call("all_to_all", outgoing, incoming, moved[rank], received)
        return incoming

    whole = torch.cat([numbers(rank, (sizes[rank], 2), torch.float32) for rank in range(size)])
    for result in threads.run(gather):
        assert_same(result, whole)
    given = [numbers(rank, (sum(moved[rank]), 3), torch.float32).split(moved[rank]) for rank in range(size)]
    for rank, result in enumerate(threads.run(exchange)):
        assert_same(result, torch.cat([parts[rank] for parts in given]))


@pytest.mark.parametrize("rows", [0, 7, 300_001])
def test_broadcast_from_each_member(threads: Threads, rows: int) -> None:
    size = len(threads.members)

    def broadcast(member: Member) -> torch.Tensor:
        seen = []
        for source in range(size):
            mine = source == member.rounds.rank
            data = numbers(source, (rows,), torch.float32) if mine else torch.full((rows,), -1.0)
            member.rounds.broadcast(data, source)
            seen.append(data)
        return torch.cat(seen)

    expected = torch.cat([numbers(source, (rows,), torch.float32) for source in range(size)])
    for result in threads.run(broadcast):
        assert_same(result, expected)


def test_send_and_receive_around_a_circle(threads: Threads) -> None:
    size = len(threads.members)

    def pass_on(member: Member) -> torch.Tensor:
        rank, room = member.rounds.rank, torch.empty(100_000)
        given = numbers(rank, (100_000,), torch.float32)
        if rank % 2:
            member.rounds.receive(room, (rank - 1) % size)
            member.rounds.send(given, (rank + 1) % size)
        else:
            member.rounds.send(given, (rank + 1) % size)
            member.rounds.receive(room, (rank - 1) % size)
        return room

    for rank, result in enumerate(threads.run(pass_on)):
        assert_same(result, numbers((rank - 1) % size, (100_000,), torch.float32))


def test_many_calls_of_all_kinds_in_a_row(threads: Threads) -> None:
    """Members are apart by a call at most, and what comes early waits its turn."""
    size = len(threads.members)

    def run(member: Member) -> list[float]:
        rounds, sums = member.rounds, []
        given, total = torch.ones(16), torch.empty(16)
        reduce = rounds.prepare(CallForm("all_reduce", given.shape, given.dtype))
        for number in range(300):
            if number % 50 == rounds.rank:
                time.sleep(0.003)
            reduce(given * number, total)
            rows = rounds.all_gather_ints([number + rounds.rank])
            assert rows == [[number + rank] for rank in range(size)]
            sums.append(float(total[3]))
        return sums

    assert threads.run(run) == [[float(size * number) for number in range(300)]] * size


# ---- failures


def test_other_calls_and_other_bytes_are_told_apart() -> None:
    group = Threads(2)
    ints, data = torch.zeros(3, dtype=torch.int64), torch.zeros(4)
    try:
        first, second = group.run(
            lambda member: member.rounds.broadcast(ints, 1), lambda member: member.rounds.send(data, 0)
        )
        assert second is None
        assert "rank 1 calls send of 0 bytes" in str(first)
        assert isinstance(first, CollectiveError)
        assert (first.rank, first.evidence) == (1, "closed")
    finally:
        group.close()
    group = Threads(2)
    try:
        first, _ = group.run(
            lambda member: member.rounds.receive(data, 1),
            lambda member: member.rounds.send(torch.zeros(2), 0),
        )
        assert "rank 1 sends 8 bytes where 16 are expected" in str(first)
    finally:
        group.close()


def test_a_member_that_goes_breaks_the_others_at_once() -> None:
    group = Threads(3)
    wait = partial(lambda member: member.rounds.all_gather_ints([1]))
    try:
        began = time.monotonic()
        errors = group.run(wait, lambda member: member.links.close(), wait)
        assert time.monotonic() - began < SECONDS / 2
        for error in (errors[0], errors[2]):
            assert isinstance(error, CollectiveError)
            assert error.rank is not None
    finally:
        group.close()


def test_deadline_names_the_member_that_did_not_come() -> None:
    group = Threads(3, timeout=0.05)
    wait = partial(lambda member: member.rounds.all_gather_ints([1]))
    try:
        errors = group.run(wait, wait, lambda _: None)
        for error in errors[:2]:
            assert isinstance(error, CollectiveError)
            assert (error.rank, error.evidence) == (2, "deadline")
        assert group.members[0].links.seconds_waited[2] == 0.0  # nothing came of it
    finally:
        group.close()


def test_deadline_of_a_send_that_nobody_takes() -> None:
    group = Threads(2, timeout=0.05)
    try:
        error, _ = group.run(
            lambda member: member.rounds.send(torch.zeros(16 << 20, dtype=torch.uint8), 1), lambda _: None
        )
        assert isinstance(error, CollectiveError)
        assert (error.rank, error.evidence) == (1, "deadline")
        assert group.members[0].links.flush() == -1  # the tensor may be freed
    finally:
        group.close()


def test_abort_of_the_links_ends_a_call() -> None:
    group = Threads(2)
    member = group.members[0]
    threading.Timer(0.05, member.links.abort).start()
    try:
        error, _ = group.run(lambda member: member.rounds.all_gather_ints([1]), lambda _: None)
        assert os.strerror(errno.ECANCELED) in str(error)
    finally:
        group.close()


def test_waiting_members_sleep_and_count_for_whom() -> None:
    """A member that waits long uses little of a core."""
    group = Threads(2)

    def late(member: Member) -> None:
        for _ in range(6):
            time.sleep(0.1)
            member.rounds.all_gather_ints([1])

    def early(member: Member) -> float:
        for _ in range(3):
            member.rounds.all_gather_ints([1])
        used = time.thread_time()
        for _ in range(3):
            member.rounds.all_gather_ints([1])
        return time.thread_time() - used

    try:
        _, used = group.run(late, early)
        assert isinstance(used, float)
        assert used < 0.05  # of 0.3 s
        assert 0.4 < group.members[1].links.seconds_waited[0] < SECONDS
        assert group.members[0].links.bytes_sent == [0, 6 * (16 + 8)]
    finally:
        group.close()
