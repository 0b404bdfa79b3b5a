"""Captured decode steps, with a capture that computes again: all but CUDA's own part of it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import why_not_triton
from engine.attention.base import PackedRows
from engine.checkpoint import read_model_info
from engine.config import ModelConfig
from engine.decode_graphs import Capture, Compute, CudaCapture, DecodeGraphs, make_graphs
from engine.graph_sizes import capture_sizes, size_for
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.weights import LoadedModel, load_model
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
    sizes = capture_sizes((), 50)
    for rows in range(1, 51):
        size = size_for(rows, sizes)
        assert size is not None
        assert rows <= size < rows + 8
    assert size_for(51, sizes) is None
    assert size_for(1, ()) is None


class Again:
    """Computes again on the same memory, into the same memory; or as another captures it, and takes notes."""

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
    if why_not_triton(model.device) is not None:
        pytest.skip(f"no Triton: {why_not_triton(model.device)}")
    from engine.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention(
        model.layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
        programs=4,
    )


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("flat", "qwen3_moe"),
        ("flat", "mistral"),
        ("triton", "qwen3_moe"),
        pytest.param("cuda", "qwen3_moe", marks=pytest.mark.gpu),
    ],
)
def test_replayed_steps_equal_eager_ones(kind: str, family: str, tmp_path: Path) -> None:
    """Random crowds, prompts and decode in any mixture: tokens, log-probabilities, and both caches."""
    on_gpu = kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = load(tmp_path, family, "cuda" if on_gpu else "cpu")
    again = Again(CudaCapture(model.device) if on_gpu else None)
    caches = [make_cache(kind, model) for _ in range(2)]
    sizes = SIZES if kind == "flat" else (2, 3)  # the interpreter is slow
    graphs = DecodeGraphs(model, caches[1], sizes, MAX_TOKENS)
    graphs.capture(again)
    assert repr(graphs) == f"DecodeGraphs({', '.join(map(str, reversed(sizes)))})"
    assert graphs.check(NUM_BLOCKS, BLOCK_SIZE) < 1e-4
    again.replayed.clear()
    for tensor in caches[1].keys + caches[1].values:
        tensor.zero_()
    runners = [
        ModelRunner(model, caches[0], BLOCK_SIZE),
        ModelRunner(model, caches[1], BLOCK_SIZE, graphs=graphs),
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

    def forget(compute: Compute) -> Compute:
        output = compute()  # as if copied once instead of read anew
        return lambda: output

    def make(capture, sizes=SIZES):
        return make_graphs(
            model, cache, sizes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_tokens=9, capture=capture
        )

    with caplog.at_level("INFO"):
        assert make(fail) is None
        assert make(forget) is None
        assert make(Again(), ()) is None
        graphs = make(Again())
    assert graphs is not None
    said = [record.getMessage() for record in caplog.records]
    assert "cannot be captured: operation not permitted when stream is capturing" in said[0]
    assert "results differ by" in said[1]
    assert "decode steps of 1, 2, 4, 6 rows" in said[2]
    far = PackedRows(np.array([9]), np.array([1]), np.zeros((1, 3), dtype=np.int32), np.array([9]), 1)
    assert graphs.forward(far, np.array([5])) is None
