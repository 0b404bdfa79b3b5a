"""Adapters that change under load with deaths: each answer is the right one's."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.messages import AdapterSource, State
from engine.adapters.adapter_settings import WEIGHTS, settled
from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from router.capsule import ADAPTER_DIGITS
from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.running.test_adapters import EVERYWHERE, EXPERTS, NAMES, Adapted
from tests.nightly import NIGHTLY

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

SECONDS = 150.0 if NIGHTLY else 15.0
CLIENTS = 6
TOKENS = 100
SERVED = ("x", "y")
"""Names whose adapters change; each may be any of the adapters in files, or none."""
PROMPTS = [[4 + (31 * each + 7 * index) % 300 for index in range(40)] for each in range(3)]


@dataclass
class Period:
    """Time in which a name may have had an adapter; empty: none."""

    adapter: str
    begins: float
    """When the command for it was sent."""
    ends: float = float("inf")
    """When the command for the next one was answered."""


@dataclass
class Answer:
    name: str
    prompt: int
    sent: float
    began: float = 0.0
    """When the answer's head came."""
    status: int = 0
    ids: list[int] = field(default_factory=list)
    fingerprint: str = ""


class Chaos:
    """A mesh under load, the commands that change it, and all answers."""

    def __init__(self, adapted: Adapted, directory: Path, seed: int, *flags: str) -> None:
        self.places = dict(adapted.places)
        self.digests = {name: settled(AdapterSource(name, str(self.places[name]))).digest for name in NAMES}
        self.truth = {
            (name, number): adapted.truth(name, prompt, TOKENS)
            for name in (*NAMES, "")
            for number, prompt in enumerate(PROMPTS)
        }
        self.cut = directory / "cut"
        shutil.copytree(self.places["one"], self.cut)
        (self.cut / WEIGHTS).write_bytes((self.cut / WEIGHTS).read_bytes()[:-64])
        self.ports, self.chance = Ports(), random.Random(seed)
        self.periods: dict[str, list[Period]] = {name: [Period("", 0.0)] for name in SERVED}
        self.answers: list[Answer] = []
        self.done: Counter[str] = Counter()
        self.flags = [
            str(adapted.model), *self.ports.head(), "--dtype", "float32", "--num-gpu-blocks-override", "600",
            "--served-model-name", SHIPPED_MODEL, "--enable-lora", "--max-loras", "2", "-dp", "2",
            "--max-lora-rank", "8", "--restart", *flags,
        ]  # fmt: skip

    # ---- load

    async def client(self, http: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            name = self.chance.choice([*SERVED, *SERVED, SHIPPED_MODEL])
            answer = Answer(name, self.chance.randrange(len(PROMPTS)), time.monotonic())
            await self.ask(http, answer)
            self.answers.append(answer)

    async def ask(self, http: aiohttp.ClientSession, answer: Answer) -> None:
        body = {"model": answer.name, "prompt": PROMPTS[answer.prompt], "max_tokens": TOKENS, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with http.post(f"{self.ports.url}/v1/completions", json=body) as got:
            answer.status, answer.began = got.status, time.monotonic()
            async for line in got.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    answer.ids += chunk["choices"][0]["token_ids"] if chunk["choices"] else []
                    answer.fingerprint = chunk.get("system_fingerprint") or answer.fingerprint

    # ---- changes

    async def change(self, http: aiohttp.ClientSession, command: Command, until: float) -> None:
        """Change adapters all the time; kill an instance or the coordinator now and then."""
        for number in itertools.count():
            if time.monotonic() > until:
                return
            if number % 6 == 3 and self.num_ready() == 2:
                self.done["kills"] += 1
                command.child(f"Engine_{self.chance.randrange(2)}").kill()
            elif number % 16 == 9:
                self.done["coordinators"] += 1
                command.child("Coordinator").kill()
            name = self.chance.choice(SERVED)
            match self.chance.randrange(6):
                case 0:
                    status, text = await self.post(http, "load", name, str(self.cut), load_inplace=True)
                    assert status == 400, text
                    assert "cannot be read" in text
                    self.done["refused"] += 1
                case 1:
                    await self.switch(http, name, "")
                case _:
                    await self.switch(http, name, self.chance.choice(NAMES))
            await asyncio.sleep(0.2 * self.chance.random())

    async def switch(self, http: aiohttp.ClientSession, name: str, adapter: str) -> None:
        """Let a name mean another adapter, or none."""
        period = Period(adapter, time.monotonic())
        had = self.periods[name][-1]
        self.periods[name].append(period)
        if adapter:
            status, text = await self.post(http, "load", name, str(self.places[adapter]), load_inplace=True)
        else:
            status, text = await self.post(http, "unload", name)
        assert status == (200 if adapter or had.adapter else 404), text
        had.ends = time.monotonic()
        self.done["loads" if adapter else "unloads"] += 1

    async def post(
        self, http: aiohttp.ClientSession, what: str, name: str, path: str = "", **more: Any
    ) -> tuple[int, str]:
        body = {"lora_name": name} | ({"lora_path": path} if path else {}) | more
        async with http.post(f"{self.ports.url}/v1/{what}_lora_adapter", json=body) as got:
            return got.status, await got.text()

    def num_ready(self) -> int:
        return sum(each.state is State.READY for each in self.ports.view().members)

    async def run(self, command: Command) -> None:
        until = time.monotonic() + SECONDS
        limits = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=limits) as http:
            clients = [self.client(http, until) for _ in range(CLIENTS)]
            await asyncio.gather(*clients, self.change(http, command, until))

    # ---- the check

    def problem_with(self, answer: Answer) -> str | None:
        """Why an answer is another adapter's than its name had; None if not."""
        named = [Period("", 0.0)] if answer.name == SHIPPED_MODEL else self.periods[answer.name]
        may = {each.adapter for each in named if each.begins <= answer.began and each.ends >= answer.sent}
        if answer.status == 404 and answer.name != SHIPPED_MODEL:
            return None if "" in may else "it was refused though the name had an adapter"
        if answer.status != 200:
            return f"status {answer.status}"
        own = {""} if answer.name == SHIPPED_MODEL else may - {""}
        of = [each for each in own if answer.ids == self.truth[each, answer.prompt]]
        if not of:
            others = [each for each in (*NAMES, "") if answer.ids == self.truth[each, answer.prompt]]
            return f"it is of {others or 'nothing known'}, not of {own}"
        digest = self.digests.get(of[0], "")[:ADAPTER_DIGITS]
        ends = (
            answer.fingerprint.endswith(f"-lora-{digest}") if digest else "-lora-" not in answer.fingerprint
        )
        return None if ends else f"its fingerprint is {answer.fingerprint}"


SPREAD = ("granitemoe", EXPERTS, ("-ep",))
LAYOUTS = [("llama", EVERYWHERE, ()), pytest.param(*SPREAD, marks=pytest.mark.nightly)]


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "settings", "flags"), LAYOUTS, ids=["llama", "spread experts"])
@pytest.mark.parametrize("seed", range(2) if NIGHTLY else range(1))
def test_no_answer_is_of_another_adapter(
    seed: int,
    family: str,
    settings: dict[str, Any],
    flags: tuple[str, ...],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    adapted = Adapted(tmp_path_factory.mktemp("adapted"), family, **settings)
    chaos = Chaos(adapted, tmp_path, seed, *flags)
    switch = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serve(tmp_path / "log", *chaos.flags, env=switch) as command:
        command.wait_for("2 instances ready")
        asyncio.run(chaos.run(command))
        problems = [(why, each) for each in chaos.answers if (why := chaos.problem_with(each))]
        assert not problems, (len(problems), problems[0], chaos.periods)
        assert min(chaos.done[each] for each in ("kills", "refused", "loads")) > 0, chaos.done
        answered = [each for each in chaos.answers if each.status == 200]
        assert len({(each.name, each.fingerprint) for each in answered}) > 3
        wait_until(lambda: chaos.num_ready() == 2, 60)
        assert "Traceback" not in command.log
        command.stop()
