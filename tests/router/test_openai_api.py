"""From bodies to what the mesh is asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.sampling import SamplingParams
from router.api.headers import RequestTerms
from router.api.parameters import sampling_params
from router.api.prompts import chat_prompt, completion_prompts
from router.api.request_samples import MAX_PROMPT_LOGPROBS, MAX_SAMPLES, make_samples
from router.api.understanding import Understood
from router.api.validation import check
from router.config import HttpConfig
from router.errors import ApiError
from router.http.body import decoder
from router.launcher.preflight import defaults_problem, template_problem
from router.mesh import Prompt, ServedModel
from router.openai_api import ChatRequest, CompletionRequest
from router.text.output_stream import OutputStream
from router.text.prompt_text import PromptText
from router.text.text_model import TextModel, load_text_model
from router.text.tokens import TokenizerError
from router.turns.turn_format import TurnFormat
from tests.router import tiny_tokenizer
from tests.router.conftest import MAX_MODEL_LEN, VOCAB_SIZE
from tests.router.tiny_tokenizer import BOS

WITH_TOOLS = HttpConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
USER = [{"role": "user", "content": "Hello"}]

read_completion = decoder(CompletionRequest)
read_chat = decoder(ChatRequest)


def samples_of(
    request: ChatRequest | CompletionRequest,
    model: TextModel,
    params: SamplingParams,
    prompts: list[PromptText],
    **settings: bool,
) -> list[OutputStream]:
    understood = Understood(request, model, params, prompts, TurnFormat(request, WITH_TOOLS))
    return make_samples(understood, RequestTerms(id="id"), **settings)


def completion(model: TextModel, max_logprobs: int = 20, **fields: Any) -> list[Prompt]:
    """The prompts that a completion request leads to."""
    request = read_completion(json.dumps({"prompt": "Hello"} | fields).encode())
    check(request)
    prompts = completion_prompts(request, model)
    params = sampling_params(request, model, max_logprobs)
    return [sample.prompt for sample in samples_of(request, model, params, prompts)]


def chat(model: TextModel, **fields: Any) -> list[Prompt]:
    request = read_chat(json.dumps({"messages": USER} | fields).encode())
    check(request)
    prompt = chat_prompt(request, model)
    params = sampling_params(request, model, 20)
    return [sample.prompt for sample in samples_of(request, model, params, [prompt])]


def test_bad_words_are_tokens_with_and_without_a_blank_before_them(text_model: TextModel) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(text_model.tokenizer.encode(text, add_special_tokens=False))

    (prompt,) = completion(text_model, bad_words=[" dog", "zq"])
    assert prompt.params.bad_words[0] == ids("dog")
    assert ids("zq") in prompt.params.bad_words
    assert set(prompt.params.bad_words) <= {ids(text) for text in ("dog", " dog", "zq", " zq")}


def with_defaults(model: TextModel, **defaults: Any) -> TextModel:
    return TextModel(model.served, model.tokenizer, model.templates, defaults)


# ---- prompts


def test_forms_of_prompts(text_model: TextModel) -> None:
    hello = text_model.tokenizer.encode("Hello", add_special_tokens=True)
    you = text_model.tokenizer.encode("you", add_special_tokens=True)
    for prompt, wanted in [
        ("Hello", [hello]),
        (["Hello", "you"], [hello, you]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([VOCAB_SIZE - 1], [[VOCAB_SIZE - 1]]),
    ]:
        assert [p.prompt_ids for p in completion(text_model, prompt=prompt)] == wanted
    assert completion(text_model, add_special_tokens=False)[0].prompt_ids == hello[1:]


def test_chat_prompts_follow_the_template(text_model: TextModel) -> None:
    def text(**fields: Any) -> str:
        return text_model.tokenizer.decode(chat(text_model, **fields)[0].prompt_ids)

    assert text() == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert text(add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"
    assert text(add_special_tokens=True).startswith("<bos><|im_start|>")
    begun = [*USER, {"role": "assistant", "content": "I am"}]
    assert text(messages=begun, continue_final_message=True).endswith("assistant\nI am")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [8, 9]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [5, 6]),
        ({"truncate_prompt_tokens": 100}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN - 3}, [7, 8, 9]),
    ],
)
def test_truncation(text_model: TextModel, fields: dict[str, Any], kept: list[int]) -> None:
    assert completion(text_model, prompt=[5, 6, 7, 8, 9], **fields)[0].prompt_ids == kept


# ---- sampling parameters


def test_defaults(text_model: TextModel) -> None:
    (prompt,) = completion(text_model)
    assert prompt.params == SamplingParams(max_tokens=16)
    (prompt,) = chat(text_model)
    assert prompt.params == SamplingParams(max_tokens=MAX_MODEL_LEN - len(prompt.prompt_ids))


def test_null_means_unset(text_model: TextModel) -> None:
    for kind, make in ((CompletionRequest, completion), (ChatRequest, chat)):
        names = {field.name for field in msgspec.structs.fields(kind)} - {"prompt", "messages", "model"}
        unset: dict[str, Any] = dict.fromkeys(names)
        nulls = make(text_model, **unset)
        assert nulls[0].params == make(text_model)[0].params


def test_every_parameter_arrives(text_model: TextModel) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "max_tokens": 20,
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "logit_bias": {"5": 1.5},
        "allowed_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    (prompt,) = completion(text_model, seed=-5, priority=-1, cache_salt="salt", **fields)
    wanted = fields | {
        "stop_token_ids": (3, 4),
        "allowed_token_ids": (5, 6),
        "logit_bias": {5: 1.5},
    }
    assert msgspec.structs.asdict(prompt.params) == msgspec.structs.asdict(SamplingParams(**wanted))
    assert (prompt.seed, prompt.priority, prompt.cache_salt) == (-5, -1, "salt")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt) == prompt


def test_the_models_own_defaults(text_model: TextModel) -> None:
    model = with_defaults(text_model, temperature=0.3, top_k=50, repetition_penalty=1.2, max_tokens=9)
    (prompt,) = chat(model)
    assert prompt.params == SamplingParams(temperature=0.3, top_k=50, repetition_penalty=1.2, max_tokens=9)
    assert chat(model, temperature=None, max_tokens=30)[0].params.max_tokens == 30
    assert chat(model, temperature=0)[0].params.greedy
    assert completion(model)[0].params.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
    ],
)
def test_names_of_max_tokens_in_chat(text_model: TextModel, fields: dict[str, Any], wanted: int) -> None:
    assert chat(text_model, **fields)[0].params.max_tokens == wanted


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ({}, None),
        ({"override_generation_config": '{"temperature": 1}'}, None),
        ({"override_generation_config": '{"max_new_tokens": 4}'}, 4),
        ({"generation_config": "HERE"}, 7),
        ({"generation_config": "HERE", "override_generation_config": '{"max_new_tokens": null}'}, None),
    ],
)
def test_the_operators_limit_of_tokens(
    loads: Loads, tmp_path: Path, flags: dict[str, str], most: int | None
) -> None:
    """The model's limit is a default; the operator's holds for all, as in vLLM."""
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    model = loads(**{key: str(tmp_path) if value == "HERE" else value for key, value in flags.items()})
    assert model.most_tokens == most
    (prompt,) = chat(model, max_tokens=5)
    expected = min(5, most or 5)
    assert (prompt.params.max_tokens, prompt.asked) == (expected, expected)
    assert completion(model)[0].params.max_tokens == min(16, most or 16)
    if most == 4:
        with pytest.raises(ApiError, match=r"min_tokens \(5\) must not exceed max_tokens \(4\)"):
            chat(model, max_tokens=9, min_tokens=5)
        assert completion(model, max_tokens=0, echo=True)[0].params.max_tokens == 1


def test_only_what_a_client_asked_for_itself_counts_as_asked(text_model: TextModel) -> None:
    assert [prompt.asked for prompt in completion(text_model, n=2, max_tokens=9)] == [9, 9]
    assert chat(text_model, max_completion_tokens=8)[0].asked == 8
    assert chat(with_defaults(text_model, max_tokens=9))[0].asked == 0
    assert completion(text_model)[0].asked == 0
    request = CompletionRequest(prompt="Hello", max_tokens=9)
    params, prompts = sampling_params(request, text_model, 20), completion_prompts(request, text_model)
    (sample,) = samples_of(request, text_model, params, prompts, may_be_cut=True)
    assert (sample.prompt.asked, sample.prompt.params.max_tokens) == (0, 9)


def test_near_the_context_length(text_model: TextModel) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 3)
    assert completion(text_model, prompt=prompt)[0].params.max_tokens == 3
    assert completion(text_model, prompt=prompt, max_tokens=3)[0].params.max_tokens == 3
    with pytest.raises(ApiError) as caught:
        completion(text_model, prompt=prompt, max_tokens=4)
    assert str(caught.value).startswith(
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested "
        f"{MAX_MODEL_LEN + 1} tokens ({MAX_MODEL_LEN - 3} in the prompt, 4 in the completion)."
    )


def test_biases_up_to_the_bound_are_taken(text_model: TextModel) -> None:
    (prompt,) = completion(text_model, logit_bias={"6": -100, "7": 100})
    assert prompt.params.logit_bias == {6: -100.0, 7: 100.0}


def test_small_temperatures_and_large_top_k(text_model: TextModel) -> None:
    assert completion(text_model, temperature=1e-9)[0].params.temperature == 0.01
    assert completion(text_model, temperature=0)[0].params.temperature == 0
    assert completion(text_model, top_k=2**62)[0].params.top_k == VOCAB_SIZE


def test_logprobs(text_model: TextModel) -> None:
    assert chat(text_model)[0].params.logprobs is None
    assert chat(text_model, logprobs=False, top_logprobs=0)[0].params.logprobs is None
    assert chat(text_model, logprobs=True)[0].params.logprobs == 0
    assert chat(text_model, logprobs=True, top_logprobs=4)[0].params.logprobs == 4
    assert completion(text_model, logprobs=2)[0].params.prompt_logprobs is None
    assert completion(text_model, logprobs=2, echo=True)[0].params.prompt_logprobs == 2
    assert completion(text_model, logprobs=2, echo=True, prompt_logprobs=5)[0].params.prompt_logprobs == 5


def test_max_tokens_0_still_computes_one(text_model: TextModel) -> None:
    params = completion(text_model, max_tokens=0, echo=True, logprobs=1)[0].params
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, None, 1)


# ---- samples


def test_samples_share_a_seed_and_differ_in_index(text_model: TextModel) -> None:
    prompts = completion(text_model, prompt=["Hello", "you"], n=2, seed=7, stop="x")
    assert [(p.request_id, p.seed, p.sample_index) for p in prompts] == [
        ("id-0", 7, 0),
        ("id-1", 7, 1),
        ("id-2", 7, 0),
        ("id-3", 7, 1),
    ]
    assert all(p.params.n == 1 and p.params.stop == () and p.params.seed is None for p in prompts)


def test_seeds_are_drawn_per_prompt(text_model: TextModel) -> None:
    first, second = completion(text_model, prompt=["Hello", "Hello"])
    assert first.seed != second.seed
    assert all(0 <= p.seed < 2**63 for p in (first, second))
    assert len({p.seed for p in completion(text_model, n=3)}) == 1


@pytest.mark.parametrize("make", [completion, chat])
def test_a_seed_of_minus_1_is_none(text_model: TextModel, make: Any) -> None:
    seeds = {make(text_model, seed=-1)[0].seed for _ in range(2)}
    assert len(seeds) == 2
    assert min(seeds) >= 0


def test_the_number_of_samples_is_bounded(text_model: TextModel) -> None:
    with pytest.raises(ApiError, match=f"at most {MAX_SAMPLES}"):
        completion(text_model, prompt=["a"] * (MAX_SAMPLES // 2), n=3)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("prompt_logprobs", {"prompt_logprobs": 20}), ("logprobs", {"logprobs": 20, "echo": True})],
)
def test_the_log_probabilities_of_prompts_are_bounded(
    text_model: TextModel, name: str, fields: dict[str, Any]
) -> None:
    """By tokens, samples and alternatives together; each alone is in its bounds."""
    prompts = [[5] * 200] * (MAX_SAMPLES // 4)
    assert len(completion(text_model, prompt=prompts, n=3, **fields)) == 3 * len(prompts)
    with pytest.raises(
        ApiError, match=f"^{name} 20 for 204800 tokens .* at most {MAX_PROMPT_LOGPROBS}"
    ) as caught:
        completion(text_model, prompt=prompts, n=4, **fields)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert len(completion(text_model, prompt=prompts, n=4, **fields | {name: 10})) == 4 * len(prompts)


# ---- fields


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"stop_regex": None, "no_stop_trim": False, "min_new_tokens": 0, "input_ids": [], "lora_path": ""},
        {"return_hidden_states": False, "modalities": ["text"], "audio": None, "web_search_options": None},
        {"structured_outputs": None, "use_beam_search": False, "bad_words": [], "kv_transfer_params": {}},
        {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "x": [[{}]]},
        {"watermarking": False, "ec_transfer_params": {}, "return_prompt_text": False, "moderation": None},
        {"separate_reasoning": True, "function_call": "auto", "length_penalty": 1.5, "stream_interval": 4},
        {"parallel_tool_calls": True, "reasoning_effort": "low", "documents": [{"text": "d"}]},
        {"stream": True, "stream_options": {"include_usage": True, "other": 1}},
        {"stream_options": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_fields_that_are_accepted(text_model: TextModel, fields: dict[str, Any]) -> None:
    assert len(chat(text_model, **fields)) == 1


def test_templates_see_tools_documents_and_variables(tmp_path: Path, served: ServedModel) -> None:
    source = "{{ tools[0].function.name }}{{ documents[0].text }}{{ reasoning_effort }}{{ verbosity }}{{ thinking }}"
    directory = tiny_tokenizer.write_model(tmp_path, chat_template=source)
    model = load_text_model(msgspec.structs.replace(served, directory=str(directory)), HttpConfig())
    (prompt,) = chat(
        model,
        tools=[{"type": "function", "function": {"name": "fun"}}],
        documents=[{"text": "doc"}],
        reasoning_effort="low",
        verbosity="high",
        chat_template_kwargs={"thinking": "yes"},
    )
    assert model.tokenizer.decode(prompt.prompt_ids) == "fundoclowhighyes"


# ---- the text model


@dataclasses.dataclass
class Loads:
    """A model directory and what is loaded from it."""

    served: ServedModel
    directory: Path

    def __call__(self, **config: Any) -> TextModel:
        served = msgspec.structs.replace(self.served, directory=str(self.directory))
        return load_text_model(served, HttpConfig(**config))


@pytest.fixture
def loads(tmp_path: Path, served: ServedModel) -> Loads:
    return Loads(served, tiny_tokenizer.write_model(tmp_path))


def test_generation_config(loads: Loads, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = loads.directory / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": 1}')
    assert loads().defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert loads(generation_config="vllm").defaults == {}
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert loads(generation_config=str(other)).defaults == {"top_p": 0.5}
    given = {"generation_config": str(other), "override_generation_config": '{"max_new_tokens": 7}'}
    assert loads(**given).defaults == {"top_p": 0.5, "max_tokens": 7}
    given["override_generation_config"] = '{"top_p": null, "temperature": 0.5}'
    assert loads(**given).defaults == {"temperature": 0.5}
    given["generation_config"] = "vllm"
    assert loads(**given).defaults == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"temperature": "hot"}', "temperature = 'hot' is no number"),
        ('{"temperature": -1}', "temperature must be a finite number at least 0, got -1"),
        ('{"temperature": NaN}', "temperature must be a finite number"),
        ('{"min_p": 1' + 400 * "0" + "}", "min_p is larger than"),
        ('{"top_k": 2.5}', "top_k = 2.5 is no whole number"),
        ('{"top_k": Infinity}', "top_k = inf is no whole number"),
        ('{"top_p": true}', "top_p = True is no number"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be at least 1, got 0"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("\xff", "is not valid JSON"),
        (None, "has no generation_config.json"),
    ],
)
def test_sampling_defaults_that_cannot_be_used(text: str | None, says: str, tmp_path: Path) -> None:
    """The start of the router fails, not the requests of clients."""
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
    config = HttpConfig(generation_config=str(tmp_path))
    problem = defaults_problem(config, "")
    assert problem is not None
    assert f"{tmp_path}" in problem
    assert says in problem
    assert "or give --generation-config another directory" in problem
    assert defaults_problem(HttpConfig(), str(tmp_path)) == (None if text is None else problem)


def test_sampling_defaults_that_cannot_be_looked_at() -> None:
    problem = defaults_problem(HttpConfig(generation_config="n" * 300), "")
    assert problem is not None
    assert "generation_config.json cannot be read: File name too long: repair it, or give" in problem


def test_a_broken_template_leaves_completions_alone(loads: Loads) -> None:
    (loads.directory / "chat_template.jinja").write_text("{% if %}")
    model = loads()
    assert completion(model)[0].prompt_ids[0] == BOS
    with pytest.raises(ApiError, match=r"chat_template\.jinja does not compile: syntax error in line 1"):
        chat(model)
    with pytest.raises(TokenizerError, match="--chat-template cannot be used"):
        loads(chat_template="{% if %}")


def test_a_named_template_is_looked_at_before_anything_starts() -> None:
    problem = template_problem(HttpConfig(chat_template="{% if %}"))
    assert problem is not None
    assert problem.startswith("--chat-template cannot be used: The chat template does not compile")
    assert template_problem(HttpConfig(chat_template="{{ messages }}")) is None
    assert template_problem(HttpConfig()) is None


def test_another_tokenizer(loads: Loads, model_directory: Path) -> None:
    (loads.directory / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        loads()
    (loads.directory / "generation_config.json").write_text('{"temperature": 0.6}')
    assert repr(loads(tokenizer=str(model_directory))).startswith("<TextModel tiny <Tokenizer with ")
    assert loads(tokenizer=str(model_directory)).defaults == {"temperature": 0.6}, "the model's"
