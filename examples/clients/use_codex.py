"""The npm package ``@openai/codex``: prompts, a shell command, a namespaced tool, a resumed session.

Run in a folder where the package is installed. The model needs a context of 32,000 tokens: Codex sends 39 KB
of instructions and tools with every request.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import checks
from checks import check
from forcing import Call, Exchange, Forcing, forcing

CODEX = Path("node_modules", ".bin", "codex").resolve()
VERSION = json.loads(Path("node_modules", "@openai", "codex", "package.json").read_text())["version"]
HOME = tempfile.TemporaryDirectory(prefix="codex-")
WORK = Path(HOME.name, "work")
WORK.mkdir()
CONFIG = f"""
model = "{checks.model()}"
model_provider = "lockstep"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.lockstep]
name = "Lockstep"
base_url = "URL/v1"
wire_api = "responses"
env_key = "LOCKSTEP_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
CONTEXT = 32_000
"""Tokens that the conversations here need."""


def codex(server: Forcing, *words: str) -> list[dict[str, Any]]:
    """The events that ``codex exec --json WORDS`` prints."""
    Path(HOME.name, "config.toml").write_text(CONFIG.replace("URL", server.url))
    # The answers are forced, so no command runs but the harmless one of a check: no sandbox is needed.
    command = [
        *(str(CODEX), "exec", "--json", "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", *words),
    ]
    done = subprocess.run(
        command,
        cwd=WORK,
        env=os.environ | {"HOME": HOME.name, "CODEX_HOME": HOME.name, "LOCKSTEP_API_KEY": checks.KEY},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def finished(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def responses(server: Forcing) -> list[Exchange]:
    """Codex's requests to the model, all of which were answered."""
    found = [exchange for exchange in server.exchanges if exchange.path == "/v1/responses"]
    assert [exchange.status for exchange in found] == [200] * len(found)
    return found


def needs_long_context() -> None:
    if checks.get("/v1/models")["data"][0]["max_model_len"] < CONTEXT:
        raise checks.Skipped(f"the model's context is shorter than {CONTEXT} tokens")


@check
def a_prompt_is_answered() -> None:
    needs_long_context()
    with forcing() as server:
        events = codex(server, "Who was at the ball?")
        (exchange,) = responses(server)
    (message,) = finished(events, "agent_message")
    assert message["text"].endswith("."), message
    kinds = {tool["type"] for tool in exchange.body["tools"]}
    assert kinds >= {"function", "namespace", "web_search"}, kinds
    assert exchange.headers["x-lockstep-left-out"] == "web_search"
    assert "text/event-stream" in exchange.headers["content-type"]
    (turn,) = [event for event in events if event["type"] == "turn.completed"]
    assert turn["usage"]["input_tokens"] > 1000 and turn["usage"]["output_tokens"] > 3, turn


@check
def a_command_is_run_and_its_result_sent_back() -> None:
    needs_long_context()
    checks.needs_tool_parser()
    command = {"cmd": {"type": "string", "pattern": "^echo ball-[0-9]{4}$"}}
    with forcing(Call("exec_command", command)) as server:
        events = codex(server, "Echo something.")
        first, second = responses(server)
    (ran,) = finished(events, "command_execution")
    assert ran["exit_code"] == 0 and ran["aggregated_output"].startswith("ball-"), ran
    assert finished(events, "agent_message")
    *_, asked, result = second.body["input"]
    assert (asked["type"], asked["name"]) == ("function_call", "exec_command"), asked
    assert result["type"] == "function_call_output" and ran["aggregated_output"].strip() in result["output"]
    assert second.body["input"][: len(first.body["input"])] == first.body["input"]


@check
def a_tool_of_a_namespace_is_called_and_sent_back() -> None:
    needs_long_context()
    checks.needs_tool_parser()
    waiting: dict[str, Any] = {
        "targets": {"type": "array", "items": {"const": "nobody"}, "minItems": 1, "maxItems": 1},
        "timeout_ms": {"const": 10000},
    }
    with forcing(Call("wait_agent", waiting, namespace="multi_agent_v1")) as server:
        events = codex(server, "Wait for nobody.")
        _, second = responses(server)
    *_, asked, result = second.body["input"]
    assert (asked["namespace"], asked["name"]) == ("multi_agent_v1", "wait_agent"), asked
    assert (result["type"], result["call_id"]) == ("function_call_output", asked["call_id"]), result
    assert finished(events, "agent_message")


@check
def a_session_is_resumed() -> None:
    needs_long_context()
    with forcing() as server:
        codex(server, "resume", "--last", "And who was not?")
        (exchange,) = responses(server)
    kinds = [item["type"] for item in exchange.body["input"]]
    assert "function_call" in kinds and "function_call_output" in kinds, kinds


@check
def nothing_is_left_behind() -> None:
    checks.wait_until_idle()


checks.run(f"codex {VERSION}")
