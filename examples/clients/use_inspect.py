"""The ``inspect-ai`` package over its providers for vLLM, chat and responses: evaluations, tools, numbers."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from typing import Any, Literal

LOGS = tempfile.TemporaryDirectory(prefix="inspect-")
os.environ |= {"INSPECT_LOG_DIR": LOGS.name, "INSPECT_DISPLAY": "none"}  # before it is imported

import checks
from checks import check
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, Model, ResponseSchema, execute_tools, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

NAME = checks.model()
QUESTION = "Who was at the ball?"
PLACE: dict[str, Any] = {"base_url": f"{checks.URL}/v1", "api_key": checks.KEY, "memoize": False}


class Guest(BaseModel, extra="forbid"):
    name: Literal["Bingley", "Darcy", "Collins"]
    dances: bool


def models(**config: Any) -> dict[str, Model]:
    # Without the last one it asks first, in a request without a limit, whether reasoning is summarised.
    settings = GenerateConfig(max_retries=0, seed=1, reasoning_summary="none", **config)
    return {
        "vllm": get_model(f"vllm/{NAME}", config=settings, **PLACE),
        "openai-api": get_model(f"openai-api/lockstep/{NAME}", config=settings, **PLACE),
        "responses": get_model(f"openai/{NAME}", config=settings, responses_api=True, **PLACE),
    }


@tool
def weather() -> Any:
    async def execute(city: Literal["London", "Bath", "Meryton"]) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return f"rain in {city}"

    return execute


@check
def evaluations_are_scored() -> None:
    form = {"structured_outputs": {"regex": r"Mr\. (Darcy|Bingley)"}}
    for name, model in models(max_tokens=16, extra_body=form).items():
        samples = [Sample(QUESTION, target="Mr."), Sample("And who else?", target="Mrs.")]
        (log,) = eval(Task(dataset=samples, solver=generate(), scorer=includes()), model=model)
        assert log.status == "success", f"{name}: {log.error}"
        assert log.results is not None
        accuracy = log.results.scores[0].metrics["accuracy"].value
        assert accuracy == 0.5 or name == "responses", accuracy  # which passes no extra_body on
        usage = next(iter(log.stats.model_usage.values()))
        assert usage.input_tokens > 10 and usage.output_tokens > 2, usage


@check
async def answers_have_usage_and_log_probabilities() -> None:
    for name, model in models(max_tokens=12, logprobs=True, top_logprobs=2).items():
        output = await model.generate(QUESTION)
        assert output.completion and output.usage is not None and output.usage.output_tokens == 12, name
        told = output.choices[0].logprobs
        assert told is not None and len(told.content) == 12, name
        assert "".join(entry.token for entry in told.content) == output.completion
        assert {len(entry.top_logprobs or ()) for entry in told.content} == {2}


@check
async def a_tool_is_called_and_its_result_answered() -> None:
    checks.needs_tool_parser()
    for name, model in models(max_tokens=60).items():
        asked = [ChatMessageUser(content=QUESTION)]
        output = await model.generate(asked, [weather()], ToolFunction("weather"))
        (call,) = output.message.tool_calls or []
        assert call.function == "weather" and list(call.arguments) == ["city"], f"{name}: {call}"
        told, _ = await execute_tools([*asked, output.message], [weather()])
        assert told[0].text == f"rain in {call.arguments['city']}", name
        answer = await model.generate([*asked, output.message, *told], [weather()], "none")
        assert answer.completion, name


@check
async def schemas_are_followed() -> None:
    schema = ResponseSchema(name="guest", json_schema=json_schema(Guest), strict=True)
    for name, model in models(max_tokens=120, response_schema=schema).items():
        output = await model.generate(QUESTION)
        assert Guest.model_validate_json(output.completion).name, name


@check
def errors_end_an_evaluation() -> None:
    for name, model in models(max_tokens=4).items():
        task = Task(dataset=[Sample("word " * 100_000, target="x")], solver=generate(), scorer=includes())
        (log,) = eval(task, model=model)
        (sample,) = log.samples or []
        stopped = sample.output.stop_reason if sample.output.choices else ""
        assert log.status == "error" or stopped == "model_length", f"{name}: {log.status} {stopped}"


@check
def nothing_is_left_behind() -> None:
    checks.wait_until_idle()


checks.run(f"inspect-ai {importlib.metadata.version('inspect-ai')}")
