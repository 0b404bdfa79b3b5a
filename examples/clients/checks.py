"""Common parts of the clients' scripts: the mesh's address, and named checks in sequence.

Imported by scripts that run in the environment of one client each, so it needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError

URL = os.environ.get("LOCKSTEP_URL", "http://127.0.0.1:8000")
"""Address of the mesh, without /v1."""

TRAINER_URL = os.environ.get("LOCKSTEP_TRAINER_URL", "http://127.0.0.1:8001")
"""Address at which a mesh answers trainers: --admin-port with --admin-port-serves-all."""

KEY = os.environ.get("LOCKSTEP_API_KEY") or "none"
"""Key that clients present; a mesh without keys takes any."""

LIMITED_KEY = os.environ.get("LOCKSTEP_LIMITED_KEY", "")
"""A key that is allowed one request per minute, if there is one."""

OPENING = "It is a truth universally acknowledged, that"

Check = Callable[[], Any]
_checks: list[Check] = []


class Skipped(Exception):
    """Raised where a check makes no sense; says why."""


def check(function: Check) -> Check:
    """Register a check: a function, or a coroutine function, that raises when something is wrong."""
    _checks.append(function)
    return function


def run(package: str) -> None:
    """Run all checks, print each result, and exit with 1 if one failed.

    ``package`` is only printed.
    """
    failed = skipped = 0
    for function in _checks:
        name, start = function.__name__, time.monotonic()
        try:
            outcome = function()
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
        except Skipped as reason:
            skipped += 1
            print(f"{package}: skip  {name}: {reason}", flush=True)
        except Exception:  # whatever a client raises; the other checks go on
            failed += 1
            print(f"{package}: FAIL  {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"{package}: ok    {name} ({time.monotonic() - start:.1f} s)", flush=True)
    passed = len(_checks) - failed - skipped
    print(f"{package}: {passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0)


def get(path: str) -> Any:
    """GET with the key; returns JSON if the answer is JSON, else text."""
    request = urllib.request.Request(URL + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read().decode()
        return json.loads(body) if "json" in answer.headers.get("content-type", "") else body


def model() -> str:
    """The name of the model that is served, or of the adapter that LOCKSTEP_MODEL names."""
    return os.environ.get("LOCKSTEP_MODEL") or str(get("/v1/models")["data"][0]["id"])


def needs_keys() -> None:
    """Skip the check at a mesh without keys."""
    if KEY == "none":
        raise Skipped("the mesh has no keys")


def needs_limited_key() -> None:
    if not LIMITED_KEY:
        raise Skipped("no key with a quota was given")


def wait_until_idle(timeout: float = 90.0) -> None:
    """Wait until the router generates nothing and no instance has work.

    Then the cancelled requests are gone.
    """
    deadline = time.monotonic() + timeout
    while True:
        running = [get("/load")["server_load"]]
        running += [load["num_total_reqs"] for load in get("/v1/loads")["loads"]]
        if not any(running):
            return
        assert time.monotonic() < deadline, f"still running after {timeout:g} s: {running}"
        time.sleep(0.1)


def post(path: str, body: dict[str, Any]) -> Any:
    """POST of JSON with the key."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def needs_tool_parser() -> None:
    """Skip the check at a mesh without a tool parser."""
    tool = {"type": "function", "function": {"name": "f"}}
    question = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 1}
    try:
        post("/v1/chat/completions", question)
    except HTTPError as error:
        if error.code != 400:
            raise
        raise Skipped("start the mesh with --enable-auto-tool-choice --tool-call-parser hermes") from None


WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["London", "Bath", "Meryton"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}

CALL_REGEX = (
    r'<tool_call>\n\{"name": "weather", "arguments": '
    r'\{"city": "(London|Bath)", "days": [1-9]\}\}\n</tool_call>'
)
"""A call as models write it for the parser ``hermes``.

The shipped model was never trained to call tools: with this expression its answer is one all the same, and
finding the call in it is left to the parser.
"""


def check_weather(arguments: str | dict[str, Any]) -> None:
    """Check that a call's arguments follow :data:`WEATHER_SCHEMA`."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert sorted(found) == ["city", "days"], found
    assert found["city"] in ("London", "Bath", "Meryton"), found
    assert 1 <= found["days"] <= 9, found
