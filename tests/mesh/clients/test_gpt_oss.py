"""A Harmony model, served without flags for it: calls, formats, budgets, forbidden words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from router.text.tokens import load_tokenizer
from router.turns import harmony
from tests.mesh.harness import Ports, serve
from tests.router import tiny_tokenizer

pytestmark = pytest.mark.mesh

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    "{% if begins_with %}<|channel|>{{ begins_with }}<|message|>{% endif %}"
)
USER: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Bath"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
BRIEF = {"thinking_token_budget": 8}
"""Budget for reasoning, which random weights do not end by themselves."""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Client of two instances of a tiny GPT-OSS with random weights."""
    from tests.engine.tiny_models import make_tiny_model

    directory, ports = tmp_path_factory.mktemp("gpt-oss"), Ports()
    make_tiny_model(directory, "gpt_oss", vocab_size=512)
    tiny_tokenizer.write_model(directory, harmony.MARKERS, chat_template=TEMPLATE)
    flags = ["-dp", "2", "--no-enable-expert-parallel", "--served-model-name", "m"]
    flags += ["--structured-outputs-config", '{"disable_any_whitespace": true}']
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with serve(log, str(directory), *flags, *ports.head()) as command:
        command.wait_for("2 instances ready")
        with openai.OpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
            yield client
        assert command.stop() == 0
        assert "Traceback" not in command.log


def ask(client: openai.OpenAI, begins_with: str = "", **fields: Any) -> Any:
    more = {"chat_template_kwargs": {"begins_with": begins_with}, **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        model="m", messages=USER, seed=3, max_completion_tokens=120, extra_body=more, **fields
    )


def test_a_call_that_is_asked_for(client: openai.OpenAI) -> None:
    choice = ask(client, tools=TOOLS, tool_choice="required", extra_body=BRIEF).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert choice.finish_reason == "tool_calls"


def test_a_form(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for begins_with in ("", "analysis", "final"):
        choice = ask(client, begins_with, response_format=wanted, extra_body=BRIEF).choices[0]
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_ends_when_its_budget_is_spent(client: openai.OpenAI, budget: int) -> None:
    free = ask(client, "analysis")
    assert free.usage.completion_tokens_details.reasoning_tokens > 20
    held = ask(client, "analysis", extra_body={"thinking_token_budget": budget})
    details = held.usage.completion_tokens_details
    assert (details.reasoning_tokens if details else 0) <= budget + 1, "and the token that ends it"
    assert held.usage.completion_tokens > budget + 1, "the answer goes on"
    reasoning = held.choices[0].message.model_extra.get("reasoning") or ""
    assert free.choices[0].message.model_extra["reasoning"].startswith(reasoning)


def test_bad_words_do_not_come(client: openai.OpenAI, tmp_path: Path) -> None:
    vocabulary = load_tokenizer(tiny_tokenizer.write_model(tmp_path, harmony.MARKERS))

    def tokens(**more: Any) -> list[int]:
        answer = client.completions.create(
            model="m",
            prompt="Hello",
            temperature=0,
            max_tokens=24,
            extra_body={"return_token_ids": True, **more},
        )
        return list(answer.choices[0].model_extra["token_ids"])

    free = tokens()
    words = [vocabulary.decode([id]) for id in free]
    word = next(word for word in words if word.strip() and word.isascii())
    held = [vocabulary.decode([id]) for id in tokens(bad_words=[word])]
    assert word in words
    assert word not in held
