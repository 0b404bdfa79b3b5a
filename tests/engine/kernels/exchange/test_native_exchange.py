"""Experts spread over members that share memory, exchanged inside the native step.

Outputs have the bits of one instance with all experts, whatever the number of members, and every wait ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.base import PackedRows
from engine.config import ModelConfig
from engine.config.quantization import OnlineName
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.decoder import recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.expert_weights import ExpertShare
from engine.model.weights import LoadedModel, load_model
from parallel.communicators.base import CollectiveError
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting import MeetingHost
from parallel.placement import assign_experts
from tests.engine.kernels.test_kernels import SCENARIO, everything, packed_rows
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

PATIENCE = 60.0
CACHE = {"num_blocks": 64, "block_size": 16}

Rows = list[tuple[int, int, int]]
EVERY = slice(None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


class Member:
    """One instance: its share of the experts, its program, its end of the group."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        size: int,
        dtype: torch.dtype,
        quantization: OnlineName | None = None,
    ) -> None:
        info = read_model_info(directory)
        self.placement = assign_experts(info.num_experts, size, "round_robin")
        self.model: LoadedModel = load_model(
            info,
            ModelConfig(quantization=quantization),
            dtype=dtype,
            device=torch.device("cpu"),
            share=ExpertShare(self.placement, rank) if size > 1 else None,
        )
        assert KERNELS is not None
        decoder = recognise(self.model.module, self.model.layers, dtype)
        self.program = Program(KERNELS, decoder, self.model.experts)
        self.program.use(NativeCache(self.model.layers, dtype=dtype, **CACHE))
        if size > 1:
            self.program.spread()

    def join(self, group: SharedMemoryCommunicator, *, natively: bool = True) -> None:
        assert self.model.experts is not None
        self.group = group
        self.model.experts.join(group, self.placement)
        if natively:
            self.program.join(group, self.placement)
        group.all_gather_ints([0])  # as the headers of the first step do

    def step(self, rows: Rows, sizes: list[int], wanted: slice = EVERY) -> torch.Tensor | None:
        """Logits of these tokens, None without any."""
        assert self.model.experts is not None
        self.model.experts.begin(sizes)
        with torch.inference_mode():
            if not rows:
                assert self.program.serve()
                return None
            return run(self.program, rows, wanted)


def run(program: Program, rows: Rows, wanted: slice = EVERY) -> torch.Tensor:
    packed, ids = packed_rows(rows)
    return program.forward(packed, ids, everything(ids)[wanted]).clone()


def together(
    size: int, body: Callable[[int, SharedMemoryCommunicator], object], timeout: float = PATIENCE
) -> None:
    """Run a function for each member of a new group, in threads."""
    meeting = MeetingHost("127.0.0.1")

    def member(rank: int) -> None:
        group = SharedMemoryCommunicator(
            FormingGroup(meeting, rank, size, timeout=timeout, forming_timeout=PATIENCE)
        )
        try:
            body(rank, group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(member, rank) for rank in range(size)]:
            future.result(PATIENCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_do_not_depend_on_the_number_of_members(
    directory: Path, size: int, dtype: torch.dtype
) -> None:
    """Each member has the scenario's rows at other times, and now and then none.

    Two groups, one after the other.
    """
    alone = Member(directory, 0, 1, dtype).program
    with torch.inference_mode():
        expected = [run(alone, rows) for rows in SCENARIO]
    members = [Member(directory, rank, size, dtype) for rank in range(size)]
    plans: list[list[int | None]] = [[0, None, 1, 2, None], [None, None, 0, 1, 2], [0, 1, 2, None, None]]
    tokens = [sum(count for _, _, count in rows) for rows in SCENARIO]

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group)
        for now in zip(*plans[:size], strict=True):
            sizes = [0 if step is None else tokens[step] for step in now]
            mine = now[rank]
            found = members[rank].step([] if mine is None else SCENARIO[mine], sizes)
            if mine is not None:
                assert found is not None
                assert torch.equal(found, expected[mine]), "bit for bit"

    def counted() -> int:
        return sum(int(each.model.experts.tokens_per_expert.sum()) for each in members if each.model.experts)

    before = counted()
    for _ in range(2):
        together(size, body)
    passes = sum(tokens[step] for plan in plans[:size] for step in plan if step is not None)
    pairs = 2 * passes * len(members[0].model.expert_layers)
    assert counted() - before == 2 * pairs, "every pair once: 2 groups, 2 experts per token"


def test_members_want_different_numbers_of_logits(directory: Path) -> None:
    """The last layer has other rows than those before it, of each member.

    Who has rows may want none.
    """
    alone = Member(directory, 0, 1, torch.float32).program
    with torch.inference_mode():
        expected = [run(alone, rows) for rows in SCENARIO]
    members = [Member(directory, rank, 3, torch.float32) for rank in range(3)]
    tokens = [sum(count for _, _, count in rows) for rows in SCENARIO]
    plans = [(slice(-1, None), EVERY, slice(3)), (EVERY, slice(0), slice(1)), (slice(0), slice(7), EVERY)]

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group)
        for _ in range(3):
            for rows, logits, size, wanted in zip(SCENARIO, expected, tokens, plans[rank], strict=True):
                found = members[rank].step(rows, [size] * 3, wanted)
                assert found is not None
                assert torch.equal(found, logits[wanted]), "bit for bit"

    together(3, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_member_that_exchanges_otherwise_takes_all_with_it(directory: Path, dtype: torch.dtype) -> None:
    """Whether all can is known before the first step.

    Then all go through Python, with the same bits.
    """
    members = [Member(directory, rank, 2, dtype) for rank in range(2)]
    alone = Member(directory, 0, 1, dtype).program
    with torch.inference_mode():
        expected = run(alone, SCENARIO[0])
    tokens = sum(count for _, _, count in SCENARIO[0])

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group, natively=rank == 0)
        found = members[rank].step(SCENARIO[0], [tokens, tokens])
        assert found is not None
        assert torch.equal(found, expected), "bit for bit"

    together(2, body)


def test_steps_go_on_where_others_exchange_otherwise(directory: Path) -> None:
    """Steps in place on the previous step's arrays, with experts that go through Python.

    They run outside of torch's inference mode, as the runner calls them.
    """
    members = [Member(directory, rank, 2, torch.float32) for rank in range(2)]
    alone = Member(directory, 0, 1, torch.float32)
    tokens = [sum(count for _, _, count in rows) for rows in SCENARIO]

    def answers(program: Program, begin: Callable[[int], None]) -> list[list[int]]:
        with torch.inference_mode():
            for rows, count in zip(SCENARIO[:2], tokens, strict=False):
                begin(count)
                run(program, rows)
            packed, ids = packed_rows(SCENARIO[2])
            begin(tokens[2])
            found = [program.choose(packed, ids, everything(ids))]
        for _ in range(6):
            begin(tokens[2])
            chosen = program.continue_rows({})
            assert chosen is not None
            found.append(chosen)
        return found

    expected = answers(alone.program, lambda _: None)

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        member = members[rank]
        member.join(group, natively=False)
        assert member.model.experts is not None
        begin = member.model.experts.begin
        assert answers(member.program, lambda count: begin([count, count])) == expected

    together(2, body)


def test_a_step_that_nobody_joins_ends_at_the_deadline(directory: Path) -> None:
    members = [Member(directory, rank, 2, torch.float32) for rank in range(2)]
    done = threading.Event()

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group)
        if rank == 1:
            assert done.wait(PATIENCE)
            return
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 1 did not come within") as caught:
            members[0].step(SCENARIO[0], [60, 0])
        done.set()
        assert (caught.value.rank, caught.value.evidence) == (1, "deadline")
        assert 0.4 < time.monotonic() - began < 20
        with pytest.raises(CollectiveError):
            members[0].step(SCENARIO[0], [60, 0])

    together(2, body, timeout=0.5)


def test_an_abort_ends_the_wait_at_once(directory: Path) -> None:
    """An abort by this member, from another thread, or by the other member.

    The step runs again in the next group.
    """
    members = [Member(directory, rank, 2, torch.float32) for rank in range(2)]
    aborted = threading.Event()

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group)
        if rank == 0:
            threading.Timer(0.2, group.abort).start()
            with pytest.raises(CollectiveError, match="aborted") as caught:
                members[0].step(SCENARIO[0], [60, 0])
            assert caught.value.evidence == "aborted"
            aborted.set()
        else:
            assert aborted.wait(PATIENCE)
            with pytest.raises(CollectiveError, match="rank 0 has aborted"):
                members[1].step([], [60, 0])

    began = time.monotonic()
    together(2, body)
    assert time.monotonic() - began < PATIENCE / 2

    def again(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group)
        tokens = sum(count for _, _, count in SCENARIO[0])
        members[rank].step(SCENARIO[0] if rank == 0 else [], [tokens, 0])

    together(2, again)


def test_rooms_grow_with_what_others_bring(directory: Path) -> None:
    members = [Member(directory, rank, 2, torch.bfloat16) for rank in range(2)]
    many = 120
    blocks = np.arange(8, dtype=np.int32)[None]
    long = PackedRows(np.zeros(1, np.int64), np.array([many]), blocks, np.arange(many), 0)

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        members[rank].join(group)
        experts = members[rank].model.experts
        assert experts is not None
        for sizes in ([1, 1], [1, many], [1, 1]):
            experts.begin(sizes)
            with torch.inference_mode():
                if sizes[rank] == many:
                    members[rank].program.forward(long, np.arange(many), np.array([many - 1]))
                else:
                    found = run(members[rank].program, [(0, 0, 1)])
                    assert torch.isfinite(found).all()

    together(2, body)
