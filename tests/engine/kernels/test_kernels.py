"""Native kernels: each operation of a step against torch, and their further guarantees."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.attention.base import PLAN_KEYWORD, LayerShape, PackedRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.compute.runner import ModelRunner
from engine.config import ModelConfig
from engine.kernels import make, position_tables
from engine.kernels.cache import native_cache as cache_module
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.core.operations import (
    ADD,
    AS_FLOAT,
    SELECTED,
    OperationKind,
    OperationList,
    StepArguments,
)
from engine.kernels.core.rows import SLACK, pitch_of
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decode_continuation import DecodeContinuation
from engine.kernels.decoder import recognise
from engine.kernels.experts.packed_experts import NativeExperts
from engine.kernels.make import bytes_for_program, make_program
from engine.kernels.products.packing import gate_and_up, panels
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from engine.sampling import SamplingParams
from engine.states.held import StateRows
from engine.step import Step
from tests.engine.driver import Driver
from tests.engine.native_families import make_family
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_BLOCKS, BLOCK_SIZE = 64, 16
P = TypeVar("P", bound=Program)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same rows with gaps, as they lie between operations.

    The content of the gaps must not matter.
    """
    rows = torch.full((len(x) + SLACK, pitch_of(x.shape[1], x.dtype)), float("nan"), dtype=x.dtype)
    rows[: len(x), : x.shape[1]] = x
    return rows


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(difference) < TOLERANCE[dtype]


def run(kind: OperationKind, tokens: int, dtype: torch.dtype, **fields: object) -> None:
    assert KERNELS is not None
    operations = OperationList(1)
    operations.add(kind, **fields)
    operations.run(KERNELS, StepArguments(tokens=tokens), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 8, 21, 75])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (50, 34), (8, 192)])
def test_linear(tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(tokens, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    bias, before = random(outputs), random(tokens, outputs, dtype=dtype)
    expected = x.float() @ weight.float().T + bias
    wide = torch.empty(tokens, outputs)
    shared = {"into": spaced(x), "weights": panels(weight, 32), "more": bias, "n": outputs, "k": inputs}
    run(OperationKind.LINEAR, tokens, dtype, out=wide, flags=AS_FLOAT, **shared)
    close(wide, expected, torch.float32)
    added = spaced(before)
    run(OperationKind.LINEAR, tokens, dtype, out=added, flags=ADD, **shared)
    close(added[:tokens, :outputs], before.float() + expected, dtype)
    assert added[:, outputs:].isnan().all()
    assert added[tokens:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize(("step_in", "outputs"), [(0, 16), (64, 32), (96, 96)])
def test_linear_of_groups(tokens: int, step_in: int, outputs: int, dtype: torch.dtype) -> None:
    """Groups of outputs lie apart; all have the same inputs, or each its own."""
    groups, inputs, begin = 3, 64, 8
    x = random(tokens, groups * step_in or inputs, dtype=dtype)
    weight = random(groups, outputs, inputs, dtype=dtype)
    given = x.unflatten(1, (groups, -1))[:, :, :inputs] if step_in else x[:, None].expand(-1, groups, -1)
    expected = torch.einsum("tgk,gok->tgo", given.float(), weight.float())
    width = groups * (outputs + 24)
    out = spaced(torch.full((tokens, width), torch.nan, dtype=dtype))
    run(
        OperationKind.LINEAR,
        tokens,
        dtype,
        into=spaced(x),
        out=out.data_ptr() + begin * out.element_size(),
        weights=panels(weight.flatten(0, 1), 32),
        n=outputs,
        k=inputs,
        groups=groups,
        step_in=step_in,
        step_out=outputs + 24,
        width=width,
    )
    found = out[:tokens, begin : begin + width].unflatten(1, (groups, -1))
    close(found[:, :, :outputs], expected, dtype)
    assert found[:, :-1, outputs:].isnan().all()
    assert out[:, :begin].isnan().all()
    assert out[tokens:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("dim", "group"), [(16, 1), (48, 5), (64, 2), (64, 13), (80, 3), (128, 1), (128, 4), (192, 2), (192, 7)]
)
def test_attention(dim: int, group: int, apart: bool, dtype: torch.dtype) -> None:
    """Prompts, then one token for each row.

    The tokens are stored with the others' or by the thread that reads them. Attention of only some of the
    tokens is the same.
    """
    assert KERNELS is not None
    kv_heads, heads = 2, 2 * group
    width, counts = (heads + 2 * kv_heads) * dim, [1, 5, 90]
    cache = NativeCache(
        [LayerShape(kv_heads, dim, dim, None)], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype
    )
    shape = {"a": heads, "b": kv_heads, "c": dim, "n": dim}
    history = [torch.empty(0, width, dtype=dtype) for _ in counts]
    for number, (rows, wanted) in enumerate(
        [
            ([(0, 0, 1), (1, 0, 5), (2, 0, 90)], [0, 95, 3, 4, 5, *range(30, 70)]),
            ([(0, 1, 1), (1, 5, 1), (2, 90, 1)], [0, 2, 1]),
        ]
    ):
        packed, _ = packed_rows(rows)
        plan, tokens = cache.plan(packed, np.array(wanted)), int(packed.counts.sum())
        x = random(tokens, width, dtype=dtype)
        into, out = spaced(x), spaced(torch.zeros(tokens, heads * dim, dtype=dtype))
        operations = OperationList(3)
        keys, values = cache.keys[0], cache.values[0]
        operations.add(OperationKind.QKV, into=into, out=values, extra=keys, **shape)
        operations.add(
            OperationKind.ATTEND, into=into, out=out, weights=values, extra=keys, number=dim**-0.5, **shape
        )
        step = StepArguments(
            tokens=tokens,
            num_tasks=len(plan.tasks),
            table_width=plan.tables.shape[1],
            block_size=BLOCK_SIZE,
            slots=plan.slots,
            positions=packed.positions,
            angles=np.zeros(0, dtype=np.int64),
            starts=packed.starts,
            counts=packed.counts,
            offsets=plan.offsets,
            tables=plan.tables,
            tasks=plan.tasks,
            num_chosen_tasks=len(plan.chosen_tasks),
            chosen_tasks=plan.chosen_tasks,
            apart=int(apart and number == 1),
        )
        assert operations.run(KERNELS, step, dtype)
        chosen = spaced(torch.zeros(len(wanted), heads * dim, dtype=dtype))
        step.array["apart"] = 0
        operations.add(
            OperationKind.ATTEND,
            into=into,
            out=chosen,
            weights=values,
            extra=keys,
            number=dim**-0.5,
            flags=SELECTED,
            **shape,
        )
        assert operations.run(KERNELS, step, dtype, begin=2)
        assert torch.equal(chosen[: len(wanted), : heads * dim], out[wanted, : heads * dim])
        for row, (first, count) in enumerate(zip(plan.offsets, packed.counts, strict=True)):
            history[row] = torch.cat([history[row], x[first : first + count]])
            parts = history[row].float().view(len(history[row]), -1, dim).transpose(0, 1)
            query, key, value = parts.split([heads, kv_heads, kv_heads])
            mask = torch.ones(count, len(history[row]), dtype=torch.bool).tril(len(history[row]) - count)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[:, -count:], key, value, attn_mask=mask, enable_gqa=True
            )
            found = out[first : first + count, : heads * dim]
            close(found, expected.transpose(0, 1).reshape(count, -1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 192, 200])
def test_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = random(5, width, dtype=dtype), random(width)
    out = spaced(x)
    run(OperationKind.NORM, 5, dtype, into=spaced(x), out=out, more=weight, k=width, number=1e-5)
    close(out[:5, :width], torch.nn.functional.rms_norm(x.float(), (width,), weight, 1e-5), dtype)


@pytest.mark.parametrize("width", [5, 16, 50, 1000])
def test_the_best_is_what_numpy_finds(width: int) -> None:
    assert KERNELS is not None
    logits = random(7, width).round()  # with equal ones
    logits[1] = -torch.inf
    logits[2, width // 2 :] = torch.nan
    logits[3, -1] = torch.inf
    logits[4, 0], logits[4, 1:] = -0.0, 0.0
    found = torch.full((7,), -1)
    operations = OperationList(1)
    operations.add(OperationKind.CHOOSE, into=logits, out=found, n=width)
    operations.run(KERNELS, StepArguments(selected=7), torch.float32)
    assert found.tolist() == [-1] * 7, "nobody wants to know"
    operations.run(KERNELS, StepArguments(selected=7, choose=1), torch.float32)
    assert found.tolist() == logits.numpy().argmax(axis=1).tolist()


def experts(count: int, hidden: int, width: int, dtype: torch.dtype, size: float = 1.0) -> Any:
    """A module of experts with random weights."""
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=width, num_experts=count)
    module = Qwen3MoeExperts(config).requires_grad_(requires_grad=False)
    module.gate_up_proj.data = random(count, 2 * width, hidden, dtype=dtype) * size
    module.down_proj.data = random(count, hidden, width, dtype=dtype) * size
    return module


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_with_biases_and_a_clipped_gate(dtype: torch.dtype) -> None:
    """Whose weights lie the other way round, gate and up side by side."""
    assert KERNELS is not None
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=64, intermediate_size=50, num_local_experts=5, swiglu_limit=2.0)
    module = GptOssExperts(config).requires_grad_(requires_grad=False)
    for weight in module.parameters():
        weight.data = (torch.randn(weight.shape) * 0.5).to(dtype)
    rows, counts = random(37, 64, dtype=dtype), [5, 0, 17, 14, 1]
    found = NativeExperts(KERNELS).compute(module, rows, counts)
    ids = torch.tensor([number for number, count in enumerate(counts) for _ in range(count)])
    expected = module.float()(rows.float(), ids[:, None], torch.ones(37, 1))
    close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_compute_each_row_with_its_own(dtype: torch.dtype) -> None:
    assert KERNELS is not None

    module = experts(5, 64, 48, dtype)
    rows, counts = random(37, 64, dtype=dtype) * 0.1, [5, 0, 17, 14, 1]
    ids = [number for number, count in enumerate(counts) for _ in range(count)]
    found = NativeExperts(KERNELS).compute(module, rows, counts)
    for row, number in enumerate(ids):
        gate, up = (module.gate_up_proj[number].float() @ rows[row].float()).chunk(2)
        expected = module.down_proj[number].float() @ (torch.nn.functional.silu(gate) * up)
        close(found[row], expected, dtype)


def test_packing_is_a_permutation() -> None:
    weight = torch.arange(48 * 6, dtype=torch.float32).view(48, 6)
    packed = panels(weight)
    assert packed.shape == (3, 6, 16, 1)
    assert packed[1, 4, 3, 0] == weight[16 + 3, 4]
    pairs = panels(weight.bfloat16())
    assert pairs.shape == (3, 3, 16, 2)
    assert pairs[2, 1, 5, 1] == weight.bfloat16()[32 + 5, 3]
    gate, up = gate_and_up(weight).chunk(2)
    assert gate.shape == up.shape == (2, 6, 16, 1), "24 outputs fill two panels"
    assert up[0, 0, 0, 0] == weight[24, 0]


# ---- a whole model


@pytest.fixture(scope="module", params=["mistral", "qwen2", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    info = read_model_info(directory)
    return load_model(info, ModelConfig(), dtype=torch.float32, device=torch.device("cpu"))


def program_of(
    model: LoadedModel,
    kind: type[P] = Program,  # type: ignore[assignment]
    kernels: library.KernelLibrary | None = KERNELS,
) -> P:
    assert kernels is not None
    program = kind(kernels, recognise(model.module, model.layers, model.dtype))
    program.use(NativeCache(model.layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=model.dtype))
    return program


def packed_rows(rows: list[tuple[int, int, int]]) -> tuple[PackedRows, np.ndarray]:
    """Rows (request, start, count), single tokens first; each request owns 8 blocks, in no order."""
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32).reshape(-1, 8)
    requests = np.array([request for request, _, _ in rows])
    starts = np.array([start for _, start, _ in rows])
    counts = np.array([count for _, _, count in rows])
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
    ids = (positions * 31 + np.repeat(requests, counts) * 7) % 300
    return PackedRows(starts, counts, blocks[requests], positions, int((counts == 1).sum())), ids


def everything(ids: np.ndarray) -> np.ndarray:
    return np.arange(len(ids))


SCENARIO = [
    [(0, 0, 40), (1, 0, 3), (2, 0, 17)],
    [(1, 3, 1), (0, 40, 30), (2, 17, 20)],
    [(0, 70, 1), (1, 4, 1), (2, 37, 1)],
]


def test_steps_equal_the_models_own(model: LoadedModel) -> None:
    program = program_of(model)
    own = TorchPagedAttention(
        model.layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    with torch.inference_mode():
        for rows in SCENARIO:
            packed, ids = packed_rows(rows)
            expected = model.module(
                input_ids=torch.from_numpy(ids)[None],
                position_ids=torch.from_numpy(packed.positions)[None],
                use_cache=False,
                **{PLAN_KEYWORD: own.plan(packed)},
            ).logits[0]
            found = program.forward(packed, ids, everything(ids))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_for_avx2_compute_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    """On a CPU that has more; elsewhere these are the kernels."""
    directory = make_tiny_model(tmp_path, "qwen3_moe")
    model = load_model(read_model_info(directory), ModelConfig(), dtype=dtype, device=torch.device("cpu"))
    narrow = library.opened("avx2")
    assert not narrow.has_avx512
    narrow.use_tiles(True)
    assert not narrow.has_tiles
    wide, other = program_of(model), program_of(model, kernels=narrow)
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        expected, found = (each.forward(packed, ids, everything(ids)) for each in (wide, other))
        spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
        assert ((found - expected).norm(dim=-1) / spread).median() <= TOLERANCE[dtype]


def test_a_row_does_not_depend_on_its_batch_or_chunks_or_threads(model: LoadedModel) -> None:
    together = program_of(model)
    last = None
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        last = together.forward(packed, ids, everything(ids)).clone()
    alone, threads = program_of(model), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for start, count in ((0, 64), (64, 6), (70, 1)):
            packed, ids = packed_rows([(0, start, count)])
            logits = alone.forward(packed, ids, everything(ids))
    finally:
        torch.set_num_threads(threads)
    assert last is not None
    assert torch.equal(logits[0], last[0]), "bit for bit"


def test_threads_that_lose_their_cores_change_nothing(model: LoadedModel) -> None:
    """More threads than cores, so that each is stopped anywhere.

    Some of the threads get no part of some steps.
    """
    program, threads = program_of(model), torch.get_num_threads()
    expected = []
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        expected.append(program.forward(packed, ids, everything(ids)).clone())
    crowded = program_of(model)
    torch.set_num_threads(7)
    try:
        for _ in range(20):
            for rows, logits in zip(SCENARIO, expected, strict=True):
                packed, ids = packed_rows(rows)
                assert torch.equal(crowded.forward(packed, ids, everything(ids)), logits)
    finally:
        torch.set_num_threads(threads)


def test_a_step_can_run_again(model: LoadedModel) -> None:
    program = program_of(model)
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        first = program.forward(packed, ids, everything(ids)).clone()
        assert torch.equal(program.forward(packed, ids, everything(ids)), first)
        assert program.choose(packed, ids, everything(ids)) == first.argmax(dim=1).tolist()


def test_what_is_wanted_changes_no_bits(model: LoadedModel) -> None:
    """The last layer goes on with those tokens alone.

    Of a part of a prompt, with none.
    """
    program, other = program_of(model), program_of(model)
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        logits = other.forward(packed, ids, everything(ids)).clone()
        ends = np.cumsum(packed.counts) - 1
        for wanted in (ends, ends[:0], ends[:1], ends[::-1], np.setdiff1d(everything(ids), ends[:2])):
            expected = logits[torch.tensor(wanted.tolist(), dtype=torch.int64)]
            assert torch.equal(program.forward(packed, ids, wanted), expected)
            assert program.choose(*packed_rows(rows), wanted) == expected.argmax(dim=1).tolist()


class Counted(Program):
    """A program that counts consecutive decode steps, and may refuse them."""

    refuses = False
    continued = 0

    def continue_rows(
        self, new_blocks: Mapping[int, Sequence[int]], rows: StateRows | None = None
    ) -> list[int] | None:
        tokens = None if self.refuses else super().continue_rows(new_blocks, rows)
        self.continued += tokens is not None
        return tokens


def test_steps_that_go_on_equal_those_that_are_packed(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes between them: requests that begin, leave, sample, or take another's slot.

    A step that runs twice; no room left in the tables or among the angles.
    """
    monkeypatch.setattr(cache_module, "SPARE_BLOCKS", 1)
    monkeypatch.setattr(position_tables, "MIN_POSITIONS", 16)
    monkeypatch.setattr(DecodeContinuation, "MOST", 7)
    programs = [program_of(model, Counted) for _ in range(3)]
    programs[1].refuses = True
    monkeypatch.setattr(programs[2], "can_choose", lambda *_: False)
    drivers = [
        Driver(ModelRunner(model, None, BLOCK_SIZE, each), BLOCK_SIZE, NUM_BLOCKS) for each in programs
    ]
    numbers, greedy = Random(3), {"temperature": 0.0}
    nucleus = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    kinds: list[dict[str, Any]] = [greedy, greedy, nucleus, {"min_p": 0.01}, {"presence_penalty": 0.5}]
    steps = 0
    for slot, kind in enumerate([*kinds, greedy]):  # the last one takes the first one's slot
        prompt = [numbers.randrange(3, 300) for _ in range(numbers.randrange(1, 40))]
        for driver in drivers:
            driver.add(prompt, SamplingParams(**kind), seed=slot, slot=slot % len(kinds))
    for turn in range(16):
        crowd = [place for place in range(6) if numbers.random() < 0.7]
        if turn < 8:
            crowd = [place for place in crowd if place < 5]
        else:
            crowd = [place for place in crowd if place > 0]
        if turn % 4:
            crowd = [place for place in crowd if place != 4]  # whose tokens are not chosen by the program
        for _ in range(numbers.randrange(1, 13) if crowd else 0):
            steps += 1
            for driver in drivers:
                asked = [driver.slots[place] for place in crowd]
                driver.step([(each, len(each.token_ids) - each.computed) for each in asked])
                if steps % 11 == 0:
                    again = driver.runner.run(driver.steps[-1])
                    assert again.tokens == [
                        next(each for each in asked if each.slot == slot).token_ids[-1]
                        for slot in driver.steps[-1].slots
                    ]
    assert steps / 2 < programs[0].continued < steps
    assert programs[1].continued == programs[2].continued == 0
    for one, *others in zip(*[driver.slots for driver in drivers], strict=True):
        assert len(one.output_ids) > 10
        assert [one.token_ids] * 2 == [other.token_ids for other in others]


def test_a_step_that_came_to_no_end_is_packed_when_it_runs_again(model: LoadedModel) -> None:
    program = program_of(model, Counted)
    driver = Driver(ModelRunner(model, None, BLOCK_SIZE, program), BLOCK_SIZE, NUM_BLOCKS)
    undisturbed = Driver(ModelRunner(model, None, BLOCK_SIZE, program_of(model)), BLOCK_SIZE, NUM_BLOCKS)
    pairs = [each.add([5, 6, 7], SamplingParams(temperature=0.0)) for each in (driver, undisturbed)]
    undisturbed.generate([pairs[1]], 8)
    driver.generate([pairs[0]], 4)
    before, run_list = program.continued, program._run

    def lost(*_: object) -> None:
        run_list(*_)  # type: ignore[arg-type]
        raise OSError("a peer is lost")

    program._run = lost  # type: ignore[method-assign]
    step = Step([], [0], [pairs[0].computed], [1])
    with pytest.raises(OSError, match="a peer"):
        driver.runner.run(step)
    program._run = run_list  # type: ignore[method-assign]
    assert program.continued == before > 0
    driver.generate([pairs[0]], 4)
    assert pairs[0].token_ids == pairs[1].token_ids
    assert program.continued == before + 3


def test_what_an_earlier_owner_left_in_a_block_is_not_seen(model: LoadedModel) -> None:
    clean, dirty = program_of(model), program_of(model)
    assert dirty._cache is not None
    for cached in (*dirty._cache.keys, *dirty._cache.values):
        cached.fill_(float("nan"))
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        expected = clean.forward(packed, ids, everything(ids)).clone()
        assert torch.equal(dirty.forward(packed, ids, everything(ids)), expected)


def test_a_model_of_another_kind_is_told_apart(tmp_path: Path) -> None:
    info = read_model_info(make_family(tmp_path, "bitnet"))
    model = load_model(info, ModelConfig(), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(NotRecognised, match="BitNetMLP has the parts"):
        recognise(model.module, model.layers, model.dtype)


def test_without_a_compiler_torch_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    library._load.cache_clear()
    try:
        assert library.load() is None
        assert "no C++ compiler was found" in caplog.text
    finally:
        library._load.cache_clear()


def test_weights_are_laid_out_where_there_is_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All but the embedding and the norms are, beside those that the model has.

    Without room torch serves, and the model keeps its own.
    """
    info = read_model_info(make_tiny_model(tmp_path, "qwen3_moe"))
    model = load_model(info, ModelConfig(), dtype=torch.float32, device=torch.device("cpu"))
    needed = bytes_for_program(model, BLOCK_SIZE)
    laid_out = [
        weight
        for name, weight in model.module.named_parameters()
        if "norm" not in name and "embed" not in name
    ]
    assert needed == sum(weight.nbytes for weight in laid_out) > 0
    monkeypatch.setattr(make, "available_memory", lambda: needed)
    assert bytes_for_program(model, BLOCK_SIZE) == 0, "the KV cache need not leave it any"
    with caplog.at_level("INFO"):
        assert make_program(model, BLOCK_SIZE) is None
    assert "native kernels: off, 0.0 GiB of weights are laid out anew" in caplog.text
    assert all(len(weight) for weight in laid_out)
    monkeypatch.setattr(make, "available_memory", lambda: 2 * needed)
    program = make_program(model, BLOCK_SIZE)
    assert program is not None
    assert needed <= program.weight_bytes < 2 * needed
    assert not any(len(weight) for weight in laid_out)
