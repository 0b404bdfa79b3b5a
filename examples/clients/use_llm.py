"""The command ``llm`` (Simon Willison's): prompts, streams, schemas, tools, logs, errors; and from Python."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = tempfile.TemporaryDirectory(prefix="llm-")
os.environ["LLM_USER_PATH"] = HOME.name  # before llm is imported

import asyncio

import checks
import llm
from checks import check

MODEL = checks.model()
MODELS = f"""
- model_id: chat
  model_name: {MODEL}
  api_base: {checks.URL}/v1
  api_key_name: lockstep
  supports_schema: true
  supports_tools: true
- model_id: text
  model_name: {MODEL}
  api_base: {checks.URL}/v1
  api_key_name: lockstep
  completion: true
- model_id: nobody
  model_name: nobody
  api_base: {checks.URL}/v1
  api_key_name: lockstep
"""
Path(HOME.name, "extra-openai-models.yaml").write_text(MODELS)
QUESTION = "Who was at the ball?"


def command(*words: str, status: int = 0) -> str:
    """Output of ``llm WORDS``."""
    done = subprocess.run(
        [sys.executable, "-m", "llm", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout if status == 0 else done.stdout + done.stderr


subprocess.run(
    [sys.executable, "-m", "llm", "keys", "set", "lockstep", "--value", checks.KEY],
    check=True,
    capture_output=True,
)


@check
def models() -> None:
    assert "chat" in command("models")


@check
def prompts_with_and_without_a_stream() -> None:
    fixed = [
        "-m",
        "chat",
        QUESTION,
        "-o",
        "max_tokens",
        "20",
        "-o",
        "seed",
        "1",
        "-s",
        "You are Jane Austen.",
    ]
    streamed = command(*fixed)
    assert len(streamed) > 20
    assert command(*fixed, "--no-stream") == streamed


@check
def completions() -> None:
    fixed = ["-m", "text", checks.OPENING, "-o", "max_tokens", "20", "-o", "temperature", "0"]
    assert len(command(*fixed)) > 20
    assert command(*fixed, "--no-stream") == command(*fixed)


@check
def schemas() -> None:
    for more in ([], ["--no-stream"]):
        checks.check_weather(
            command("-m", "chat", QUESTION, "--schema", json.dumps(checks.WEATHER_SCHEMA), *more)
        )


@check
def conversations_and_logs() -> None:
    command("-m", "chat", QUESTION, "-o", "max_tokens", "8")
    assert command("-c", "And who danced?", "-o", "max_tokens", "8")
    first, second = json.loads(command("logs", "-n", "2", "--json"))
    assert first["conversation_id"] == second["conversation_id"]
    assert second["input_tokens"] > first["input_tokens"] and second["output_tokens"] == 8


@check
def tools() -> None:
    """The model is offered a tool and answers.

    That the call goes through is checked from Python, below.
    """
    checks.needs_tool_parser()
    function = "def weather(city: str, days: int) -> str:\n    return 'rain'\n"
    assert command("-m", "chat", QUESTION, "--functions", function, "-o", "max_tokens", "8")


@check
def errors() -> None:
    assert "nobody" in command("-m", "nobody", QUESTION, status=1)
    assert "temperature" in command(
        "-m", "chat", QUESTION, "-o", "temperature", "2", "-o", "top_p", "0", status=1
    ).replace("top_p", "temperature")
    if checks.KEY != "none":
        assert "key" in command("-m", "chat", QUESTION, "--key", "wrong", status=1)


@check
def from_python() -> None:
    model = llm.get_model("chat")
    response = model.prompt(QUESTION, max_tokens=12)
    assert response.text() and response.usage().output == 12
    assert len(list(model.prompt(QUESTION, max_tokens=12))) > 3


@check
async def many_at_once() -> None:
    model = llm.get_async_model("chat")

    async def one() -> str:
        return str(await model.prompt(QUESTION, max_tokens=12).text())

    assert all(await asyncio.gather(*(one() for _ in range(8))))


if __name__ == "__main__":
    checks.run(f"llm {importlib.metadata.version('llm')}")
