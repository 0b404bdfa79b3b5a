"""Exchange over links inside the native step.

Outputs have the bits of one instance, and every wait ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import PackedRows
from engine.kernels.core import library
from engine.kernels.exchange.exchange import ArenaLayout, ExpertShape
from engine.kernels.exchange.hosts import POSTS, REMOTE, TAKES, Hosts
from engine.kernels.exchange.linked import LinkedExchange, LinkedSums, OverlapPolicy
from parallel.communicators.base import CollectiveError
from parallel.communicators.network import NetworkCommunicator
from parallel.links.native_links import NativeLinks
from parallel.rounds.notes import CALLS
from tests.engine.kernels.exchange.linked_group import LinkedMember, linked_group, of_all
from tests.engine.kernels.exchange.test_native_exchange import Member, run
from tests.engine.kernels.exchange.test_native_shards import FAMILIES, LAYERS, Rank
from tests.engine.kernels.test_kernels import SCENARIO, packed_rows
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

TOKENS = [sum(count for _, _, count in rows) for rows in SCENARIO]
PLANS: list[list[int | None]] = [
    [0, None, 1, 2, None],
    [None, None, 0, 1, 2],
    [0, 1, 2, None, None],
    [None, 0, 1, 2, None],
]
"""Steps of the scenario by member, at other times, and now and then none."""
BUFFER_BYTES = 4096
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", num_experts=8)


@cache
def expected(directory: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of the scenario in an instance with all experts."""
    alone = Member(directory, 0, 1, dtype).program
    with torch.inference_mode():
        return [run(alone, rows) for rows in SCENARIO]


def close(group: Sequence[LinkedMember]) -> None:
    for each in group:
        each.close()


def exchange_of(member: Member) -> LinkedExchange:
    exchange = member.program.exchange.joined
    assert isinstance(exchange, LinkedExchange)
    return exchange


def play(
    directory: Path,
    group: Sequence[LinkedMember],
    dtype: torch.dtype,
    look: OverlapPolicy = OverlapPolicy.LEARNED,
) -> list[Member]:
    """Run the plans; every member's logits have the bits of one instance's."""
    size = len(group)
    members = [Member(directory, rank, size, dtype) for rank in range(size)]
    known = expected(directory, dtype)
    for each in members:
        assert each.model.experts is not None
        each.model.experts.tokens_per_expert[:] = 0  # to load a model counts some

    def body(rank: int) -> None:
        members[rank].join(group[rank])
        exchange_of(members[rank]).look = look
        for now in zip(*PLANS[:size], strict=True):
            sizes = [0 if step is None else TOKENS[step] for step in now]
            mine = now[rank]
            found = members[rank].step([] if mine is None else SCENARIO[mine], sizes)
            if mine is not None:
                assert found is not None
                assert torch.equal(found, known[mine]), "bit for bit"

    of_all(size, body)
    return members


@pytest.mark.diagonal("dtype", "look", columns=3, each=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("look", list(OverlapPolicy))
@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_are_those_of_one_instance(
    directory: Path, size: int, look: OverlapPolicy, dtype: torch.dtype
) -> None:
    """Whatever has come before a member computes its own rows."""
    group = linked_group(size)
    members = play(directory, group, dtype, look)
    close(group)
    computed = sum(int(each.model.experts.tokens_per_expert.sum()) for each in members if each.model.experts)
    passes = sum(TOKENS[step] for plan in PLANS[:size] for step in plan if step is not None)
    assert computed == 2 * passes * len(members[0].model.expert_layers), "every pair once"


@pytest.mark.diagonal("hosts", "look", columns=2, each=1)
@pytest.mark.parametrize("look", [OverlapPolicy.ALWAYS_WAIT, OverlapPolicy.NEVER_WAIT])
@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 1)], ids=str)
def test_members_of_a_host_share_what_comes_to_it(
    directory: Path, hosts: tuple[int, ...], look: OverlapPolicy
) -> None:
    group = linked_group(len(hosts), hosts=hosts)
    play(directory, group, torch.float32, look)
    close(group)


@pytest.mark.parametrize("streams", [1, 2])
def test_messages_may_be_larger_than_the_systems_buffers(directory: Path, streams: int) -> None:
    """Rows and results wait in their arenas until the system takes them."""
    group = linked_group(2, send_buffer_bytes=BUFFER_BYTES, streams=streams)
    play(directory, group, torch.float32, OverlapPolicy.NEVER_WAIT)
    sent = [each.link_counts()[1 - each.rank].bytes_sent for each in group]
    close(group)
    assert min(sent) > 10 * BUFFER_BYTES


def test_members_want_different_numbers_of_logits(directory: Path) -> None:
    """The last layer has as many rows as each member wants."""
    group, known = linked_group(2), expected(directory, torch.float32)
    members = [Member(directory, rank, 2, torch.float32) for rank in range(2)]
    plans = [(slice(-1, None), slice(None), slice(3)), (slice(0), slice(7), slice(None))]

    def body(rank: int) -> None:
        members[rank].join(group[rank])
        for rows, logits, size, wanted in zip(SCENARIO, known, TOKENS, plans[rank], strict=True):
            found = members[rank].step(rows, [size] * 2, wanted)
            assert found is not None
            assert torch.equal(found, logits[wanted])

    of_all(2, body)
    close(group)


def test_rooms_grow_with_what_others_bring(directory: Path) -> None:
    group, many = linked_group(2), 120
    members = [Member(directory, rank, 2, torch.bfloat16) for rank in range(2)]
    blocks = np.arange(8, dtype=np.int32)[None]
    long = PackedRows(np.zeros(1, np.int64), np.array([many]), blocks, np.arange(many), 0)

    def body(rank: int) -> None:
        members[rank].join(group[rank])
        experts = members[rank].model.experts
        assert experts is not None
        for sizes in ([1, 1], [1, many], [1, 1]):
            experts.begin(sizes)
            with torch.inference_mode():
                if sizes[rank] == many:
                    members[rank].program.forward(long, np.arange(many), np.array([many - 1]))
                else:
                    assert torch.isfinite(run(members[rank].program, [(0, 0, 1)])).all()

    of_all(2, body)
    close(group)


@pytest.mark.parametrize("native", [True, False])
def test_where_a_member_exchanges_otherwise_all_do(directory: Path, native: bool) -> None:
    """Without a native step, or native links, at one member all go through Python.

    The bits are the same.
    """
    group, known = linked_group(2, native=native), expected(directory, torch.float32)
    members = [Member(directory, rank, 2, torch.float32) for rank in range(2)]

    def body(rank: int) -> None:
        members[rank].join(group[rank], natively=rank == 0)
        found = members[rank].step(SCENARIO[0], [TOKENS[0]] * 2)
        assert found is not None
        assert torch.equal(found, known[0])
        assert members[rank].model.experts is not None
        assert not members[rank].model.experts.have_one_signature

    of_all(2, body)
    close(group)


# ---- what breaks


def broken(
    directory: Path,
    other: Callable[[Member, LinkedMember], None],
    rows: int = 0,
    timeout: float = 60.0,
) -> CollectiveError:
    """The error of a step that rank 1, with so many rows, ends so."""
    group = linked_group(2, timeout=timeout)
    members = [Member(directory, rank, 2, torch.float32) for rank in range(2)]

    def body(rank: int) -> CollectiveError | None:
        members[rank].join(group[rank])
        if rank == 1:
            other(members[1], group[1])
            return None
        with pytest.raises(CollectiveError) as caught:
            members[0].step(SCENARIO[0], [TOKENS[0], rows])
        with pytest.raises(CollectiveError):
            members[0].step(SCENARIO[0], [TOKENS[0], rows])
        return caught.value

    began = time.monotonic()
    error, _ = of_all(2, body)
    assert time.monotonic() - began < 20
    close(group)
    assert isinstance(error, CollectiveError)
    return error


def begin(member: Member, rows: int = 0) -> None:
    assert member.model.experts is not None
    member.model.experts.begin([TOKENS[0], rows])


def post(member: Member, group: LinkedMember, words: np.ndarray[Any, Any], rows: int = 0) -> None:
    """Send this to rank 0 in place of an offer."""
    begin(member, rows)
    assert isinstance(group, NetworkCommunicator)
    assert isinstance(group.links, NativeLinks)
    assert group.links.post(0, [(words.ctypes.data, words.nbytes)]) == 0


def test_a_member_that_leaves_ends_the_wait_at_once(directory: Path) -> None:
    def leave(member: Member, group: LinkedMember) -> None:
        begin(member)
        group.close()

    error = broken(directory, leave)
    assert (error.rank, error.evidence) == (1, "closed")


def test_an_abort_ends_the_wait_at_once(directory: Path) -> None:
    def abort(member: Member, group: LinkedMember) -> None:
        begin(member)
        time.sleep(0.1)  # rank 0 waits by now, or soon: either way it comes out
        group.abort()

    assert "rank 1 has aborted" in str(broken(directory, abort))


def test_a_member_that_does_not_come_is_given_up_at_the_deadline(directory: Path) -> None:
    error = broken(directory, lambda member, _: begin(member), timeout=0.5)
    assert (error.rank, error.evidence) == (1, "deadline")
    assert "an expert layer on rank 0: rank 1 did not come within" in str(error)


def test_another_call_is_told_from_an_offer(directory: Path) -> None:
    header = np.array([CALLS.index("all_gather") + 24 * len(CALLS), 24], dtype=np.int64)
    error = broken(directory, lambda member, group: post(member, group, header))
    assert "an expert layer on rank 0: rank 1 calls all_gather of 24 bytes" in str(error)


@pytest.mark.parametrize(
    ("rows", "allowed"), [(1 << 20, 0), (0, 0), (1, 1)], ids=["too many rows", "too many bytes", "no experts"]
)
def test_garbage_from_a_member_ends_the_step(directory: Path, rows: int, allowed: int) -> None:
    """Rows beyond the step's, and choices of experts that there are not.

    None of it is used as an index.
    """
    message = np.array([1 << 56 | 1 << 24 | rows, 16, 1 << 40, -1], dtype=np.int64)
    error = broken(directory, lambda member, group: post(member, group, message, allowed), allowed)
    assert "rank 1 sends an expert layer's rows of 16 bytes (number 1), which do not fit" in str(error)
    assert error.rank == 1


# ---- sums over ranks


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = str(request.param)
    return make_tiny_model(tmp_path_factory.mktemp(family), family, layers=LAYERS, **FAMILIES[family])


def ranks(
    cut: Path, group: Sequence[LinkedMember], dtype: torch.dtype
) -> list[tuple[list[torch.Tensor], list[list[int]]]]:
    """Logits of the scenario by rank, and the tokens chosen.

    Four steps follow the scenario's.
    """

    def body(rank: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        program = Rank(cut, rank, group[rank], dtype)
        logits, chosen = program.run(times=2), []
        one = program.program
        assert isinstance(one.sums.common, LinkedSums if group[rank].links_address else type(None))
        with torch.inference_mode():
            for rows in SCENARIO:
                packed, ids = packed_rows(rows)
                if one.can_choose(len(ids)):
                    chosen.append(one.choose(packed, ids, packed.counts.cumsum() - 1))
        for _ in range(4 if chosen else 0):
            found = one.continue_rows({})
            assert found is not None
            chosen.append(found)
        return logits, chosen

    found = of_all(len(group), body)
    close(group)
    return found


@pytest.mark.diagonal("dtype", "size", columns=2, each=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_links_have_the_bits_of_the_communicators(cut: Path, size: int, dtype: torch.dtype) -> None:
    """Ranks choose the same tokens, in steps of one call."""
    own = ranks(cut, linked_group(size, native=False), dtype)
    found = ranks(cut, linked_group(size), dtype)
    for (logits, chosen), (known, _) in zip(found, own, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(logits, known, strict=True))
        assert chosen == found[0][1]
        assert len(chosen) == len(SCENARIO) + 4
    for step in range(len(SCENARIO)):
        whole = torch.cat([logits[step] for logits, _ in found], dim=1)
        last = np.cumsum([count for _, _, count in SCENARIO[step]]) - 1
        assert found[0][1][step] == whole[last].argmax(dim=1).tolist()


def test_ranks_of_a_host_share_what_comes_to_it(cut: Path) -> None:
    own = ranks(cut, linked_group(4, native=False), torch.float32)
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1)):
        group = linked_group(4, hosts=hosts)
        for (logits, _), (known, _) in zip(ranks(cut, group, torch.float32), own, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(logits, known, strict=True))


def test_a_rank_that_leaves_ends_a_sum(cut: Path) -> None:
    group = linked_group(2)

    def body(rank: int) -> None:
        one = Rank(cut, rank, group[rank], torch.float32)
        one.run()
        if rank == 1:
            group[1].close()
            return
        with pytest.raises(CollectiveError) as caught:
            one.run()
        assert caught.value.rank == 1

    of_all(2, body)
    close(group)


# ---- who receives what


@pytest.mark.parametrize(
    "hosts", [(0, 1), (0, 0, 1), (0, 1, 0, 1), (3, 3, 3, 5), (0, 1, 2, 0, 1, 0, 0)], ids=str
)
def test_each_host_receives_each_row_once(hosts: tuple[int, ...]) -> None:
    """All members have the same view of who posts to whom."""
    views = [Hosts(rank, hosts) for rank in range(len(hosts))]
    roles = [view.roles() for view in views]
    for source, host in enumerate(hosts):
        for other in set(hosts) - {host}:
            receivers = [r for r in views[0].members(other) if roles[r][source] & TAKES]
            assert len(receivers) == 1
            assert [r for r in views[0].members(other) if roles[source][r] & POSTS] == receivers
    for one, row in enumerate(roles):
        assert [bool(role & REMOTE) for role in row] == [number != hosts[one] for number in hosts]
        places = [views[one].mirror_of(rank) for rank, role in enumerate(row) if role & REMOTE]
        assert len(set(places)) == len(places)
        assert all(number < views[one].num_mirrors for _, number in places)
    assert len({view.num_mirrors for view in views}) == 1


@pytest.mark.parametrize("num_mirrors", [0, 1, 7])
@pytest.mark.parametrize("num_bytes", [1 << 16, 1 << 24, 1 << 30])
def test_an_arena_has_room_for_its_mirrors(num_bytes: int, num_mirrors: int) -> None:
    shape = ExpertShape(2048, 8, 128, torch.bfloat16)
    rows = ArenaLayout.room(shape, num_bytes, num_mirrors)
    layout = ArenaLayout.of(shape, rows)
    assert rows == 0 or layout.num_bytes + num_mirrors * layout.places_at <= num_bytes
    assert rows > 0 or num_bytes < 1 << 24
