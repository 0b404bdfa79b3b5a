"""The ``guidance`` package: its models for vLLM and OpenAI's API, with expressions, choices and JSON."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import checks
import guidance
from checks import check
from guidance import assistant, gen, select, system, user
from guidance.models import Model, OpenAI
from guidance.models.experimental import VLLMModel

MODEL = checks.model()
PLACE: dict[str, Any] = {"base_url": f"{checks.URL}/v1", "api_key": checks.KEY, "echo": False}


def asked(model: Model, question: str = "Who was at the ball?") -> Model:
    with system():
        model += "Answer in a word."
    with user():
        model += question
    return model


VLLM = asked(VLLMModel(MODEL, **PLACE))
OPENAI = asked(OpenAI(MODEL, **PLACE))


@check
def a_regular_expression() -> None:
    with assistant():
        answer = VLLM + gen("plate", regex=r"[A-Z]{2}-[0-9]{3}")
    assert re.fullmatch(r"[A-Z]{2}-[0-9]{3}", answer["plate"]), answer["plate"]


@check
def a_choice() -> None:
    with assistant():
        answer = VLLM + select(["Bingley", "Darcy", "Collins"], name="guest")
    assert answer["guest"] in ("Bingley", "Darcy", "Collins")


@guidance(stateless=True)
def description(model: Any) -> Any:
    who = select(["Bingley", "Darcy"], name="guest")
    return model + "Mr. " + who + " is " + gen("age", regex="[1-9][0-9]") + "."


@check
def several_parts_in_one_answer() -> None:
    with assistant():
        answer = VLLM + description()
    assert str(answer).endswith(f"Mr. {answer['guest']} is {answer['age']}."), str(answer)


@check
def json_by_a_schema() -> None:
    for model in (VLLM, OPENAI):
        with assistant():
            answer = model + guidance.json("weather", schema=checks.WEATHER_SCHEMA)
        checks.check_weather(answer["weather"])


@check
def any_text_up_to_its_most_tokens() -> None:
    with assistant():
        answer = OPENAI + gen("text", max_tokens=12)
    assert answer["text"], "an answer"
    usage = answer._get_usage()
    assert usage.forward_passes == 12 and usage.input_tokens > 10, usage


@check
def conversations_go_on() -> None:
    chosen: list[str] = []
    model = VLLM
    for names in (["Jane", "Lydia"], ["Kitty", "Mary"]):
        with assistant():
            model += select(names, name="sister")
        chosen.append(model["sister"])
        with user():
            model += "And who else?"
    assert chosen[0] in ("Jane", "Lydia") and chosen[1] in ("Kitty", "Mary"), chosen


@check
def errors_are_those_of_the_openai_package() -> None:
    import openai as package

    failing: dict[type[Exception], Model] = {
        package.NotFoundError: asked(VLLMModel("nobody", **PLACE)),
        package.BadRequestError: asked(OpenAI(MODEL, **PLACE), "word " * 100_000),
    }
    for expected, model in failing.items():
        try:
            with assistant():
                model += gen("x", max_tokens=1)
        except expected:
            continue
        raise AssertionError(f"no {expected.__name__}")


checks.run(f"guidance {importlib.metadata.version('guidance')}")
