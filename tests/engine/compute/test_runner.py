"""The runner against transformers' generate, over all families, and the properties of a step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import make_attention
from engine.attention.transfer import upload
from engine.compute import token_rules
from engine.compute.logits_backend import SampleRow
from engine.compute.runner import ModelRunner
from engine.compute.sampler import Sampler
from engine.compute.token_rules import TokenRules
from engine.config import ModelConfig
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from engine.sampling import SamplingParams
from engine.step import Admit, Step
from tests.engine.driver import Driven, Driver
from tests.engine.tiny_models import FAMILIES, VOCAB, make_tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 256
NUM_NEW = 12
LENGTHS = (5, 29, 17, 1)
GREEDY = SamplingParams(temperature=0.0, logprobs=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def load(directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedModel:
    info = read_model_info(directory)
    return load_model(info, ModelConfig(model=str(directory)), dtype=dtype, device=torch.device(device))


def make_driver(model: LoadedModel, seed: int = 0) -> Driver:
    cache = make_attention(
        model.layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    return Driver(ModelRunner(model, cache, BLOCK_SIZE), BLOCK_SIZE, NUM_BLOCKS, seed)


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@dataclass
class Expected:
    output_ids: list[int]
    logprobs: torch.Tensor
    """[new tokens, vocabulary]"""
    prompt_logprobs: torch.Tensor
    """[prompt tokens, vocabulary], of the token after each."""


def generate(model: Any, prompt: list[int]) -> Expected:
    """The tokens of transformers with its own attention and cache."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt_logits = model(ids).logits[0]
    return Expected(
        output.sequences[0, len(prompt) :].tolist(),
        torch.cat(output.logits).log_softmax(-1),
        prompt_logits.log_softmax(-1),
    )


def check_output(request: Driven, expected: Expected) -> None:
    assert request.output_ids == expected.output_ids
    assert len(request.logprobs) == NUM_NEW
    for entry, logprobs in zip(request.logprobs, expected.logprobs, strict=True):
        best, best_ids = logprobs.topk(4)
        assert entry.token_id == best_ids[0]
        assert entry.rank == 1
        assert entry.top_ids == best_ids.tolist()
        assert entry.top_logprobs == pytest.approx(best.tolist(), abs=2e-4)
        assert entry.logprob == entry.top_logprobs[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_runner_equals_generate(family: str, directories: dict[str, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directories[family], attn_implementation="eager")
    prompts = make_prompts()
    expected = [generate(reference, prompt) for prompt in prompts]
    model = load(directories[family])

    for prompt, answer in zip(prompts, expected, strict=True):  # one shot, alone
        driver = make_driver(model)
        request = driver.add(prompt, GREEDY)
        driver.generate([request], NUM_NEW)
        check_output(request, answer)

    for chunk, together in ((1 << 30, True), (7, True), (3, False), (1, False)):
        driver = make_driver(model, seed=chunk)
        requests = [driver.add(prompt, GREEDY) for prompt in prompts]
        driver.generate(requests, NUM_NEW, chunk=chunk, together=together)
        for request, answer in zip(requests, expected, strict=True):
            check_output(request, answer)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("chunk", [1 << 30, 8, 1])
def test_prompt_logprobs(family: str, chunk: int, directories: dict[str, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directories[family], attn_implementation="eager")
    driver = make_driver(load(directories[family]))
    prompts = make_prompts((21, 9))
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    requests = [driver.add(prompts[0], params), driver.add(prompts[1], GREEDY)]
    driver.generate(requests, 3, chunk=chunk)
    assert requests[0].logprobs == []
    assert requests[1].prompt_logprobs == []
    logprobs = generate(reference, prompts[0]).prompt_logprobs
    entries = requests[0].prompt_logprobs
    assert [entry.token_id for entry in entries] == prompts[0][1:]
    for entry, line in zip(entries, logprobs, strict=False):
        assert entry.logprob == pytest.approx(line[entry.token_id].item(), abs=2e-4)
        assert entry.rank == int((line > line[entry.token_id]).sum()) + 1
        assert entry.top_ids == line.topk(2).indices.tolist()
        assert entry.top_logprobs == pytest.approx(line.topk(2).values.tolist(), abs=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_cpu(family: str, directories: dict[str, Path]) -> None:
    params = [GREEDY, *sampled_params()[1:]]
    outputs = []
    for device in ("cpu", "cuda"):
        driver = make_driver(load(directories[family], device=device))
        requests = [
            driver.add(prompt, each, seed=5) for prompt, each in zip(make_prompts(), params, strict=True)
        ]
        driver.generate(requests, NUM_NEW, chunk=7)
        outputs.append([request.output_ids for request in requests])
    assert outputs[0] == outputs[1]


def sampled_params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.8, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.3),
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_sampled_stream_is_the_same_alone_and_in_any_batch(
    family: str, directories: dict[str, Path]
) -> None:
    model = load(directories[family])
    prompts = make_prompts()
    alone = []
    for index, (prompt, params) in enumerate(zip(prompts, sampled_params(), strict=True)):
        driver = make_driver(model, seed=index)
        request = driver.add(prompt, params, seed=-1000 - index)
        driver.generate([request], 40)
        alone.append(request.output_ids)
    assert len({tuple(output[:5]) for output in alone}) == len(alone)
    for chunk in (1 << 30, 5):
        driver = make_driver(model, seed=99)
        requests = [
            driver.add(prompt, params, seed=-1000 - index)
            for index, (prompt, params) in enumerate(zip(prompts, sampled_params(), strict=True))
        ]
        driver.generate(requests, 40, chunk=chunk)
        assert [request.output_ids for request in requests] == alone


def test_a_resumed_stream_goes_on_as_if_undisturbed(directories: dict[str, Path]) -> None:
    model = load(directories["llama"])
    for prompt, params in zip(make_prompts(), sampled_params(), strict=True):
        driver = make_driver(model)
        whole = driver.add(prompt, params, seed=7)
        driver.generate([whole], 30)
        driver = make_driver(model, seed=1)
        resumed = driver.add(prompt, params, seed=7, output=tuple(whole.output_ids[:11]))
        driver.generate([resumed], 19)
        assert resumed.token_ids == whole.token_ids


def test_a_step_can_be_run_again(directories: dict[str, Path]) -> None:
    """Every step runs three times: results and stream stay as if it ran once."""
    model = load(directories["gpt_oss"])
    params = [SamplingParams(temperature=0.8, logprobs=2), SamplingParams(temperature=0.0, prompt_logprobs=1)]
    prompts = make_prompts((19, 6))
    plain = make_driver(model)
    expected = [plain.add(prompt, each, seed=3) for prompt, each in zip(prompts, params, strict=True)]
    plain.generate(expected, 10, chunk=5)

    driver = make_driver(model)
    for step in plain.steps:
        results = [driver.runner.run(step) for _ in range(3)]
        assert results[0] == results[1] == results[2]
    again = make_driver(model)
    outputs: dict[int, list[int]] = {0: [], 1: []}
    for step in plain.steps:
        again.runner.run(step)
        for slot, token in zip(step.slots, again.runner.run(step).tokens, strict=True):
            if token is not None:
                outputs[slot].append(token)
    assert outputs == {request.slot: request.output_ids for request in expected}


def test_a_slot_is_reused_and_blocks_may_be_shared(directories: dict[str, Path]) -> None:
    """Prefix cache: a second request starts behind the blocks that the first has computed."""
    model = load(directories["llama"])
    prompt = make_prompts((22,))[0]
    driver = make_driver(model)
    first = driver.add(prompt, GREEDY)
    driver.generate([first], 6)
    table = [block for step in driver.steps for blocks in step.new_blocks.values() for block in blocks]
    shared = 5  # blocks, 20 tokens
    fresh = [driver.free.pop() for _ in range(3)]
    admit = Admit(0, prompt, len(prompt), SamplingParams(temperature=0.0), 0, ())
    step = Step([admit], [0], [shared * BLOCK_SIZE], [2], {0: [*table[:shared], *fresh]})
    output = [driver.runner.run(step).tokens[0]]
    for position in range(len(prompt), len(prompt) + 5):
        output.append(driver.runner.run(Step([], [0], [position], [1])).tokens[0])
    assert output == first.output_ids


def test_a_slot_is_taken_over_at_the_position_where_it_stood(directories: dict[str, Path]) -> None:
    """Another request's first row begins where the previous one's last row did."""
    driver = make_driver(load(directories["llama"]))
    old, other = (driver.add(prompt, GREEDY) for prompt in make_prompts((22, 22)))
    driver.generate([old, other], 3)
    table = [
        block
        for step in driver.steps
        for row, blocks in step.new_blocks.items()
        if step.slots[row] == other.slot
        for block in blocks
    ]
    position = driver.steps[-1].starts[0]
    tokens = other.token_ids[: position + 1]
    admit = Admit(old.slot, tokens, len(tokens), SamplingParams(temperature=0.0), 0, ())
    step = Step([admit], [old.slot], [position], [1], {0: [*table, driver.free.pop()]})
    assert driver.runner.run(step).tokens[0] == other.token_ids[position + 1]


def test_penalties_see_all_tokens_so_far(directories: dict[str, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directories["qwen2"], attn_implementation="eager")
    driver = make_driver(load(directories["qwen2"]))
    params = SamplingParams(temperature=0.0, repetition_penalty=2.5)
    plain = SamplingParams(temperature=0.0)
    prompts = make_prompts((7, 20))
    requests = [driver.add(prompt, params) for prompt in prompts]
    unpenalised = [driver.add(prompt, plain) for prompt in prompts]
    driver.generate([*requests, *unpenalised], 30)
    for request, free in zip(requests, unpenalised, strict=True):
        expected = reference.generate(
            torch.tensor([request.token_ids[: request.num_prompt]]),
            attention_mask=torch.ones(1, request.num_prompt, dtype=torch.int64),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
            repetition_penalty=2.5,
        )[0, request.num_prompt :].tolist()
        assert request.output_ids == expected
        assert request.output_ids != free.output_ids


def test_a_draw_is_a_function_of_seed_and_position(directories: dict[str, Path]) -> None:
    """The number that chooses the token at position p depends on p.

    It depends neither on the step nor on the slot.
    """
    driver = make_driver(load(directories["llama"]))
    prompt = make_prompts((9,))[0]
    request = driver.add(prompt, SamplingParams(temperature=1.0), seed=11, slot=6)
    driver.step([(request, 9)])
    reference = AutoModelForCausalLM.from_pretrained(directories["llama"], attn_implementation="eager")
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1:]
    row = SampleRow(SamplingParams(), 11, 9, np.array(prompt), 9, TokenRules(SamplingParams()))
    assert request.output_ids == Sampler(logits.device).sample(logits, [row]).tolist()


def test_what_a_request_says_of_tokens_is_made_once(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token rules are prepared once, not in every step.

    A list of allowed tokens may be as long as the vocabulary.
    """
    made = []

    def note(array: Any, device: torch.device) -> torch.Tensor:
        made.append(array)
        return upload(array, device)

    monkeypatch.setattr(token_rules, "upload", note)
    driver = make_driver(load(directories["llama"]))
    params = SamplingParams(
        temperature=0.0,
        allowed_token_ids=(*range(0, VOCAB, 3),),
        logit_bias={9: 5.0, 10: 50.0},
        bad_words=((12,), (9, 9)),
        min_tokens=2,
    )
    request = driver.add(make_prompts((9,))[0], params)
    for count in (9, 1):
        driver.step([(request, count)], stop_ids=(9,))
    assert request.output_ids[-1] % 3 == 0
    count = len(made)
    assert count > 0
    driver.generate([request], 4)
    assert len(made) == count


def test_many_slots_and_long_contexts(directories: dict[str, Path]) -> None:
    """Tables grow; rows of very different lengths decode together."""
    model = load(directories["qwen2"])
    lengths = (3, 300, 4, 150, 2, 60, 9)
    prompts = make_prompts(lengths, seed=5)
    alone = []
    for prompt in prompts:
        driver = make_driver(model)
        request = driver.add(prompt, GREEDY, slot=40)
        driver.generate([request], 6)
        alone.append(request.output_ids)
    driver = make_driver(model)
    requests = [driver.add(prompt, GREEDY, slot=3 * index) for index, prompt in enumerate(prompts)]
    driver.generate(requests, 6)
    assert [request.output_ids for request in requests] == alone


def test_a_step_without_rows_admits_only(directories: dict[str, Path]) -> None:
    driver = make_driver(load(directories["llama"]))
    assert driver.runner.run(Step()).tokens == []
    assert "slots=0" in repr(driver.runner)


def test_sixteen_bit_runs(directories: dict[str, Path]) -> None:
    for family in ("llama", "gpt_oss", "deepseek_v3"):
        driver = make_driver(load(directories[family], torch.bfloat16))
        requests = [driver.add(prompt, GREEDY) for prompt in make_prompts()]
        driver.generate(requests, 4)
        assert all(len(request.output_ids) == 4 for request in requests)
