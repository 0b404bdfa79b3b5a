"""Shards of a model on the native kernels, against transformers and each other.

Tokens equal those of transformers; shards agree bit for bit. The families are those that the kernels know;
test_sharding.py has all, on torch's operators.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import ModelConfig
from engine.executor.uni import UniExecutor
from engine.kernels import make
from engine.kernels.attention.attention import Attention
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.choosing import logits as native
from engine.kernels.core import library
from engine.kernels.core.operations import AS_FLOAT, OperationKind, OperationList, StepArguments
from engine.kernels.decoder import DecoderModel, recognise
from engine.kernels.exchange.sums import OwnSums, Sums
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.sharding.shard import Shard
from engine.model.weights import LoadedModel, load_model
from engine.sampling import SamplingParams
from parallel.communicators.base import CollectiveError, Communicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting import MeetingHost
from parallel.rounds.slots import USUAL_SIZES, SegmentSizes
from parallel.tensor_parallel import TensorRank
from tests.engine.kernels.test_kernels import SCENARIO, everything, packed_rows
from tests.engine.model.sharding.test_sharding import (
    LAYERS,
    LAYOUTS,
    NUM_IN_TABLE,
    greedy,
    mixed,
    run,
    settings,
    shards,
)
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import make_tiny_model
from tests.parallel.thread_group import thread_group

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

BLOCK_SIZE = 16
PATIENCE = 60.0
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {"head_dim": 16},  # norms of heads
    "mistral": {},  # a sliding window
    "qwen3_moe": {"moe_intermediate_size": 64},
}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = str(request.param)
    place = tmp_path_factory.mktemp(family)
    return make_tiny_model(place, family, layers=LAYERS, **FAMILIES[family])


@pytest.fixture(scope="module")
def reference(directory: Path) -> list[list[int]]:
    """Outputs of one worker, which test_exactness.py compares with transformers."""
    alone = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    return run(alone, directory, greedy()[:NUM_IN_TABLE], num_blocks=200, budget=512, block_size=BLOCK_SIZE)[
        0
    ]


def programs(executor: ThreadedShards) -> list[Program | None]:
    return [worker.executor._program for worker in executor.workers]


def tokens_of(executor: Any, directory: Path, **how: Any) -> list[list[int]]:
    return run(executor, directory, greedy()[:NUM_IN_TABLE], block_size=BLOCK_SIZE, **how)[0]


@pytest.mark.diagonal("directory", "layout", columns=5, each=1)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_tokens_are_those_of_one_worker(layout: str, directory: Path, reference: list[list[int]]) -> None:
    """With room, then with so little that prompts are cut, requests preempted and prefixes found."""
    executor = shards(directory, LAYOUTS[layout], BLOCK_SIZE)
    try:
        assert tokens_of(executor, directory, num_blocks=200, budget=512) == reference
        assert all(program is not None for program in programs(executor))
        outputs, counters = run(
            executor, directory, greedy()[:NUM_IN_TABLE], num_blocks=9, budget=24, block_size=BLOCK_SIZE
        )
        assert outputs == reference
        assert counters.preemptions > 0, "the cache was not small enough to prove anything"
    finally:
        executor.close()


@pytest.mark.parametrize("layout", ["tp2", "tp4", "tp2_pp2", "pp3_uneven"])
def test_sampling_chooses_what_one_worker_would(layout: str, tmp_path: Path) -> None:
    """385 tokens do not divide: the ranks have parts of the vocabulary of different size."""
    directory = make_tiny_model(tmp_path, "llama", layers=LAYERS, vocab_size=385)
    alone = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    how = {"num_blocks": 200, "budget": 512, "block_size": BLOCK_SIZE}
    expected, _ = run(alone, directory, mixed(), **how)
    executor = shards(directory, LAYOUTS[layout], BLOCK_SIZE)
    try:
        assert run(executor, directory, mixed(), **how)[0] == expected
        drafted, counters = run(executor, directory, mixed(), drafts=expected, **how)
        assert drafted == expected
        assert counters.drafted_tokens > sum(counters.taken_by_place) > 0
        assert all(program is not None for program in programs(executor))
    finally:
        executor.close()


@pytest.mark.diagonal("directory", "layout", columns=4, each=1)
@pytest.mark.parametrize("layout", ["tp2", "tp4", "pp2", "tp2_pp2"])
def test_workers_that_share_memory_choose_and_go_on(
    layout: str, directory: Path, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that have all layers, in most steps.

    Nobody tells them the tokens that they chose.
    """
    continued: list[bool] = []
    continue_rows = Program.continue_rows

    def noted(self: Program, *given: Any) -> list[int] | None:
        chosen = continue_rows(self, *given)
        continued.append(chosen is not None)
        return chosen

    monkeypatch.setattr(Program, "continue_rows", noted)
    executor = shards(directory, LAYOUTS[layout], BLOCK_SIZE, group=shared_group)
    try:
        assert tokens_of(executor, directory, num_blocks=200, budget=512) == reference
        assert tokens_of(executor, directory, num_blocks=9, budget=24) == reference
    finally:
        executor.close()
    assert (sum(continued) > 5 * LAYOUTS[layout].tp) == (LAYOUTS[layout].pp == 1)


@pytest.mark.parametrize("layout", ["tp2", "pp3_uneven", "tp2_pp2"])
@pytest.mark.parametrize("other", ["no room", "another formula"])
def test_all_workers_have_the_kernels_or_none(
    layout: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one has no room, or computes something else, the others compute with torch, too."""
    directory = make_tiny_model(tmp_path, "llama", layers=LAYERS)
    decoder_of, odd = make._decoder_of, (LAYOUTS[layout].pp // 2, 0)

    def changed(model: LoadedModel, block_size: int) -> DecoderModel:
        decoder = decoder_of(model, block_size)
        if (model.stage.shard.stage, model.stage.shard.rank) != odd:
            return decoder
        if other == "no room":
            raise make._Off(", no room")
        first, *rest = decoder.layers
        assert isinstance(first.mixer, Attention)
        attention = replace(first.mixer, scale=1.5 * first.mixer.scale)
        return replace(decoder, layers=(replace(first, mixer=attention), *rest))

    executor = shards(directory, LAYOUTS[layout], BLOCK_SIZE, group=shared_group)
    try:
        with monkeypatch.context() as patch, caplog.at_level("INFO"):
            patch.setattr(make, "_decoder_of", changed)
            outputs = tokens_of(executor, directory, num_blocks=200, budget=512)
    finally:
        executor.close()
    assert not any(programs(executor))
    if other == "no room":
        assert "native kernels: off, no room" in caplog.text
        assert "native kernels: off, they are off at another worker" in caplog.text
    else:
        assert "native kernels: off for this model: results differ by" in caplog.text
    alone = UniExecutor(settings(directory), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    assert outputs == run(alone, directory, greedy()[:NUM_IN_TABLE], num_blocks=600, budget=512)[0]


@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_a_norm_over_the_heads_of_all_ranks_adds_up_what_each_has(layout: str, tmp_path: Path) -> None:
    """OLMoE's norm: with four ranks one head for each gives it a head norm's shape."""
    directory = make_tiny_model(tmp_path, "olmoe", layers=LAYERS)
    alone = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    expected = tokens_of(alone, directory, num_blocks=200, budget=512)
    for group in (None, shared_group):
        how = {} if group is None else {"group": group}
        executor = shards(directory, LAYOUTS[layout], BLOCK_SIZE, **how)
        try:
            assert tokens_of(executor, directory, num_blocks=200, budget=512) == expected
            assert all(program is not None for program in programs(executor))
        finally:
            executor.close()


def test_experts_are_counted_as_often_as_they_are_held(tmp_path: Path) -> None:
    """Experts are held by the model and again in the kernels' layout; both count."""
    directory = make_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    executor = shards(directory, LAYOUTS["tp2"], BLOCK_SIZE, place=(0, 1))
    try:
        before = [worker.executor.expert_bytes for worker in executor.workers]
        executor.allocate(20)
        assert all(programs(executor))
        assert [worker.executor.expert_bytes for worker in executor.workers] == [2 * each for each in before]
    finally:
        executor.close()


# ---- sums over ranks that share memory


@cache
def loaded(directory: Path, size: int, dtype: torch.dtype) -> list[LoadedModel]:
    """The shards of a model. Their programs compute without their modules, in any group."""

    def load(rank: int, group: Communicator) -> LoadedModel:
        shard = Shard(rank=rank, size=size, ranks=group)
        info = read_model_info(directory)
        return load_model(info, ModelConfig(), dtype=dtype, device=torch.device("cpu"), shard=shard)

    return of_all(size, thread_group(size).__getitem__, load)


LOADING = threading.Lock()
"""One rank loads the shards of all."""


class Rank:
    """One tensor-parallel rank, without an executor."""

    def __init__(self, directory: Path, rank: int, group: Communicator, dtype: torch.dtype) -> None:
        with LOADING:
            model = loaded(directory, group.size, dtype)[rank]
        assert KERNELS is not None
        decoder = recognise(model.module, model.layers, dtype)
        self.program = Program(KERNELS, decoder, ranks=TensorRank(rank, group.size, group))
        self.program.use(NativeCache(model.layers, num_blocks=64, block_size=BLOCK_SIZE, dtype=dtype))

    def run(self, times: int = 1) -> list[torch.Tensor]:
        found = []
        with torch.inference_mode():
            for rows in SCENARIO * times:
                packed, ids = packed_rows(rows)
                found.append(self.program.forward(packed, ids, everything(ids)).clone())
        return found


def of_all(
    size: int, groups: Callable[[int], Communicator], body: Callable[[int, Communicator], Any]
) -> list[Any]:
    """Results of all ranks, in threads of their own."""

    def member(rank: int) -> Any:
        group = groups(rank)
        try:
            return body(rank, group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(member, rank) for rank in range(size)]
        return [future.result(PATIENCE) for future in futures]


def shared(
    size: int, timeout: float = PATIENCE, sizes: SegmentSizes = USUAL_SIZES
) -> Callable[[int], Communicator]:
    meeting = MeetingHost("127.0.0.1")

    def member(rank: int) -> Communicator:
        forming = FormingGroup(meeting, rank, size, timeout=timeout, forming_timeout=PATIENCE)
        return SharedMemoryCommunicator(forming, sizes=sizes)

    return member


def shared_group(size: int) -> list[Communicator]:
    """Communicators of all members."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(shared(size), range(size)))


@pytest.mark.diagonal("directory", "size", columns=2, each=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_in_shared_memory_have_the_bits_of_an_all_reduce(
    directory: Path, size: int, dtype: torch.dtype
) -> None:
    """Step after step, so that memory is reused, with odd numbers of sums."""
    members = thread_group(size)
    expected = of_all(
        size, members.__getitem__, lambda rank, group: Rank(directory, rank, group, dtype).run()
    )

    def body(rank: int, group: Communicator) -> list[torch.Tensor]:
        one = Rank(directory, rank, group, dtype)
        assert one.program.sums.common is not None
        assert one.program._decoder.num_sums == 2 * LAYERS + 1
        return one.run(times=3)

    for found, wanted in zip(of_all(size, shared(size), body), expected, strict=True):
        for logits, known in zip(found, wanted * 3, strict=True):
            assert torch.equal(logits, known)


def sums_in(arenas: list[np.ndarray[Any, Any]]) -> Sums:
    return Sums(0, [arena.ctypes.data for arena in arenas], len(arenas[0]), width=16)


def test_areas_are_written_again_when_all_have_read_them() -> None:
    """Another sum lies between two sums with the same area, also from step to step."""
    sums = sums_in([np.zeros(1 << 16, dtype=np.uint8)])
    for number in range(2, 9):
        step = [sums.area(each, number).begin for each in range(number)]
        assert all(now != then for now, then in itertools.pairwise(step * 2))
        assert sums.area_to_choose().begin not in step


NAN = float("nan")


@pytest.mark.parametrize(
    ("of_ranks", "token"),
    [
        ([[1.0, 3.0], [2.0, 0.0]], 1),
        ([[1.0, 2.0], [0.0, 4.0]], 3),
        ([[0.0, 5.0], [5.0, 5.0]], 1),
        ([[-np.inf, -np.inf], [-np.inf, -np.inf]], 0),
        ([[9.0, 1.0], [NAN, 8.0]], 2),
        ([[1.0, NAN], [NAN, 8.0]], 1),
    ],
)
def test_the_best_token_of_all_ranks_is_the_one_that_argmax_finds(
    of_ranks: list[list[float]], token: int
) -> None:
    """The first one of equals, and of what is no number."""
    assert KERNELS is not None
    assert int(np.concatenate(of_ranks).argmax()) == token
    arenas = [np.zeros(1 << 14, dtype=np.uint8) for _ in of_ranks]
    sums, best = sums_in(arenas), np.zeros(3, dtype=np.int64)
    operations = OperationList(3)
    area = sums.area_to_choose()
    for rank, logits in enumerate(of_ranks):
        rows = torch.tensor([logits] * 3)
        out = arenas[rank].ctypes.data + area.begin
        operations.add(OperationKind.CHOOSE, into=rows, out=out, n=2, a=2 * rank, flags=AS_FLOAT)
    operations.add(OperationKind.BEST_OF_ALL, out=best, extra=sums.record, a=area.begin)
    assert operations.run(KERNELS, StepArguments(selected=3, choose=1), torch.float32)
    assert best.tolist() == [token] * 3


@pytest.mark.diagonal("directory", "size", columns=2, each=1)
@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 1.0, 2.0]], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_choose_the_same_tokens_and_go_on(
    directory: Path, size: int, temperatures: list[float]
) -> None:
    """The choice equals that from all logits, in packed and in consecutive decode steps."""
    members = thread_group(size)
    kinds = [SamplingParams(temperature=each) for each in temperatures]

    def draws_for(rows: int) -> native.Draws:
        return native.draws([native.draw_of(kinds[row % len(kinds)], row) for row in range(rows)])

    def body(rank: int, group: Communicator) -> tuple[list[torch.Tensor], list[list[int]]]:
        one = Rank(directory, rank, members[rank], torch.float32).program
        other = Rank(directory, rank, group, torch.float32).program
        logits, chosen = [], []
        with torch.inference_mode():
            for rows in SCENARIO:
                packed, ids = packed_rows(rows)
                logits.append(one.forward(packed, ids, packed.counts.cumsum() - 1).clone())
                draws = draws_for(len(rows)) if any(temperatures) else native.NO_DRAWS
                assert other.can_choose(len(ids), draws)
                chosen.append(other.choose(packed, ids, packed.counts.cumsum() - 1, draws))
            rows = SCENARIO[-1]
            for _ in range(4):
                rows = [(row, start + 1, 1) for row, start, _ in rows]
                packed, _ = packed_rows(rows)
                logits.append(one.forward(packed, np.array(chosen[-1]), np.arange(len(rows))).clone())
                found = other.continue_rows({})
                assert found is not None
                chosen.append(found)
        return logits, chosen

    results = of_all(size, shared(size), body)
    ends = [[start + count for _, start, count in rows] for rows in SCENARIO]
    ends += [[end + more for end in ends[-1]] for more in range(1, 5)]
    for step, parts in enumerate(zip(*(logits for logits, _ in results), strict=True)):
        assert KERNELS is not None
        logits = torch.cat(parts, dim=1)
        expected = native.draw(KERNELS, logits, draws_for(len(logits)), np.array(ends[step])).tolist()
        if not any(temperatures):
            assert expected == logits.argmax(dim=1).tolist()
        assert [chosen[step] for _, chosen in results] == [expected] * size


def test_ranks_do_not_choose_where_whole_rows_are_looked_at(directory: Path) -> None:
    def body(rank: int, group: Communicator) -> list[bool]:
        program = Rank(directory, rank, group, torch.float32).program
        kinds = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.0, "top_k": 3}]
        draws = [native.draws([native.draw_of(SamplingParams(**kind), 0)]) for kind in kinds]
        return [program.can_choose(1, each) for each in draws]

    assert of_all(2, shared(2), body) == [[True, False, False, False, True]] * 2


def test_a_step_larger_than_the_arena_is_added_up_by_the_communicator(directory: Path) -> None:
    def body(rank: int, group: Communicator) -> list[torch.Tensor]:
        one = Rank(directory, rank, group, torch.float32)
        found = one.run()
        assert isinstance(one.program.sums.own, OwnSums)
        assert one.program.sums.common is not None
        assert one.program.sums.common.rows < 60
        return found

    small = of_all(2, shared(2, sizes=SegmentSizes(arena_bytes=48 << 10)), body)
    large = of_all(2, shared(2), lambda rank, group: Rank(directory, rank, group, torch.float32).run())
    for found, expected in zip(small, large, strict=True):
        assert all(map(torch.equal, found, expected))


def test_a_rank_that_does_not_come_ends_the_step_of_the_others(directory: Path) -> None:
    begun = threading.Event()

    def body(rank: int, group: Communicator) -> float:
        one = Rank(directory, rank, group, torch.float32)
        one.run()
        if rank == 0:
            begun.wait(PATIENCE)
            time.sleep(0.2)
            group.abort()
            return 0.0
        begun.set()
        since = time.monotonic()
        with pytest.raises(CollectiveError, match="a sum over ranks"):
            one.run()
        return time.monotonic() - since

    assert 0.1 < max(of_all(2, shared(2), body)) < 10
