"""Families on the native kernels: transformers' tokens, and bits of each request alone.

For each push some families run in some layouts, at night all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import replace

from engine.config import DeviceConfig, EngineConfig, ModelConfig
from engine.executor import uni
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.kernels.make import make_program
from engine.kernels.products import packing
from engine.kernels.program import Program
from engine.messages import Submit
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.weights import _fix_rope_scaling
from engine.sampling import SamplingParams
from engine.settings import resolve
from tests.engine.compute.test_exactness import SHARED, prompts
from tests.engine.greedy import greedy_outputs
from tests.engine.invariance.answers import ALONE, How, Instance
from tests.engine.invariance.answers import load as load_instance
from tests.engine.invariance.answers import settings as in_bfloat16
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.invariance.spread import in_shared_memory
from tests.engine.kernels.test_kernels import SCENARIO, everything, packed_rows, program_of
from tests.engine.kernels.test_native_trial import load
from tests.engine.model.sharding.test_sharding import LAYOUTS, NUM_IN_TABLE, greedy, run, settings, shards
from tests.engine.native_families import CONTEXT, MIXTURES, NATIVE, ORIGINAL, WIDTH_OF_TWO, make_family
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import VOCAB, make_tiny_model
from tests.nightly import NIGHTLY
from tests.router.tiny_tokenizer import byte_level

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

BLOCK_SIZE = 16
DENSE = [family for family in NATIVE if "moe" not in family and family not in ("mixtral", *MIXTURES)]
EACH_PUSH = [
    "gated_attention",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi4_mini",
    "glm4",
    "olmo2",
    "cohere2",
    "granite",
    "gpt2",
]
"""Families that have all operations between them."""
SHAPES = ["tp2", "pp2"]
SOME_SHAPES = [("gemma2", "tp2"), ("phi4_mini", "tp2"), ("cohere2", "pp2")]
UNSPLIT = {"gemma4_small"}
"""Families that no stages take: all layers have inputs from a second embedding."""
NUM_REQUESTS, NUM_MIXED = (32, 48) if NIGHTLY else (NUM_IN_TABLE, 16)
"""Greedy requests in float32, and mixed ones in bfloat16."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny model."""
    return cache(lambda family: make_family(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def references(directories: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """The tokens that transformers generates for each prompt alone."""

    def made(family: str) -> list[list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directories(family), dtype=torch.float32, attn_implementation="eager"
        )
        # An instance has one scaling of rotary angles for all lengths.
        _fix_rope_scaling(model, read_model_info(directories(family)).context_length)
        lengths = [int(params.max_tokens or 0) for params in greedy()[:NUM_REQUESTS]]
        return greedy_outputs(model, prompts()[:NUM_REQUESTS], lengths)

    return cache(made)


@pytest.mark.parametrize("family", DENSE if NIGHTLY else EACH_PUSH)
def test_tokens_are_those_of_transformers(
    family: str, directories: Callable[[str], Path], references: Callable[[str], list[list[int]]]
) -> None:
    """With so little room that prompts are cut, requests preempted and prefixes found."""
    directory = directories(family)
    alone = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    params = greedy()[:NUM_REQUESTS]
    outputs, counters = run(alone, directory, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)
    assert alone._program is not None
    assert outputs == references(family)
    assert counters.preemptions > 0
    assert counters.prefix_cache_hits > 0


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("family", DENSE if NIGHTLY else ["gemma3", "glm4", "gpt2"])
def test_shards_compute_the_same(
    family: str,
    layout: str,
    directories: Callable[[str], Path],
    references: Callable[[str], list[list[int]]],
) -> None:
    if family in UNSPLIT and layout == "pp2":
        pytest.skip("its layers are not split into stages")
    directory = directories(family)
    executor = shards(directory, LAYOUTS[layout], BLOCK_SIZE)
    try:
        params = greedy()[:NUM_REQUESTS]
        outputs, _ = run(executor, directory, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)
        assert outputs == references(family)
        assert all(worker.executor._program is not None for worker in executor.workers)
    finally:
        executor.close()


@pytest.mark.parametrize("family", DENSE if NIGHTLY else EACH_PUSH)
def test_bits_are_those_of_each_request_alone(family: str, directories: Callable[[str], Path]) -> None:
    """In bfloat16, whatever runs beside a request and however it is cut."""
    directory = directories(family)
    byte_level().save(str(directory / "tokenizer.json"))
    instance = load_instance(directory)
    submits = requests(7, vocab_size=VOCAB, count=NUM_MIXED, longest=60, most=20)
    instance.check_in_company(submits, instance.answers(submits, ALONE)[0])


class Alone:
    """A family's answers to requests that are alone.

    Two ranks have whole parts of its MLPs.
    """

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = make_family(directory, family, width=WIDTH_OF_TWO)
        byte_level().save(str(directory / "tokenizer.json"))
        self.submits = requests(7, vocab_size=VOCAB, count=NUM_MIXED, longest=60, most=20)
        self.answers = load_instance(directory).answers(self.submits, ALONE)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    return cache(lambda family: Alone(tmp_path_factory.mktemp(family), family))


@pytest.mark.parametrize(
    ("family", "layout"), [(each, layout) for each in DENSE for layout in SHAPES] if NIGHTLY else SOME_SHAPES
)
def test_bits_of_shards_are_those_of_each_request_alone(
    family: str, layout: str, alone: Callable[[str], Alone]
) -> None:
    """In bfloat16, at two ranks and at two stages."""
    if family in UNSPLIT and layout == "pp2":
        pytest.skip("its layers are not split into stages")
    expected, shape = alone(family), LAYOUTS[layout]
    group = {"group": in_shared_memory} if layout == "tp2" else {}
    info = read_model_info(expected.directory)
    executor = ThreadedShards(in_bfloat16(expected.directory), info, tp=shape.tp, pp=shape.pp, **group)
    try:
        executor.load(lambda _phase: None)
        Instance(expected.directory, executor).check_in_company(expected.submits, expected.answers)
        programs = [worker.executor._program for worker in executor.workers]
        assert all(program is not None and program.is_order_fixed for program in programs)
    finally:
        executor.close()


@pytest.mark.parametrize("family", ["phi4_mini", "llama_longrope"] if NIGHTLY else ["phi4_mini"])
@pytest.mark.parametrize("longest", [ORIGINAL, CONTEXT])
def test_angles_are_those_of_the_longest_request(
    longest: int,
    family: str,
    directories: Callable[[str], Path],
    references: Callable[[str], list[list[int]]],
) -> None:
    """Up to the original context, and past it, they are those that ``generate`` chooses.

    Short requests have other tokens where longer ones are served.
    """
    directory, is_short = directories(family), longest == ORIGINAL
    texts, count = prompts()[:NUM_REQUESTS], 8
    if not is_short:
        texts, count = [SHARED * 4 + text for text in texts], 24
    submits = [
        Submit(
            request=index,
            request_id=str(index),
            prompt_ids=text,
            params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
            seed=0,
        )
        for index, text in enumerate(texts)
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    generated = greedy_outputs(model, texts, [count] * len(texts))
    config = in_bfloat16(directory, dtype="float32")
    config = replace(config, model=replace(config.model, max_model_len=longest))
    executor = UniExecutor(config, read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    assert executor._program is not None
    instance = Instance(directory, executor)
    found, counters = instance.answers(submits, How(budget=48, cache=longest_of(submits) // 16 * 16 + 32))
    assert [found[index].token_ids for index in range(len(texts))] == generated
    assert counters.preemptions > 0
    assert counters.prefix_cache_hits > 0
    if is_short:
        usual = [each[:8] for each in references(family)]
        assert usual != [each[: len(one)] for each, one in zip(generated, usual, strict=True)]


def test_a_token_takes_room_for_its_latents_or_is_refused(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would need more room than the cache was given."""
    directory = directories("deepseek_v3")

    def loaded() -> tuple[UniExecutor, int]:
        executor = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
        return executor, executor.load(lambda _phase: None).kv.bytes_per_token

    executor, latents = loaded()
    assert latents == 3 * 4 * (16 + 64 + 64)
    with monkeypatch.context() as without:
        without.setattr(library, "load", lambda: None)
        assert loaded()[1] == 3 * 4 * 16 * (32 + 32)
    monkeypatch.setattr(uni, "make_program", lambda *_: None)
    with pytest.raises(CheckpointError, match="set LOCKSTEP_NATIVE_KERNELS=0"):
        executor.allocate(8)


def test_a_checkpoint_in_float16_is_computed_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which holds all its numbers; ``--dtype`` chooses another type."""
    directory = make_tiny_model(tmp_path, "llama", dtype=torch.float16)
    config = EngineConfig(model=ModelConfig(model=str(directory)), device=DeviceConfig(device="cpu"))
    with caplog.at_level("INFO"):
        info, resolved = resolve(config)
    assert (info.dtype, resolved.dtype) == ("float16", "float32")
    assert "a checkpoint in float16 is computed in float32 on this CPU" in caplog.text
    executor = UniExecutor(config, info, 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    assert executor._program is not None
    for asked in ("float16", "bfloat16"):
        chosen = EngineConfig(
            model=ModelConfig(model=str(directory), dtype=asked), device=DeviceConfig(device="cpu")
        )
        assert resolve(chosen)[1].dtype == asked


@pytest.mark.parametrize("avx2", [False, True])
def test_weights_in_float16_are_kept_and_give_the_bits_of_float32(
    avx2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one row and for many, in dense layers and experts."""
    kernels = library.opened("avx2") if avx2 else library.load()
    directory = make_tiny_model(tmp_path, "qwen3_moe", dtype=torch.float16, moe_intermediate_size=64)
    found, sizes = [], []
    for are_kept in (True, False):
        if not are_kept:
            monkeypatch.setattr(packing, "halves", lambda *_: None)
        program = program_of(load(directory, torch.float32), kernels=kernels)
        sizes.append((program.weight_bytes, program.half_bytes))
        with torch.inference_mode():
            for rows in SCENARIO:
                packed, ids = packed_rows(rows)
                found.append(program.forward(packed, ids, everything(ids)).clone())
    steps = len(SCENARIO)
    assert all(map(torch.equal, found[:steps], found[steps:]))
    assert sizes == [(sizes[1][0] // 2, sizes[1][0] // 2), (sizes[1][0], 0)]


@pytest.mark.each_push
def test_the_kernels_for_avx2_know_all_operations(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = library.opened("avx2")
    monkeypatch.setattr(library, "load", lambda: narrow)
    for family in DENSE if NIGHTLY else [*EACH_PUSH, "starcoder2", "arcee", "apertus"]:
        for dtype in (torch.float32, torch.bfloat16):
            program = make_program(load(directories(family), dtype), BLOCK_SIZE)
            assert isinstance(program, Program), family
            assert program.kind == "avx2"
