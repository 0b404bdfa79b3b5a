"""The offline class without processes: arguments, parameters, prompts, order, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import enum
import os
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lockstep
from coordinator.messages import AdapterSource, LoadAdapter
from engine.messages import Delta, FinishReason
from engine.settings import resolve
from router.config import ServeConfig
from router.mesh import MeshError, NumericsSwitch, Prompt, ServedModel
from router.metrics.metrics import Metrics
from router.offline import llm as llm_module
from router.offline.config import llm_config
from router.offline.inputs import JobMaker
from router.offline.llm import LLM
from router.offline.mesh import EngineDeadError
from router.offline.outputs import RequestOutput
from router.offline.params import LoRARequest, SamplingParams
from router.offline.run import run_jobs
from router.text.text_model import TextModel
from tests.router.conftest import MAX_MODEL_LEN
from tests.router.fake_mesh import FakeMesh, failing, saying

# ---- arguments


def test_arguments_are_the_long_flags() -> None:
    config = llm_config(
        {
            "model": "m", "data_parallel_size": 2, "max_model_len": "1K", "dtype": "float32", "seed": 7,
            "max_num_seqs": None, "kv_cache_memory_bytes": "64M", "served_model_name": "a",
            "log_level": "error", "enable_prefix_caching": False,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        }
    )  # fmt: skip
    speculative = config.engine.scheduler.speculative
    assert speculative is not None
    assert speculative.num_speculative_tokens == 3
    assert config.mesh.data_parallel_size == 2
    assert config.engine.model.max_model_len == 1024
    assert config.engine.model.dtype == "float32"
    assert config.engine.model.served_model_name == ("a",)
    assert config.engine.scheduler.max_num_seqs == ServeConfig().engine.scheduler.max_num_seqs
    assert config.engine.cache.kv_cache_memory_bytes == 64 * 1024**2
    assert not config.engine.cache.enable_prefix_caching
    assert (config.http.seed, config.log_level) == (7, "error")
    assert llm_config({}).mesh.data_parallel_size == 1
    assert llm_config({"headless": True}).mesh.data_parallel_size is None


def test_a_dtype_of_torch_is_understood() -> None:
    torch = pytest.importorskip("torch")
    assert llm_config({"dtype": torch.bfloat16}).engine.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_modellen": 9}, TypeError, "unexpected keyword argument 'max_modellen'; did you mean 'max_model_len'"),
        ({"zzz": 1}, TypeError, "arguments are the long flags of `serve --help`"),
        ({"port": 1}, TypeError, "a setting of the HTTP endpoint"),
        ({"dtype": "int3"}, ValueError, "dtype must be one of auto, float32"),
        ({"max_num_seqs": "many"}, ValueError, "max_num_seqs must be a number"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs: Expected `int` >= 1"),
        ({"max_num_batched_tokens": 4}, ValueError, "max_num_batched_tokens 4 must be at least max_num_seqs 128"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization: Expected `float` <= 1"),
        ({"speculative_config": {"method": "eagle"}}, ValueError, "speculative_config: the method must be"),
        ({"speculative_config": {"method": print}}, ValueError, "speculative_config must be what JSON can hold"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, ValueError, "node_rank is 0 where LLM runs"),
        ({"data_parallel_address": "10.0.0.1"}, ValueError, "data_parallel_address 10.0.0.1 is not loopback"),
    ],
)  # fmt: skip
def test_wrong_arguments_start_nothing(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        LLM(**arguments)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="model 'nope' does not exist"):
        LLM("nope")


def test_a_tokenizer_that_is_not_there(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        LLM(tokenizer=str(tmp_path))


# ---- sampling parameters


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be a finite number at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature: Expected `float"),
        ({"temperature": None}, "temperature must not be None"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must be between 1 and"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"n": True}, "n: Expected `int"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 17}, r"min_tokens \(17\) must not exceed max_tokens \(16\)"),
        ({"stop": [""]}, "stop strings must not be empty"),
        ({"stop": 5}, "stop: Expected"),
        ({"stop_token_ids": [-1]}, "names token -1, but the vocabulary has ids from 0 on"),
        ({"logprobs": -2}, "logprobs must be at least 0, got -2"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"logit_bias": {1: 200}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"seed": 2**70}, "seed"),
        ({"stop": "x", "detokenize": False}, "stop needs detokenize"),
        ({"output_kind": 1}, "output_kind must be CUMULATIVE or FINAL_ONLY"),
        ({"extra_args": {"a": 1}}, "extra_args are not supported"),
    ],
)
def test_values_out_of_range_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


class OutputKind(enum.Enum):
    """As vLLM has it."""

    CUMULATIVE = 0
    FINAL_ONLY = 2


def test_what_asks_for_nothing_is_taken() -> None:
    for kind in (None, 0, 2, *OutputKind):
        assert SamplingParams(output_kind=kind, extra_args={}).max_tokens == 16
    assert SamplingParams(extra_args=None).clone() == SamplingParams()


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop_token_ids=[1], logit_bias={3: 1.0})
    copy = params.clone()
    assert copy == params
    assert copy.stop_token_ids is not params.stop_token_ids


# ---- the class over a scripted mesh


class ScriptedMesh:
    """Stands where :class:`router.offline.mesh.PrivateMesh` does, without processes."""

    mesh: FakeMesh

    def __init__(self, config: ServeConfig, settings: Any, *, port_is_free_choice: bool) -> None:
        self.config = config
        self.port_is_free_choice = port_is_free_choice
        self.client = self.mesh
        self.metrics = Metrics(self.mesh)
        self.is_alive = False
        self.loads: list[LoadAdapter] = []

    def load_adapter(self, wish: LoadAdapter) -> tuple[AdapterSource, ...]:
        self.loads.append(wish)
        return (AdapterSource(wish.name, wish.path, f"digest {len(self.loads)}"),)

    def start(self) -> None:
        self.is_alive = True

    def close(self, *, waits_for_others: bool = True) -> None:
        self.is_alive = False

    def dead(self) -> EngineDeadError:
        return EngineDeadError("this LLM is closed")

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


Make = Callable[..., LLM]


@pytest.fixture
def mesh() -> FakeMesh:
    info, settings = resolve(ServeConfig().engine)
    served = ServedModel(
        settings.served_model_name, info.directory, settings.vocab_size, settings.max_model_len
    )
    mesh = FakeMesh(served, saying([324, 367, 316]))
    return mesh


@pytest.fixture
def make_llm(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> Make:
    """LLMs in front of the scripted mesh.

    Everything asked of it must be closed at the end.
    """
    monkeypatch.setattr(ScriptedMesh, "mesh", mesh, raising=False)
    monkeypatch.setattr(llm_module, "PrivateMesh", ScriptedMesh)
    return LLM


def as_many_as_asked(prompt: Prompt) -> list[Delta]:
    """So many tokens, each a delta of its own: the fewer, the sooner it ends."""
    count = prompt.params.max_tokens or 0
    return [Delta(1, [5 + n], FinishReason.LENGTH if n == count - 1 else None) for n in range(count)]


def test_outputs_are_in_the_order_of_the_prompts(mesh: FakeMesh, make_llm: Make) -> None:
    mesh.reset(as_many_as_asked)
    ended: list[int] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            assert (total, desc) == (6, "Processed prompts")

        def update(self, count: int) -> None:
            ended.append(sum(generation.is_closed for generation in mesh.generations))

        def close(self) -> None:
            ended.append(-1)

    with make_llm() as llm:
        prompts = [[100 + index] for index in range(6)]
        params = [SamplingParams(max_tokens=12 - 2 * index) for index in range(6)]
        outputs = llm.generate(prompts, params, use_tqdm=Bar)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 10, 8, 6, 4, 2]
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4", "5"]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert ended == [1, 2, 3, 4, 5, 6, -1], "the shortest ended first, and the bar was closed"
    assert mesh.num_open == 0


def test_no_more_than_so_many_are_in_flight(mesh: FakeMesh, make_llm: Make) -> None:
    most = 0

    def counting(prompt: Prompt) -> Sequence[Delta]:
        nonlocal most
        most = max(most, mesh.num_open + 1)
        return as_many_as_asked(prompt)

    mesh.reset(counting)
    with make_llm(max_num_seqs=3) as llm:
        outputs = llm.generate([[9]] * 50, SamplingParams(max_tokens=2), use_tqdm=False)
        assert (len(outputs), most) == (50, 6), "twice what runs at once"
        most = 0
        llm.generate([[9]] * 10, SamplingParams(n=4, max_tokens=2), use_tqdm=False)
        assert most == 4, "at least one prompt, whatever its samples"


def test_an_adapter_with_a_directory_is_loaded_once(mesh: FakeMesh, make_llm: Make) -> None:
    poet, other = LoRARequest("poet", 1, "/adapters/poet"), LoRARequest("poet", 2, "/adapters/other")
    with make_llm(enable_lora=True) as llm:
        loads = llm._mesh.loads  # type: ignore[attr-defined]
        llm.generate(["a", "b"], use_tqdm=False, lora_request=[poet, None])
        llm.generate(["a"], use_tqdm=False, lora_request=poet)
        llm.generate(["a"], use_tqdm=False, lora_request=LoRARequest("poet"))
        assert [(each.name, each.path, each.in_place) for each in loads] == [("poet", poet.lora_path, False)]
        assert [prompt.adapter for prompt in mesh.prompts] == ["digest 1", "", "digest 1", "digest 1"]
        with pytest.raises(ValueError, match="is served from /adapters/poet, not from /adapters/other"):
            llm.generate(["a"], lora_request=other)
        llm.generate(["a"], use_tqdm=False, lora_request=msgspec.structs.replace(other, load_inplace=True))
        assert [each.in_place for each in loads] == [False, True]
        assert mesh.prompts[-1].adapter == "digest 2"
        with pytest.raises(ValueError, match="there is no adapter 'clerk'"):
            llm.generate(["a"], lora_request=LoRARequest("clerk"))


def test_adapters_that_are_not_served_are_refused(mesh: FakeMesh, make_llm: Make) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    with make_llm() as llm:
        outputs = llm.generate(["a", "b"], use_tqdm=False, lora_request=None)
        outputs += llm.chat(conversation, None, False, None)
        assert [output.metrics for output in outputs] == [None] * 3
        unknown = LoRARequest("poet", 1, "/adapters/poet")
        assert len(llm.generate(["a"], use_tqdm=False, lora_request=[None])) == 1
        for given in (unknown, [None, unknown]):
            with pytest.raises(ValueError, match="there is no adapter 'poet': LLM"):
                llm.generate(["a", "b"], lora_request=given)
        with pytest.raises(ValueError, match="there is no adapter 'poet': LLM"):
            llm.chat(conversation, lora_request=unknown)
        with pytest.raises(ValueError, match="there are 2 prompts, but lora_request has 1 entries"):
            llm.generate(["a", "b"], lora_request=[None])
        with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
            llm.generate(["a"], lora_request="poet")  # type: ignore[arg-type]


def test_kinds_of_prompts(mesh: FakeMesh, make_llm: Make) -> None:
    with make_llm() as llm:
        outputs = llm.generate(
            ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": [1, 2], "cache_salt": "s"}, [3, 4]],
            use_tqdm=False,
        )
        (single,) = llm.generate([7, 8], use_tqdm=False)
        (text,) = llm.generate("Hello", use_tqdm=False)
        assert llm.generate([]) == []
    hello = outputs[0].prompt_token_ids
    assert [output.prompt for output in outputs] == ["Hello", "Hello", None, None]
    assert [output.prompt_token_ids for output in outputs] == [hello, hello, [1, 2], [3, 4]]
    assert mesh.prompts[2].cache_salt == "s"
    assert (single.prompt_token_ids, text.prompt_token_ids) == ([7, 8], hello)


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        ("", ValueError, "The prompt is empty"),
        (["ok", ""], ValueError, r"prompts\[1\]: The prompt is empty"),
        ([[1, 2], [10**6]], ValueError, r"prompts\[1\]: Token id 1000000 is out of vocabulary"),
        ([[]], ValueError, "The prompt is empty"),
        ([[5] * 3000], ValueError, "maximum context length is 2048 tokens"),
        ({"multi_modal_data": 1}, ValueError, "'multi_modal_data' is not supported"),
        ({"cache_salt": "x"}, TypeError, "needs a text under 'prompt'"),
        (5, TypeError, "prompts must be a text"),
        ([[1, "a"]], TypeError, "a prompt must be a text, token ids"),
        ([None], TypeError, "a prompt must be a text, token ids"),
    ],
)
def test_wrong_prompts_generate_nothing(
    mesh: FakeMesh, make_llm: Make, prompts: Any, kind: type[Exception], message: str
) -> None:
    with make_llm() as llm, pytest.raises(kind, match=message):
        llm.generate(prompts, use_tqdm=False)
    assert mesh.generations == []


def test_parameters_and_priorities_per_prompt(mesh: FakeMesh, make_llm: Make) -> None:
    with make_llm() as llm:
        with pytest.raises(ValueError, match="there are 2 prompts, but sampling_params has 1 entries"):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
            llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="bad_words must not be empty"):
            llm.generate("a", SamplingParams(bad_words=[""]))
        with pytest.raises(ValueError, match="logprobs must be between 0 and 20"):
            llm.generate("a", SamplingParams(logprobs=21))
        llm.generate(["a", "b"], priority=[3, 4], use_tqdm=False)
    assert [prompt.priority for prompt in mesh.prompts] == [3, 4]


def test_defaults_of_the_model_count_only_without_parameters(mesh: FakeMesh, make_llm: Make) -> None:
    with make_llm() as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9)
        llm.generate("a", use_tqdm=False)
        llm.generate("a", SamplingParams(), use_tqdm=False)
    first, second = (prompt.params for prompt in mesh.prompts)
    assert (first.temperature, first.top_p, first.max_tokens) == (0.7, 0.9, 16)
    assert (second.temperature, second.top_p, second.max_tokens) == (1.0, 1.0, 16)


def test_seeds(mesh: FakeMesh, make_llm: Make) -> None:
    def seeds_of(**arguments: Any) -> list[tuple[int, int]]:
        mesh.generations.clear()
        with make_llm(**arguments) as llm:
            llm.generate(["a", "b"], [SamplingParams(n=2), SamplingParams(seed=5)], use_tqdm=False)
        return sorted((prompt.seed, prompt.sample_index) for prompt in mesh.prompts)

    default = seeds_of()
    assert default == seeds_of() == seeds_of(seed=0), "repeatable unless told otherwise"
    assert (5, 0) in default
    drawn = {seed for seed, _ in default if seed != 5}
    assert len(drawn) == 1, "the samples of a prompt share its seed and differ in their index"
    assert seeds_of(seed=1) != default
    assert seeds_of(seed=None) != seeds_of(seed=None)


def test_only_seeds_that_nobody_can_repeat_leave_the_class_open(mesh: FakeMesh, make_llm: Make) -> None:
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 5}, {"temperature": 1}]

    def repeatable(seed: int | None) -> list[bool]:
        mesh.generations.clear()
        with make_llm(seed=seed) as llm:
            llm.generate(["a"] * 3, [SamplingParams(**each) for each in asked], use_tqdm=False)
        return [prompt.repeatable for prompt in mesh.prompts]

    assert repeatable(0) == [True, True, True]
    assert repeatable(None) == [True, True, False]


def test_outputs_name_their_numerics_class_and_its_changes(mesh: FakeMesh, make_llm: Make) -> None:
    mesh.fingerprints.update({0: "fp_1", 1: "fp_2"})
    mesh.changes[1] = [NumericsSwitch(1, "fp_2", "fp_1"), NumericsSwitch(99, "fp_1", None)]
    with make_llm() as llm:
        (output,) = llm.generate([[9, 10]], SamplingParams(n=2), use_tqdm=False)
    assert [each.system_fingerprint for each in output.outputs] == ["fp_1", "fp_2"]
    assert [each.numerics_changes for each in output.outputs] == [[], [NumericsSwitch(1, "fp_2", "fp_1")]]


def test_logprobs_have_vllms_shape(mesh: FakeMesh, make_llm: Make) -> None:
    with make_llm() as llm:
        (output,) = llm.generate([[9, 10]], SamplingParams(logprobs=1, prompt_logprobs=0), use_tqdm=False)
    sample = output.outputs[0]
    assert sample.cumulative_logprob == -4.5
    assert sample.logprobs is not None
    assert [list(entry or {}) for entry in sample.logprobs] == [[324, 325], [367, 368], [316, 317]]
    own = (sample.logprobs[0] or {})[324]
    assert (own.logprob, own.rank, own.decoded_token) == (-1.5, 2, " it")
    assert output.prompt_logprobs is not None
    assert [entry and list(entry) for entry in output.prompt_logprobs] == [None, [10]]
    assert output.num_cached_tokens == 3


def test_answers_are_scored_behind_their_prompts(mesh: FakeMesh, make_llm: Make) -> None:
    with make_llm() as llm:
        scores = llm.score_tokens([[9], [9]], [[10], [10]])
        for prompts, answers, message in (
            ([[9]], [], "1 prompts have 0 answers"),
            ([[9], []], [[10], [10]], "at least one token"),
            ([[9]], [[]], "at least one token"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.score_tokens(prompts, answers)
    (logprob,) = {each for (each,) in scores}
    assert isinstance(logprob, float)
    assert {tuple(prompt.prompt_ids) for prompt in mesh.prompts} == {(9, 10)}
    assert {prompt.params.prompt_logprobs for prompt in mesh.prompts} == {0}


def test_what_was_cached_is_what_the_first_instance_had(mesh: FakeMesh, make_llm: Make) -> None:
    def script(prompt: Prompt) -> list[Delta]:
        more = len(prompt.prompt_ids) - 1
        return [Delta(1, [324]), Delta(1, [367], FinishReason.LENGTH, num_cached_tokens=more)]

    mesh.script = script
    with make_llm() as llm:
        (output,) = llm.generate([[9, 10, 11]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].token_ids == [324, 367]
    assert output.num_cached_tokens == 0


def test_text_and_stops(mesh: FakeMesh, make_llm: Make) -> None:
    with make_llm() as llm:
        stopped, silent, plain = llm.generate(
            [[9]] * 3,
            [SamplingParams(stop=" is"), SamplingParams(detokenize=False), SamplingParams()],
            use_tqdm=False,
        )
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == (" it", " is")
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].token_ids) == ("stop", [324, 367])
    assert (silent.outputs[0].text, silent.outputs[0].token_ids) == ("", [324, 367, 316])
    assert plain.outputs[0].text == " it is not"
    assert plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is plain.prompt_logprobs is None


def test_chat(mesh: FakeMesh, make_llm: Make) -> None:
    question = [{"role": "user", "content": "Who?"}]
    with make_llm() as llm:
        (one,) = llm.chat(question, SamplingParams(logprobs=0), use_tqdm=False)
        assert len(llm.chat([question, question], use_tqdm=False)) == 2
        (own,) = llm.chat(
            question,
            use_tqdm=False,
            chat_template="{% for m in messages %}[{{ m.content }}{{ mark }}]{% endfor %}",
            chat_template_kwargs={"mark": "!"},
            add_generation_prompt=False,
        )
        (again,) = llm.generate(one.prompt or "", use_tqdm=False)
        assert again.prompt_token_ids == one.prompt_token_ids
        for wrong, kind in ((["x"], TypeError), ([], ValueError), ([{"content": "x"}], ValueError)):
            with pytest.raises(kind):
                llm.chat(wrong, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="chat template"):
            llm.chat(question, chat_template="{% for %}")
    assert one.prompt == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert one.outputs[0].logprobs is not None
    assert own.prompt == "[Who?!]"


def test_a_closed_llm_says_so(make_llm: Make) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")


def test_a_port_that_others_know_is_not_chosen_freely(make_llm: Make) -> None:
    for llm, is_free in (make_llm(), True), (make_llm(data_parallel_rpc_port=29999), False):
        assert isinstance(llm._mesh, ScriptedMesh)
        assert llm._mesh.port_is_free_choice is is_free


@pytest.mark.parametrize("asked", [None, True, False])
def test_experts_are_spread_as_asked(make_llm: Make, asked: bool | None) -> None:
    llm = make_llm(data_parallel_size=2, enable_expert_parallel=asked)
    assert isinstance(llm._mesh, ScriptedMesh)
    assert llm._mesh.config.engine.device.enable_expert_parallel is asked


# ---- running


def jobs_of(model: TextModel, *params: SamplingParams, length: int = 3) -> list[Any]:
    maker = JobMaker(model, 20, random.Random(0))
    return [maker.from_prompt(str(index), [9] * length, one, 0) for index, one in enumerate(params)]


async def outputs_of(mesh: FakeMesh, model: TextModel, jobs: list[Any]) -> list[RequestOutput]:
    return await run_jobs(mesh, Metrics(mesh), model.tokenizer, jobs, 8, lambda _output: None)


def test_the_context_ends_a_generation(served: ServedModel, text_model: TextModel) -> None:
    mesh = FakeMesh(served, as_many_as_asked)
    jobs = jobs_of(
        text_model,
        SamplingParams(max_tokens=None),
        SamplingParams(max_tokens=500, min_tokens=400),
        length=MAX_MODEL_LEN - 5,
    )
    outputs = asyncio.run(outputs_of(mesh, text_model, jobs))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    assert [prompt.params.min_tokens for prompt in mesh.prompts] == [0, 5]


@pytest.mark.parametrize("max_tokens", [None, MAX_MODEL_LEN, 2 * MAX_MODEL_LEN])
def test_a_prompt_is_truncated_to_what_fits(text_model: TextModel, max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=-1)
    (job,) = jobs_of(text_model, params, length=MAX_MODEL_LEN + 5)
    (sample,) = job.samples
    assert (len(sample.prompt.prompt_ids), sample.prompt.params.max_tokens) == (MAX_MODEL_LEN - 1, 1)


def test_a_failure_ends_all_and_leaves_nothing(served: ServedModel, text_model: TextModel) -> None:
    def script(prompt: Prompt) -> Sequence[Delta]:
        return (
            failing("no memory")(prompt) if prompt.request_id == "2" else [Delta(1, [5])]
        )  # the others hang

    mesh = FakeMesh(served, script)
    with pytest.raises(ValueError, match=r"prompts\[2\]: no memory"):
        asyncio.run(outputs_of(mesh, text_model, jobs_of(text_model, *[SamplingParams()] * 4)))
    assert len(mesh.generations) >= 3
    assert mesh.num_open == 0


def test_a_refusal_names_the_prompt(served: ServedModel, text_model: TextModel) -> None:
    mesh = FakeMesh(served, saying([5]))
    mesh.refusal, mesh.refuse_after = (
        MeshError(400, "BadRequestError", "needs more KV blocks than there are"),
        1,
    )
    with pytest.raises(ValueError, match=r"prompts\[1\]: needs more KV"):
        asyncio.run(outputs_of(mesh, text_model, jobs_of(text_model, *[SamplingParams()] * 2)))
    assert mesh.num_open == 0


def test_prompts_wait_for_an_instance(served: ServedModel, text_model: TextModel) -> None:
    mesh = FakeMesh(served, saying([5]))
    mesh.healthy = False

    async def run() -> list[RequestOutput]:
        running = asyncio.create_task(outputs_of(mesh, text_model, jobs_of(text_model, SamplingParams())))
        await asyncio.sleep(0.2)
        assert mesh.generations == []
        mesh.healthy = True
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(run())[0].outputs[0].token_ids == [5]


def test_cancelled_it_aborts(served: ServedModel, text_model: TextModel) -> None:
    mesh = FakeMesh(served, lambda _prompt: [Delta(1, [5])])

    async def run() -> None:
        running = asyncio.create_task(
            outputs_of(mesh, text_model, jobs_of(text_model, *[SamplingParams()] * 3))
        )
        await asyncio.sleep(0.1)
        assert mesh.num_open == 3
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert mesh.num_open == 0


# ---- the module that users import


def test_importing_lockstep_loads_nothing() -> None:
    code = (
        "import sys, lockstep\n"
        "assert not {'router', 'zmq', 'torch', 'transformers'} & set(sys.modules)\n"
        "from lockstep import LLM, SamplingParams\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["router", "engine"])
def test_who_stands_in_the_way_of_our_packages_is_named(name: str, tmp_path: Path) -> None:
    other = tmp_path / f"{name}.py"
    other.write_text("raise SystemExit('this is not ours')\n")
    program = tmp_path / "program.py"
    program.write_text("from lockstep import LLM\n")
    root = str(Path(lockstep.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": root},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert f"ImportError: {other} stands in the way of Lockstep's package {name!r}" in done.stderr


def test_lockstep_has_what_it_says() -> None:
    assert set(lockstep.__all__) == set(dir(lockstep)) == set(lockstep._HOMES)
    own = {
        "Logprob": "PromptLogprob",
        "PoolingParams": "PooledParams",
        "StructuredOutputsParams": "StructuredOutputs",
    }
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__name__ == own.get(name, name)
    assert lockstep.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lockstep.nothing
