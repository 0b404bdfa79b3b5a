"""The invariance table's device column: Triton's kernels under ``--batch-invariant``, with whole tiny models.

Without a GPU they run in Triton's interpreter: products, attention with its parts, experts, norms, gates and
rotary embeddings, eager and in a pretended graph. It shows that a row's arithmetic does not follow the rows
beside it, not how a device rounds. On a GPU the same cells run there (marked ``gpu``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import splits, triton_paged, why_not_triton
from engine.attention.base import PLAN_KEYWORD, PackedRows
from engine.attention.prompt_size import PromptSize
from engine.attention.triton_paged import TritonPagedAttention
from engine.compute import invariance
from engine.compute.decode_graphs import DecodeGraphs
from engine.compute.device_blocks import DeviceBlocks
from engine.compute.logits_backend import SampleRow
from engine.compute.prompt_graphs import PromptGraphs
from engine.compute.token_rules import TokenRules
from engine.compute.torch_logits import TorchLogits
from engine.config import ModelConfig
from engine.executor.uni import UniExecutor
from engine.gpu import fixed_products, fused_layers, grouped_experts
from engine.gpu.late_rotary import turn_late
from engine.model import choice
from engine.model.checkpoint import read_model_info
from engine.model.experts_function import fix_experts
from engine.model.probe import run_stage
from engine.model.weights import load_model
from engine.numerics import numerics_of
from engine.sampling import SamplingParams
from engine.settings import resolve
from tests.engine.gpu.families import own_functions_again
from tests.engine.invariance.answers import settings
from tests.engine.tiny_models import make_tiny_model
from tests.nightly import NIGHTLY

BLOCK = 16
CONTEXT = 48
"""Tokens of the first request: three parts; others have up to a block."""
FAMILIES = ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt_oss"]
"""Five forms of models, dense and with experts."""
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
NEIGHBOURS = 255
TWO_TILES = fixed_products.TILE[0] + 2
"""Rows of a batch that reach into a second tile of the products."""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
Rows = Sequence[tuple[int, int, int]]


class Cell:
    """A family on a device."""

    def __init__(self, family: str, device: str, directory: Path) -> None:
        layers = 2 if family in ("gemma2", "gpt_oss") else 1
        make_tiny_model(directory, family, layers=layers, dtype=torch.bfloat16, **SMALL)
        self.device = torch.device(device)
        self.model = load_model(
            read_model_info(directory),
            ModelConfig(model=str(directory)),
            dtype=torch.bfloat16,
            device=self.device,
        )
        if device == "cpu":  # what is done on a GPU when a model is loaded
            fused = fused_layers.fuse_layers(self.model.module).counts
            assert fused["norms"] >= 3
            assert fused["merged products"] >= 1
            turn_late(self.model.module, PLAN_KEYWORD)
        fix_experts(self.model.module)
        self.blocks = DeviceBlocks(self.device)
        self.whole = cache(lambda: self.run(self.cache(), [(0, 0, CONTEXT)]))

    def cache(self) -> TritonPagedAttention:
        return TritonPagedAttention(
            self.model.layers,
            num_blocks=CONTEXT // BLOCK + NEIGHBOURS,
            block_size=BLOCK,
            dtype=self.model.dtype,
            device=self.device,
            fixed=True,
        )

    def pack(self, rows: Rows) -> tuple[PackedRows, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Rows (request, first token, how many), those of one token first, and their token ids."""
        requests, starts, counts = (np.array(column) for column in zip(*rows, strict=True))
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        pages = CONTEXT // BLOCK
        tables = np.tile(np.arange(pages, dtype=np.int32), (len(rows), 1))
        tables[requests > 0, 0] = pages - 1 + requests[requests > 0]
        packed = PackedRows(starts, counts, tables, positions, int((counts == 1).sum()))
        return packed, (positions * 7919 + np.repeat(requests, counts) * 13) % self.model.vocab_size

    def run(self, kv: TritonPagedAttention, rows: Rows) -> torch.Tensor:
        """Logits of the tokens of a step's rows."""
        packed, ids = self.pack(rows)
        tokens, places = (torch.from_numpy(each).to(self.device) for each in (ids, packed.positions))
        with torch.inference_mode(), self.blocks:
            plan = {PLAN_KEYWORD: kv.plan(packed)}
            return run_stage(self.model.module, self.model.stage, tokens, places, **plan)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Cell]]:
    """A family on a device, loaded once; parts of contexts are small."""
    with pytest.MonkeyPatch.context() as patch, own_functions_again():
        patch.setattr(splits, "SPLIT_KEYS", 16)
        patch.setattr(triton_paged, "MOST_KEYS", 16)
        patch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})
        patch.setattr(fixed_products, "LEAST_CUT", 32)
        patch.setattr(grouped_experts, "CHECKED_TOKENS", (1, 5))
        yield cache(lambda family, device: Cell(family, device, tmp_path_factory.mktemp(family)))


CHUNKED = [
    *("llama", "gemma2", "gpt_oss"),
    *(pytest.param(family, marks=pytest.mark.nightly) for family in ("qwen3", "qwen3_moe")),
]
"""Families whose prompts are computed in pieces.

For each push those with an attention of their own.
"""
EACH_PUSH = [("llama", TWO_TILES), ("qwen3", 8), ("gemma2", 2), ("qwen3_moe", 8), ("gpt_oss", 2)]
SIZES = [
    *EACH_PUSH,
    *(
        pytest.param(family, size, marks=pytest.mark.nightly)
        for family, size in [("llama", 256), *itertools.product(FAMILIES, (2, 8, 32))]
        if (family, size) not in EACH_PUSH
    ),
]


@on_devices
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_a_row_in_a_batch_has_the_bits_that_it_has_alone(
    family: str, size: int, device: str, cells: Callable[[str, str], Cell]
) -> None:
    """Batches of 2 to 256: a row with a long context beside short ones."""
    cell = cells(family, device)
    kv = cell.cache()
    cell.run(kv, [(0, 0, CONTEXT - 1)])
    last = CONTEXT - 1, 1
    beside = [(request, request % BLOCK, 1) for request in range(1, size)]
    alone = cell.run(kv, [(0, *last)])
    found = cell.run(kv, [*beside, (0, *last)])
    assert torch.equal(found[-1:], alone)
    assert torch.equal(alone, cell.whole()[-1:]), "a token of a prompt has other bits than one by itself"


@on_devices
@pytest.mark.parametrize("family", CHUNKED)
def test_chunks_and_resumption_change_no_bit(
    family: str, device: str, cells: Callable[[str, str], Cell]
) -> None:
    """A request in pieces beside others, and one that goes on elsewhere."""
    cell = cells(family, device)
    kv = cell.cache()
    steps: list[Rows] = [
        [(1, 0, 1), (0, 0, 15)],
        [(0, 15, 1), (2, 0, 3)],
        [(1, 1, 1), (0, 16, 17)],
        [(0, 33, 1)],
        [(0, 34, CONTEXT - 34)],
    ]
    found = []
    for rows in steps:
        of_row = np.repeat([request for request, _, _ in rows], [count for _, _, count in rows])
        found.append(cell.run(kv, rows)[torch.from_numpy((of_row == 0).nonzero()[0]).to(cell.device)])
    assert torch.equal(torch.cat(found), cell.whole())


def test_graphs_change_no_bit(cells: Callable[[str, str], Cell]) -> None:
    """A decode step filled up to another size, in buffers for the longest context."""
    cell = cells("qwen3_moe", "cpu")
    kv = cell.cache()
    cell.run(kv, [(0, 0, CONTEXT - 1)])
    rows = [(0, CONTEXT - 1, 1), (1, 0, 1)]
    packed, ids = cell.pack(rows)
    with torch.inference_mode(), cell.blocks:
        graphs = DecodeGraphs(cell.model, kv, (5,), CONTEXT)
        graphs.capture(lambda compute: compute)
        found = graphs.forward(packed, ids)
    assert found is not None
    assert torch.equal(found, cell.run(kv, rows))


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_graphs_of_prompts_change_no_bit(family: str, cells: Callable[[str, str], Cell]) -> None:
    """Prompts and a decode row, filled up to another number of tokens and rows."""
    cell = cells(family, "cpu")
    kv = cell.cache()
    rows = [(0, CONTEXT - 1, 1), (1, 0, 9), (2, 0, 5)]
    packed, ids = cell.pack(rows)
    wanted = np.arange(len(ids))
    with torch.inference_mode(), cell.blocks:
        graphs = PromptGraphs(cell.model, kv, (PromptSize(20, 3, 4),), CONTEXT)
        graphs.capture(lambda compute: compute)
    cell.run(kv, [(0, 0, CONTEXT - 1)])
    with torch.inference_mode(), cell.blocks:
        found = graphs.forward(packed, ids, wanted)
    assert found is not None
    assert torch.equal(found, cell.run(kv, rows))


def test_an_executor_accepts_the_flag_and_its_class_is_invariant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial at its start runs on the kernels, too."""
    monkeypatch.setattr(choice, "PROMPT", 20)
    monkeypatch.setattr(choice, "OTHER_PROMPT", 5)
    monkeypatch.setattr(invariance, "COUNT", 12)
    monkeypatch.setattr(invariance, "OTHER_COUNT", 8)
    directory = make_tiny_model(tmp_path, "llama", layers=1, dtype=torch.bfloat16, **SMALL)
    config = settings(directory, attention_backend="TRITON_ATTN", batch_invariant=True)
    executor = UniExecutor(config, read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    info, served = resolve(config)
    found = numerics_of(served, config.model, info.directory, executor.arithmetic())
    assert found.invariant
    assert executor.arithmetic()[0].attention == "TRITON_FIXED"
    executor.close()


def test_the_sampler_chooses_for_a_row_alone_what_it_chooses_in_a_batch() -> None:
    """The kernels of races, top-k and top-p; tables of log-probabilities."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert why_not_triton(device) is None
    numbers = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(9 if NIGHTLY else 5, 5003, generator=numbers)).to(device)
    kinds = [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {}, {"min_p": 0.1}]
    params = [SamplingParams(temperature=0.5 + 0.1 * i, **kinds[i % 5]) for i in range(len(logits))]  # type: ignore[arg-type]
    nothing = np.zeros(0, dtype=np.int64)
    rows = [SampleRow(each, i, 7 * i, nothing, 0, TokenRules(each)) for i, each in enumerate(params)]
    sampler = TorchLogits(row_by_row=True, by_kernel=True)
    together = sampler.draw(logits, rows)
    table = sampler.logprob_table(logits, together, 3)
    for i, row in enumerate(rows):
        mine = logits[i : i + 1]
        assert torch.equal(sampler.draw(mine, [row]), together[i : i + 1])
        assert torch.equal(sampler.logprob_table(mine, together[i : i + 1], 3), table[i : i + 1])
