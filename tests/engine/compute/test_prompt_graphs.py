"""Captured steps with prompts: Triton's kernels in the interpreter, and a capture that computes again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.base import PackedRows
from engine.attention.prompt_size import PromptSize
from engine.attention.triton_paged import TritonPagedAttention
from engine.compute import decode_graphs
from engine.compute.decode_graphs import Compute, CudaCapture, DecodeGraphs
from engine.compute.followed_tokens import FollowedTokens
from engine.compute.graph_sizes import PROMPT_TOKENS, prompt_sizes
from engine.compute.prompt_graphs import PromptGraphs
from engine.compute.runner import ModelRunner
from engine.compute.step_graphs import StepGraphs, make_graphs
from engine.config import ModelConfig
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from engine.sampling import SamplingParams
from tests.engine.compute.test_decode_graphs import BLOCK_SIZE, MAX_TOKENS, NUM_BLOCKS
from tests.engine.driver import Driver
from tests.engine.tiny_models import VOCAB, make_tiny_model

SIZES = (PromptSize(8, 0, 2), PromptSize(8, 3, 2), PromptSize(16, 3, 3))

STEPS = [
    ([(0, 7), (1, 5)], SIZES[2].wanted),
    ([(0, 1), (1, 1), (2, 5)], SIZES[1].wanted),
    ([(0, 1), (1, 1), (2, 4), (4, 10)], SIZES[2].wanted),
    ([(2, 1), (4, 2), (3, 2)], SIZES[1].wanted),
    ([(1, 1), (3, 1)], 2),
    ([(0, 1), (1, 1), (2, 1), (4, 1)], None),
]
"""Requests and numbers of tokens of steps, and the logits that the graph gives."""


def load(tmp_path: Path, family: str, device: str = "cpu") -> LoadedModel:
    """A model of one layer, since the interpreter is slow."""
    layers = 2 if family in ("gemma2", "gpt_oss") else 1
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}
    directory = make_tiny_model(tmp_path / family, family, layers=layers, **sizes)
    info, settings = read_model_info(directory), ModelConfig(model=str(directory))
    return load_model(info, settings, dtype=torch.float32, device=torch.device(device))


def cache_of(model) -> TritonPagedAttention:
    return TritonPagedAttention(
        model.layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
        programs=4,
    )


class Replays:
    """A capture that computes again, or a device's, and notes the size of each replay."""

    def __init__(self, capture=None) -> None:
        self.capture = capture
        self.wanted: list[int] = []

    def __call__(self, compute: Compute) -> Compute:
        captured = compute if self.capture is None else self.capture(compute)
        size = len(compute())

        def replay() -> torch.Tensor:
            self.wanted.append(size)
            return captured()

        return replay


def graphs_of(model, cache, replays=None) -> PromptGraphs:
    graphs = PromptGraphs(model, cache, SIZES, MAX_TOKENS, 12)
    graphs.capture(replays or Replays())
    return graphs


def step_of(*rows: tuple[int, int]) -> tuple[PackedRows, np.ndarray]:
    """Rows (first position, tokens), each in blocks of its own."""
    starts, counts = (np.array(column) for column in zip(*rows, strict=True))
    positions = np.concatenate([np.arange(s, s + c) for s, c in rows])
    width = int(positions.max()) // BLOCK_SIZE + 1
    tables = np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    ids = np.arange(len(positions)) * 7 % VOCAB
    return PackedRows(starts, counts, tables, positions, int((counts == 1).sum())), ids


def test_sizes() -> None:
    sizes = prompt_sizes((), 128, 2048)
    assert [size.tokens for size in sizes] == [tokens for tokens in PROMPT_TOKENS for _ in range(2)]
    assert sizes[0] == PromptSize(64, 0, 16)
    assert sizes[1] == PromptSize(64, 63, 16)
    assert sizes[-1] == PromptSize(2048, 128, 16)
    assert sizes[-1].wanted == 192
    assert max(size.tokens for size in prompt_sizes((), 8, 300)) == 384
    assert {size.tokens for size in prompt_sizes((), 8, 10)} == {64}
    assert [size.tokens for size in prompt_sizes((100, 30, 30), 8, 4096)] == [30, 30, 100, 100]
    assert prompt_sizes((1,), 8, 4096) == ()
    assert PromptSize(8, 3, 2).rows == 5
    size = PromptSize(8, 1, 2)
    assert size.fits(8, 1, 2, 8)
    for more in ((9, 1, 2, 8), (8, 2, 2, 8), (8, 1, 3, 8), (8, 1, 2, 9)):
        assert not size.fits(*more)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("gemma2", "gpt_oss"))],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replayed_steps_equal_eager_ones(family: str, device: str, tmp_path: Path) -> None:
    """Random crowds of prompts and decode rows: tokens, log-probabilities, and both caches."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = load(tmp_path, family, device)
    caches = [cache_of(model) for _ in range(2)]
    replays = Replays(CudaCapture(model.device) if device == "cuda" else None)
    prompts = graphs_of(model, caches[1], replays)
    assert repr(prompts) == "PromptGraphs(8, 16)"
    assert prompts.check(NUM_BLOCKS, BLOCK_SIZE) < 1e-4
    decode = DecodeGraphs(model, caches[1], (2,), MAX_TOKENS, 12)
    decode.capture(replays)
    for tensor in caches[1].keys + caches[1].values:
        tensor.zero_()
    runners = [
        ModelRunner(model, caches[0], BLOCK_SIZE),
        ModelRunner(model, caches[1], BLOCK_SIZE, graphs=StepGraphs(decode, prompts)),
    ]
    drivers = [Driver(runner, BLOCK_SIZE, NUM_BLOCKS, seed=4) for runner in runners]
    numbers = random.Random(3)
    texts = [[numbers.randrange(3, VOCAB) for _ in range(n)] for n in (7, 5, 9, 2, 12)]
    params = [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=1.0)]
    requests = [
        [driver.add(text, params[i % 2], seed=i) for i, text in enumerate(texts)] for driver in drivers
    ]
    replays.wanted.clear()
    for counts, size in STEPS:
        before = len(replays.wanted)
        expected, found = (
            driver.step([(mine[i], n) for i, n in counts])
            for driver, mine in zip(drivers, requests, strict=True)
        )
        assert expected.tokens == found.tokens, counts
        for row, told in expected.logprobs.items():
            assert told.logprob == pytest.approx(found.logprobs[row].logprob, abs=1e-4)
        assert replays.wanted[before:] == ([] if size is None else [size])
    used = NUM_BLOCKS * BLOCK_SIZE  # whatever filled up a step wrote behind these
    for kept, replayed_cache in zip(*[cache.keys + cache.values for cache in caches], strict=True):
        torch.testing.assert_close(replayed_cache[:used], kept[:used], atol=1e-5, rtol=1e-4)


def test_rows_may_follow_tokens_that_only_the_device_knows(tmp_path: Path) -> None:
    """Beside a prompt, as beside others."""
    model = load(tmp_path, "llama")
    graphs = graphs_of(model, cache_of(model))
    packed, ids = step_of((1, 1), (2, 1), (0, 5))
    wanted = np.array([0, 1, 6])
    with torch.inference_mode():
        expected = graphs.forward(packed, ids, wanted)
        assert expected is not None
        expected = expected.clone()
        unknown = ids.copy()
        unknown[1] = 3
        tokens = torch.arange(12)
        tokens[9] = int(ids[1])
        followed = FollowedTokens(tokens, np.array([-1, 9, -1]))
        found = graphs.forward(packed, unknown, wanted, followed)
        assert found is not None
        assert torch.equal(found, expected)
        plain = graphs.forward(packed, unknown, wanted)
        assert plain is not None
        assert not torch.equal(plain[1], expected[1])


class Operators(TorchDispatchMode):
    """Names of operators that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ("slice", "view", "select", "unbind", "detach", "lift_fresh", "alias"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [[(0, 7)], [(3, 1), (0, 5)], [(0, 2), (4, 9)]])
def test_a_padded_prompt_is_one_launch_after_one_upload(rows: list[tuple[int, int]], tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    launched: list[str] = []

    def capture(compute: Compute) -> Compute:
        output = compute()

        def replay() -> torch.Tensor:
            launched.append("graph")
            return output

        return replay

    graphs = PromptGraphs(model, cache_of(model), SIZES, MAX_TOKENS)
    graphs.capture(capture)
    packed, ids = step_of(*rows)
    operators = Operators()
    with torch.inference_mode(), operators:
        found = graphs.forward(packed, ids, np.array([len(ids) - 1]))
    assert found is not None
    assert found.shape == (1, VOCAB)
    assert launched == ["graph"]
    assert operators.names == ["copy_"]


def test_steps_that_fit_no_size_are_left_to_others(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    replays = Replays()
    graphs = graphs_of(model, cache_of(model), replays)
    replays.wanted.clear()
    with torch.inference_mode():
        for rows in ([(0, 17)], [(0, 2)] * 4, [(0, 1)] * 4 + [(0, 2)], [(MAX_TOKENS - 3, 4)]):
            packed, ids = step_of(*rows)
            assert graphs.forward(packed, ids, np.array([0])) is None
        packed, ids = step_of((0, 8))
        assert graphs.forward(packed, ids, np.arange(9) % 8) is not None, "nine wanted of the next size"
        assert graphs.forward(packed, ids, np.arange(17) % 8) is None
    assert len(replays.wanted) == 1


def test_prompts_that_cannot_be_captured_leave_decode_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that fails for prompts only, and one with wrong results."""
    model = load(tmp_path, "llama")
    monkeypatch.setattr(decode_graphs, "CHECKED_ROWS", 1)
    monkeypatch.setattr(decode_graphs, "CHECKED_TOKENS", 8)
    sizes, prompts = (2, 3), (PromptSize(5, 0, 1), PromptSize(6, 2, 1))

    def fail(compute: Compute) -> Compute:
        if len(compute()) not in sizes:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return compute

    def forget(compute: Compute) -> Compute:
        output = compute()
        return compute if len(output) in sizes else lambda: output.roll(1, dims=1)

    def make(capture) -> StepGraphs:
        found = make_graphs(
            model, cache_of(model), sizes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
            max_tokens=9, capture=capture, prompt_sizes=prompts,
        )  # fmt: skip
        assert found is not None
        return found

    packed, ids = step_of((0, 5))
    one, id_of_one = step_of((0, 1))
    with caplog.at_level("INFO"), torch.inference_mode():
        for capture in (fail, forget):
            graphs = make(capture)
            assert graphs.forward(packed, ids, np.array([4])) is None
            assert graphs.forward(one, id_of_one, np.array([0])) is not None
        graphs = make(lambda compute: compute)
        assert graphs.forward(packed, ids, np.array([4])) is not None
    logged = [record.getMessage() for record in caplog.records]
    assert "decode steps of 2, 3 rows" in logged[0]
    assert logged[1].startswith(
        "CUDA graphs of prompts: off, this model's step cannot be captured: operation"
    )
    assert "CUDA graphs of prompts: off, results differ by" in logged[3]
    assert "CUDA graphs of prompts: steps of 5, 6 tokens" in logged[5]
