"""Streams that outlive the routers which began them: real processes, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.stored.batch_client import answers_of, batch_lines, begin_batch, finished, some_done
from tests.mesh.stored.resuming_client import Resumed, run

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

IS_NIGHT = os.environ.get("LOCKSTEP_NIGHTLY") == "1"
PIECES, NUM_STREAMS = (5, 40) if IS_NIGHT else (1, 24)
"""At night 200 streams and 20 kills, in pieces."""
NUM_KILLS = 4
NUM_TOKENS = 500
NUM_LINES = 60
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """A request that always gets the same answer: its API, and its body."""
    kind = ("chat", "completions", "messages", "responses")[number % 4]
    common: dict[str, Any] = {"model": "lockstep-moe", "stream": True, "ignore_eos": True}
    common |= {"temperature": 0.0} if number % 3 == 0 else {"temperature": 0.9, "seed": number}
    text = f"Letter {number} begins"
    if kind == "chat":
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": NUM_TOKENS}
        if number % 16 == 0:
            chat |= {"n": 2, "stop": ["Darcy"], "temperature": 0.9, "seed": number}
        elif number % 16 == 4:
            chat |= {"logprobs": True, "top_logprobs": 2}
        elif number % 16 == 8:
            chat |= {"tools": TOOLS, "tool_choice": "required", "ignore_eos": False}
        return kind, common | chat
    if kind == "completions":
        grammar = {"guided_regex": "[a-z ]{400}"} if number % 8 == 1 else {}
        return kind, common | {"prompt": text, "max_tokens": NUM_TOKENS} | grammar
    if kind == "messages":
        common.pop("seed", None)
        return kind, common | {
            "messages": [{"role": "user", "content": text}], "max_tokens": NUM_TOKENS, "temperature": 0.0
        }  # fmt: skip
    return kind, common | {"input": text, "max_output_tokens": NUM_TOKENS}


async def streams(url: str, salt: str, first: int, meanwhile: Any = None) -> list[Resumed]:
    """All streams at once, and what happens meanwhile."""
    numbers = range(first, first + NUM_STREAMS)
    found = [Resumed(*body_of(number), f"{salt}-{number}") for number in numbers]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(240)) as client:
        running = [asyncio.create_task(run(client, url, stream)) for stream in found]
        if meanwhile is not None:
            await meanwhile(running)
        await asyncio.gather(*running)
    return found


def anonymous(stream: Resumed) -> bytes:
    """A stream's events without what names its request and its time."""
    text = b"\n\n".join(stream.events).replace(stream.request_id.encode(), b"ID")
    lines = []
    for line in text.splitlines():
        if line.startswith(b"data: {"):
            line = json.dumps(_unnamed(json.loads(line[6:])), sort_keys=True).encode()
        lines.append(line)
    if stream.body.get("n", 1) > 1:  # which of two samples is a token ahead is nobody's promise
        lines = sorted((line for line in lines if line.startswith(b"{")), key=_choice)
    return b"\n".join(lines)


def _choice(line: bytes) -> int:
    choices = json.loads(line)["choices"]
    return int(choices[0]["index"]) if choices else -1


def _unnamed(value: Any) -> Any:
    if isinstance(value, dict):
        unnamed = ("created", "created_at", "item_id", "call_id")
        return {
            key: "" if key in unnamed or (key == "id" and isinstance(each, str)) else _unnamed(each)
            for key, each in value.items()
        }
    return [_unnamed(each) for each in value] if isinstance(value, list) else value


def router_of(command: Command, number: int) -> psutil.Process:
    return command.child(f"Router_{number}", 40)  # it may be starting again, beside the other one


@pytest.mark.parametrize("piece", range(PIECES))
def test_streams_outlive_their_routers(tmp_path: Path, piece: int) -> None:
    ports, chance, first = Ports(), random.Random(57 + piece), piece * NUM_STREAMS
    flags = [
        "-dp",
        "2",
        "--api-server-count",
        "2",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
    ]
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(serve(tmp_path / "serve.log", "lockstep-moe", *flags, *ports.head()))
        command.wait_for("2 instances ready")
        undisturbed = asyncio.run(streams(ports.url, "calm", first))

        async def kills(running: list[asyncio.Task[None]]) -> None:
            for _ in range(NUM_KILLS):
                await asyncio.sleep(chance.uniform(0.3, 1.5))
                if all(each.done() for each in running):
                    return
                victim = await asyncio.to_thread(router_of, command, chance.randrange(2))
                victim.send_signal(signal.SIGKILL)

        disturbed = asyncio.run(streams(ports.url, "dead", first, kills))
        print([each.breaks for each in disturbed])
        assert not [each.errors for each in (*undisturbed, *disturbed) if each.errors]
        assert sum(each.breaks for each in disturbed) > 0
        for calm, dead in zip(undisturbed, disturbed, strict=True):
            assert anonymous(dead) == anonymous(calm), (dead.kind, dead.body)


def test_background_responses_go_on_after_serve_was_killed(tmp_path: Path) -> None:
    ports, store = Ports(), str(tmp_path / "answers")
    flags = ["lockstep-moe", "-dp", "2", "--store-path", store, *ports.head()]
    body = {
        "model": "lockstep-moe",
        "input": "Chapter one",
        "temperature": 0.8,
        "seed": 3,
        "ignore_eos": True,
    }
    body |= {"max_output_tokens": 900}
    with serve(tmp_path / "first.log", *flags) as command:
        command.wait_for("2 instances ready")
        truth = asyncio.run(_call(ports.url, "POST", "", body))["output"][0]["content"][0]["text"]
        lines = batch_lines(NUM_LINES)
        calm = answers_of(finished(ports.url, begin_batch(ports.url, lines)))
        assert len(calm) == NUM_LINES
        batch = begin_batch(ports.url, lines)
        begun = asyncio.run(_call(ports.url, "POST", "", body | {"background": True}))
        assert begun["status"] == "queued"
        kept = asyncio.run(_call(ports.url, "POST", "", {**body, "max_output_tokens": 9, "store": True}))
        assert asyncio.run(_call(ports.url, "GET", f"/{begun['id']}"))["status"] == "in_progress"
        counts = wait_until(lambda: some_done(ports.url, batch), 60)
        assert counts["completed"] < NUM_LINES
        for member in command.family(itself=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    with serve(tmp_path / "second.log", *flags) as command:
        command.wait_for("2 instances ready")
        assert asyncio.run(_call(ports.url, "GET", f"/{kept['id']}")) == kept
        ended = wait_until(lambda: _ended(ports.url, begun["id"]), 60)
        assert ended["output"][0]["content"][0]["text"] == truth
        assert f"goes on with answer {begun['id']}" in command.log
        disturbed = answers_of(finished(ports.url, batch))
        assert f"goes on with batch {batch}" in command.log
        assert disturbed == calm, "each line once, with the answer of the undisturbed run"


def _ended(url: str, id: str) -> Any:
    found = asyncio.run(_call(url, "GET", f"/{id}"))
    return None if found["status"] in ("queued", "in_progress") else found


async def _call(url: str, method: str, path: str, body: Any = None) -> Any:
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, f"{url}/v1/responses{path}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.json()
