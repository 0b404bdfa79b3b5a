"""Captured decode steps, with a capture that computes again instead of CUDA's own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import why_not_triton
from engine.attention.base import PackedRows
from engine.compute import decode_graphs
from engine.compute.decode_graphs import Capture, Compute, CudaCapture, DecodeGraphs
from engine.compute.graph_sizes import capture_sizes, size_for
from engine.compute.runner import ModelRunner
from engine.compute.step_graphs import StepGraphs, make_graphs
from engine.config import ModelConfig
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from engine.sampling import SamplingParams
from tests.engine.driver import Driver
from tests.engine.flat_attention import FlatAttention
from tests.engine.tiny_models import VOCAB, make_tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 64
SIZES = (1, 2, 4, 6)
MAX_TOKENS = 30


def test_sizes() -> None:
    assert capture_sizes((), 128) == (1, 2, 4, *range(8, 129, 8))
    assert capture_sizes((), 20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes((), 3) == (1, 2, 3)
    assert capture_sizes((16, 2, 2, 500), 100) == (2, 16)
    assert capture_sizes((500,), 100) == ()
    assert capture_sizes((), 4096) == capture_sizes((), 512) == (1, 2, 4, *range(8, 513, 8))
    assert capture_sizes((1, 4096), 4096) == (1, 4096)
    assert capture_sizes((), 50, each_small=True) == (*range(1, 33), 40, 48, 50)
    sizes = capture_sizes((), 50)
    for rows in range(1, 51):
        size = size_for(rows, sizes)
        assert size is not None
        assert rows <= size < rows + 8
    assert size_for(51, sizes) is None
    assert size_for(1, ()) is None


class Again:
    """A capture that computes again on the same memory, into the same memory.

    Or as another captures it, and takes notes.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self.replayed: list[int] = []
        self.capture = capture

    def __call__(self, compute: Compute) -> Compute:
        output = compute()
        captured = None if self.capture is None else self.capture(compute)

        def replay() -> torch.Tensor:
            self.replayed.append(len(output))
            return output.copy_(compute()) if captured is None else captured()

        return replay


def load(tmp_path: Path, family: str, device: str = "cpu") -> LoadedModel:
    directory = make_tiny_model(tmp_path / family, family)
    settings = ModelConfig(model=str(directory))
    return load_model(read_model_info(directory), settings, dtype=torch.float32, device=torch.device(device))


def make_cache(kind: str, model: LoadedModel):
    if kind == "flat":
        return FlatAttention(model.layers, NUM_BLOCKS, BLOCK_SIZE)
    assert why_not_triton(model.device) is None
    from engine.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention(
        model.layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
        programs=4,
    )


@pytest.mark.each_push
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("flat", "qwen3_moe"),
        ("flat", "mistral"),
        ("triton", "qwen3_moe"),
        pytest.param("cuda", "qwen3_moe", marks=pytest.mark.gpu),
    ],
)
def test_replayed_steps_equal_eager_ones(
    kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random crowds, prompts and decode in any mixture: tokens, log-probabilities, and both caches."""
    on_gpu = kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = load(tmp_path, family, "cuda" if on_gpu else "cpu")
    again = Again(CudaCapture(model.device) if on_gpu else None)
    caches = [make_cache(kind, model) for _ in range(2)]
    sizes = SIZES if kind == "flat" else (2, 3)
    if kind == "triton":  # the interpreter is slow
        monkeypatch.setattr(decode_graphs, "CHECKED_ROWS", 2)
    graphs = DecodeGraphs(model, caches[1], sizes, MAX_TOKENS)
    graphs.capture(again)
    assert repr(graphs) == f"DecodeGraphs({', '.join(map(str, reversed(sizes)))})"
    assert graphs.check(NUM_BLOCKS, BLOCK_SIZE) < 1e-4
    again.replayed.clear()
    for tensor in caches[1].keys + caches[1].values:
        tensor.zero_()
    runners = [
        ModelRunner(model, caches[0], BLOCK_SIZE),
        ModelRunner(model, caches[1], BLOCK_SIZE, graphs=StepGraphs(graphs)),
    ]
    drivers = [Driver(runner, BLOCK_SIZE, NUM_BLOCKS, seed=4) for runner in runners]
    numbers = random.Random(5)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 3, 9, 2, 4, 7)]
    params = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.0, prompt_logprobs=1),
    ]
    requests = [
        [driver.add(prompt, params[i % 2], seed=i) for i, prompt in enumerate(prompts)] for driver in drivers
    ]
    eager = 0
    for turn in range(24 if kind == "flat" else 8):
        crowd = numbers.sample(range(len(prompts)), numbers.choice([1, 1, *range(2, sizes[-1] + 2)]))
        crowd = [i for i in crowd if len(requests[0][i].token_ids) < MAX_TOKENS + 3]
        long = turn % 4 == 0
        counts = [
            (i, min(len(requests[0][i].token_ids) - requests[0][i].computed, 4 if long else 1)) for i in crowd
        ]
        if not counts:
            continue
        before = len(again.replayed)
        steps = [
            driver.step([(mine[i], n) for i, n in counts])
            for driver, mine in zip(drivers, requests, strict=True)
        ]
        positions = [requests[0][i].computed - 1 for i in crowd]
        captured = all(n == 1 for _, n in counts) and len(counts) <= sizes[-1] and max(positions) < MAX_TOKENS
        assert again.replayed[before:] == ([size_for(len(counts), sizes)] if captured else [])
        eager += not captured
        expected, found = steps
        assert expected.tokens == found.tokens
        assert expected.logprobs.keys() == found.logprobs.keys()
        for row, told in expected.logprobs.items():
            assert told.logprob == pytest.approx(found.logprobs[row].logprob, abs=1e-4)
    assert len(again.replayed) > 3
    assert eager > 1
    size = NUM_BLOCKS * BLOCK_SIZE  # whatever filled up a step wrote behind these
    for kept, replayed in zip(*[cache.keys + cache.values for cache in caches], strict=True):
        torch.testing.assert_close(replayed[:size], kept[:size], atol=1e-5, rtol=1e-4)
    assert caches[1].keys[0][size:].any()


def test_graphs_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Capture that fails, and one whose results are wrong: steps are computed without."""
    model = load(tmp_path, "llama")
    cache = FlatAttention(model.layers, NUM_BLOCKS, BLOCK_SIZE)

    def fail(compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    class CompilationError(Exception):
        """An error without a base class of torch's, as Triton's errors are."""

    def fail_to_compile(compute: Compute) -> Compute:
        raise CompilationError("at 1:2: out of resources")

    def forget(compute: Compute) -> Compute:
        output = compute()  # as if copied once instead of read anew
        return lambda: output

    def make(capture, sizes=SIZES):
        return make_graphs(
            model, cache, sizes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_tokens=9, capture=capture
        )

    with caplog.at_level("INFO"):
        assert make(fail) is None
        assert make(fail_to_compile) is None
        assert make(forget) is None
        assert make(Again(), ()) is None
        graphs = make(Again())
    assert graphs is not None
    said = [record.getMessage() for record in caplog.records]
    assert "cannot be captured: operation not permitted when stream is capturing" in said[0]
    assert "cannot be captured: at 1:2: out of resources" in said[1]
    assert "results differ by" in said[2]
    assert "decode steps of 1, 2, 4, 6 rows" in said[3]
    far = PackedRows(np.array([9]), np.array([1]), np.zeros((1, 3), dtype=np.int32), np.array([9]), 1)
    assert graphs.forward(far, np.array([5]), np.array([0])) is None


def test_all_sizes_share_their_logits(tmp_path: Path) -> None:
    """Memory for one matrix, not for one of each size."""
    model = load(tmp_path, "llama")
    outputs: list[torch.Tensor] = []

    def keep(compute: Compute) -> Compute:
        outputs.append(compute())
        return compute

    graphs = DecodeGraphs(model, FlatAttention(model.layers, NUM_BLOCKS, BLOCK_SIZE), SIZES, MAX_TOKENS)
    graphs.capture(keep)
    assert [tuple(each.shape) for each in outputs] == [(size, VOCAB) for size in reversed(SIZES)]
    assert len({each.data_ptr() for each in outputs}) == 1


@pytest.mark.parametrize(("wrong", "is_noticed"), [(1, False), (6, False), (100, True)])
def test_single_rows_may_differ_but_not_a_whole_size(wrong: int, is_noticed: bool, tmp_path: Path) -> None:
    """The first replays of the smallest size are of another model.

    Single rows may differ as those of near-tied experts do.
    """
    model = load(tmp_path, "qwen3_moe")

    def capture(compute: Compute) -> Compute:
        size, replayed = len(compute()), 0

        def replay() -> torch.Tensor:
            nonlocal replayed
            replayed += 1
            logits = compute()
            return logits.roll(1, dims=1) if size == 1 and replayed <= wrong else logits

        return replay

    graphs = DecodeGraphs(model, FlatAttention(model.layers, NUM_BLOCKS, BLOCK_SIZE), SIZES, MAX_TOKENS)
    graphs.capture(capture)
    assert (graphs.check(NUM_BLOCKS, BLOCK_SIZE) > 0.1) is is_noticed


@pytest.mark.parametrize("num_blocks", [1, 3, 5, 64])
def test_the_check_fits_any_cache_and_looks_far_back_where_it_can(num_blocks: int, tmp_path: Path) -> None:
    model = load(tmp_path, "mistral")
    cache = FlatAttention(model.layers, num_blocks, BLOCK_SIZE)
    positions: list[int] = []
    fill = cache.decode_buffers

    def decode_buffers(max_rows: int, max_tokens: int, most_chosen: int):
        buffers = fill(max_rows, max_tokens, most_chosen)
        original = buffers.fill

        def note(rows: PackedRows, size: int, *ids: object) -> None:
            own = rows.block_tables[np.arange(len(rows.starts)), rows.starts // BLOCK_SIZE]
            assert len(set(own.tolist())) == len(rows.starts), "each row writes to a block of its own"
            assert rows.block_tables.max() < num_blocks
            positions.extend(rows.starts.tolist())
            original(rows, size, *ids)

        buffers.fill = note
        return buffers

    cache.decode_buffers = decode_buffers
    graphs = DecodeGraphs(model, cache, SIZES, MAX_TOKENS)
    graphs.capture(Again())
    assert graphs.check(num_blocks, BLOCK_SIZE) < 1e-4
    longest = min(MAX_TOKENS, num_blocks * BLOCK_SIZE)
    assert longest - BLOCK_SIZE <= max(positions) < longest


class Streams:
    """The parts of ``torch.cuda`` that a capture uses.

    Streams have names, and the end of the capture fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        streams = self

        class Stream:
            def __init__(self, device: object = None) -> None:
                self.device = device

            def wait_stream(self, other: object) -> None:
                """Do nothing: all streams are one."""

        self.default = self.current = Stream()

        class Use:
            def __init__(self, stream: Stream) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before, streams.current = streams.current, self.stream

            def __exit__(self, *error: object) -> None:
                streams.current = self.before

        self.mode = 0
        self.captures = 0

        class Graph:
            def __init__(self, graph: object, pool: object, stream: Stream, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"  # else other threads' copies would spoil it
                streams.captures += 1
                self.use = Use(stream)

            def __enter__(self) -> None:
                self.use.__enter__()

            def __exit__(self, *error: object) -> None:
                raise RuntimeError("operation failed due to a previous error during capture")

        def set_stream(stream: Stream) -> None:
            streams.current = stream

        def set_mode(mode: int | str) -> None:
            streams.mode = {"error": 2}[mode] if isinstance(mode, str) else mode

        for name, value in {
            "get_sync_debug_mode": lambda: streams.mode,
            "set_sync_debug_mode": set_mode,
            "Stream": Stream,
            "current_stream": lambda device=None: streams.current,
            "stream": Use,
            "graph": Graph,
            "CUDAGraph": object,
            "set_stream": set_stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)


def test_what_waits_for_the_device_is_found_before_any_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails would leave torch's allocator as if one were under way."""
    streams = Streams(monkeypatch)
    modes: list[int] = []

    def compute() -> torch.Tensor:
        modes.append(streams.mode)
        if streams.mode == 2:  # as torch does it in that mode
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        CudaCapture(torch.device("cuda", 0))(compute)
    assert modes == [0, 2], "what is done once may wait"
    assert (streams.mode, streams.captures) == (0, 0)
    assert streams.current is streams.default


def test_after_a_capture_that_failed_the_stream_is_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(lambda: torch.zeros(1))
    assert streams.current is streams.default
