"""Native products with adapters: PEFT's numbers, and bits that no other row changes."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.messages import AdapterSource
from engine.adapters.adapter_files import Adapter, read_adapter
from engine.adapters.adapter_settings import settled
from engine.config import ModelConfig
from engine.kernels.adapters.sites import AdapterRoom, keys_of, sorted_rows
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.decoder import recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from parallel.kernel_kinds import Kind
from tests.engine.adapters.made_adapters import PROJECTIONS, make_adapter, make_adapter_of_each_expert
from tests.engine.kernels.emulation import WIDE
from tests.engine.kernels.test_kernels import BLOCK_SIZE, NUM_BLOCKS, packed_rows
from tests.engine.native_families import make_family

KERNELS = library.load()
ROOM = AdapterRoom(adapters=8, rank=40)
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no native kernels here")

NINE = np.arange(63, dtype=np.int32).reshape(9, 7)
EACH = "each expert"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {
        "target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"],
        "rank_pattern": {"q_proj": 40, "down_proj": 2, "embed_tokens": 20},
        "alpha_pattern": {"v_proj": 4},
    },
    "gemma2": {"use_rslora": True},
    "cohere": {"target_modules": [*PROJECTIONS, "lm_head"]},  # pairs side by side: outputs in another order
    "phi3": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "olmo2": {"target_modules": ["k_proj", "up_proj"]},
    "gemma3": {"target_modules": [*PROJECTIONS, "embed_tokens"]},  # with a factor on what it gives
    "qwen3_moe": {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
    "qwen3_moe, each": {EACH: True},
    "granite_moe": {"target_modules": ["q_proj", "embed_tokens"], "target_parameters": EXPERTS},
    "qwen2_moe": {"target_modules": ["q_proj", "down_proj"], "target_parameters": EXPERTS[1:]},
    "gpt_oss": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
}


class Served:
    """A model on native kernels with three adapters, and transformers' model with each of them."""

    def __init__(
        self,
        directory: Path,
        family: str,
        dtype: torch.dtype = torch.float32,
        kernels: library.KernelLibrary | None = KERNELS,
        **config: Any,
    ) -> None:
        path = directory / "model"
        make_family(path, family.partition(",")[0])
        self.model = load_model(
            read_model_info(path), ModelConfig(**config), dtype=dtype, device=torch.device("cpu")
        )
        assert kernels is not None
        decoder = recognise(self.model.module, self.model.layers, self.model.dtype)
        self.program = Program(kernels, decoder, adapters=ROOM)
        self.program.use(
            NativeCache(self.model.layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)
        )
        self.truths = []
        self.adapters: dict[int, Adapter] = {}
        for number in range(1, 4):
            settings = FAMILIES[family]
            place = directory / str(number)
            if EACH in settings:
                self.truths.append(make_adapter_of_each_expert(path, place, seed=number))
            else:
                self.truths.append(make_adapter(path, place, seed=number, **settings))
            with torch.device("meta"):
                whole = type(self.model.module)(self.model.module.config)
            source = settled(AdapterSource(str(number), str(place)))
            self.adapters[number] = read_adapter(source, whole, ROOM.rank)
            self.put(number, self.adapters[number])

    def put(self, number: int, adapter: Adapter) -> None:
        keys = keys_of(self.model.module)
        assert self.program.sites is not None
        assert {keys[name] for name in adapter.parts} <= self.program.sites.keys
        self.program.sites.put(number, {keys[name]: part for name, part in adapter.parts.items()})

    def logits(self, rows: list[tuple[int, int, int]], adapters: list[int]) -> torch.Tensor:
        packed, ids = packed_rows([(request % 8, start, count) for request, start, count in rows])
        if any(request > 7 for request, _, _ in rows):  # seven blocks each, so that there are enough
            packed = replace(packed, block_tables=NINE[[request for request, _, _ in rows]])
        numbers = np.array(adapters) if any(adapters) else None
        wanted = np.arange(len(ids))
        return self.program.forward(replace(packed, adapters=numbers), ids, wanted).clone()


AT_NIGHT = ("llama", "gemma2", "olmo2", "qwen2_moe", "gpt_oss")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[pytest.mark.nightly] * (each in AT_NIGHT)) for each in FAMILIES],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), request.param)


ROWS = [(0, 0, 33), (1, 0, 70), (2, 0, 5), (3, 0, 17), (4, 0, 6)]
ADAPTERS = [1, 0, 2, 3, 1]


def test_rows_have_the_logits_of_their_adapters(served: Served) -> None:
    found = served.logits(ROWS, ADAPTERS)
    begin = 0
    for (request, start, count), number in zip(ROWS, ADAPTERS, strict=True):
        _, ids = packed_rows([(request, start, count)])
        truth = served.truths[max(number, 1) - 1]
        with torch.no_grad():
            if number == 0:
                with truth.disable_adapter():
                    expected = truth(torch.from_numpy(ids)[None]).logits[0]
            else:
                expected = truth(torch.from_numpy(ids)[None]).logits[0]
        torch.testing.assert_close(found[begin : begin + count], expected, rtol=2e-4, atol=2e-4)
        begin += count


def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(served: Served) -> None:
    together = served.logits(ROWS, ADAPTERS)
    begin = 0
    for row, number in zip(ROWS, ADAPTERS, strict=True):
        alone = served.logits([row], [number])
        assert torch.equal(alone, together[begin : begin + row[2]])
        begin += row[2]
        request, _, count = row
        in_chunks = torch.cat([served.logits([(request, at, 1)], [number]) for at in range(count)])
        assert torch.equal(in_chunks, alone)


def test_eight_adapters_and_the_model_share_a_step(served: Served) -> None:
    """The last five are the first three with other scalings."""
    for number in range(4, 9):
        parts = served.adapters[number % 3 + 1].parts
        changed = {name: part._replace(scaling=part.scaling * number / 10) for name, part in parts.items()}
        served.put(number, Adapter(40, changed))
    rows = [(request, 0, 2 + 3 * request % 7) for request in range(9)]
    numbers = [3, 8, 0, 5, 1, 7, 2, 6, 4]
    together = served.logits(rows, numbers).split([count for _, _, count in rows])
    for row, number, expected in zip(rows, numbers, together, strict=True):
        assert torch.equal(served.logits([row], [number]), expected), number
    of_one_prompt = [served.logits([(0, 0, 5)], [number]) for number in range(9)]
    for each, other in itertools.combinations(of_one_prompt, 2):
        assert not torch.equal(each, other)


@pytest.mark.parametrize("kind", ["avx512", "avx512f", "avx2"])
def test_bits_in_bfloat16_are_those_of_a_row_alone(kind: Kind, tmp_path: Path) -> None:
    if (reason := library.why_not(kind)) is not None:
        pytest.skip(reason)
    with nullcontext(library.opened(kind)) if kind != WIDE.kind else WIDE.for_each_push() as kernels:
        served = Served(tmp_path, "qwen3", torch.bfloat16, kernels)
    test_a_row_has_the_same_bits_alone_and_beside_other_adapters(served)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_adapters_add_to_a_quantised_base(method: str, tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen3", torch.bfloat16, quantization=method)
    test_a_row_has_the_same_bits_alone_and_beside_other_adapters(served)
    found, base = (served.logits(ROWS[1:2], [number]) for number in (1, 0))
    _, ids = packed_rows(ROWS[1:2])
    with torch.no_grad():
        adapted = served.truths[0](torch.from_numpy(ids)[None]).logits[0]
        with served.truths[0].disable_adapter():
            plain = served.truths[0](torch.from_numpy(ids)[None]).logits[0]
    assert (found - base - (adapted - plain)).norm() < 0.5 * (adapted - plain).norm()


def test_an_adapter_can_be_put_in_the_place_of_another(served: Served) -> None:
    first, second = (served.logits(ROWS[:1], [number]) for number in (1, 2))
    assert not torch.equal(first, second)
    served.put(1, served.adapters[2])
    assert torch.equal(served.logits(ROWS[:1], [1]), second)
    served.put(1, served.adapters[1])
    assert torch.equal(served.logits(ROWS[:1], [1]), first)


def test_rows_are_sorted_by_adapter_in_runs_of_a_few() -> None:
    numbers = np.array([2] * 40 + [0, 0, 1, 2])
    found = sorted_rows(numbers)
    assert found.numbers is numbers
    assert found.order.tolist() == [42, *range(40), 43]
    assert found.runs.tolist() == [(1, 0, 1), (2, 1, 32), (2, 33, 9)]
