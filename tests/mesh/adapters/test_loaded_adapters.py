"""Adapters that are loaded, replaced and unloaded while a mesh serves."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.messages import State
from engine.adapters.adapter_settings import CONFIG, WEIGHTS
from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.running.test_adapters import NAMES, Adapted, stream

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

PROMPT = [4 + (7 * index) % 300 for index in range(40)]
TOKENS = 60


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def start(adapted: Adapted, log: Path, ports: Ports, first: Path, *flags: str) -> Command:
    """A mesh with the first adapter, whose clients may load others."""
    common = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-seqs", "16"]
    named = ["--served-model-name", SHIPPED_MODEL]
    lora = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"one={first}", "--restart"]
    switch = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return serve(log, str(adapted.model), *ports.head(), *common, *named, *lora, *flags, env=switch)


async def post(ports: Ports, path: str, **body: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.post(f"{ports.url}{path}", json=body) as answer:
        return answer.status, await answer.text()


def tell(ports: Ports, path: str, **body: Any) -> tuple[int, str]:
    return asyncio.run(post(ports, path, **body))


def models(ports: Ports) -> set[str]:
    async def ask() -> set[str]:
        async with aiohttp.ClientSession() as http, http.get(f"{ports.url}/v1/models") as answer:
            return {card["id"] for card in (await answer.json())["data"]}

    return asyncio.run(ask())


def pids(ports: Ports) -> set[int]:
    """Process ids of the instances that are ready."""
    return {each.pid for each in ports.view().members if each.state is State.READY}


def test_adapters_come_and_go_while_the_mesh_serves(adapted: Adapted, tmp_path: Path) -> None:
    ports, places = Ports(), {name: str(place) for name, place in adapted.places.items()}
    truth = {name: adapted.truth(name, PROMPT, TOKENS) for name in (*NAMES, "")}

    def answer(name: str) -> list[int]:
        return asyncio.run(stream(ports, name, PROMPT, TOKENS))

    first = tmp_path / "first"
    shutil.copytree(adapted.places["one"], first)
    with start(adapted, tmp_path / "log", ports, first, "-dp", "2", "--max-lora-rank", "8") as command:
        command.wait_for("2 instances ready")
        found = tell(ports, "/v1/load_lora_adapter", lora_name="two", lora_path=places["two"])
        assert found == (200, "Success: LoRA adapter 'two' added successfully.")
        assert answer("two") == truth["two"]

        taken = tell(ports, "/v1/load_lora_adapter", lora_name="two", lora_path=places["three"])
        assert (taken[0], "set 'load_inplace' to True" in taken[1]) == (400, True)
        body = {"lora_name": "two", "lora_path": places["three"], "load_inplace": True}
        assert tell(ports, "/v1/load_lora_adapter", **body)[0] == 200
        assert answer("two") == truth["three"]
        assert answer("one") == truth["one"]

        none = tell(ports, "/v1/load_lora_adapter", lora_name="x", lora_path="/none")
        assert (none[0], "No adapter found for /none" in none[1]) == (404, True)
        base = tell(ports, "/v1/load_lora_adapter", lora_name=SHIPPED_MODEL, lora_path=places["two"])
        assert (base[0], "conflicts with a served base model" in base[1]) == (400, True)
        cut = tmp_path / "cut"
        shutil.copytree(places["two"], cut)
        (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-50])
        broken = tell(ports, "/v1/load_lora_adapter", lora_name="x", lora_path=str(cut))
        assert (broken[0], "cannot be read" in broken[1]) == (400, True)
        assert models(ports) == {SHIPPED_MODEL, "one", "two"}

        for file in (CONFIG, WEIGHTS):  # a trainer writes over what the mesh was started with
            shutil.copy(adapted.places["two"] / file, first / file)
        body = {"lora_name": "one", "lora_path": str(first), "load_inplace": True}
        assert tell(ports, "/v1/load_lora_adapter", **body)[0] == 200
        died = command.child("Engine_1")
        died.kill()
        wait_until(
            lambda: [died.pid not in ready for ready in [pids(ports)] if len(ready) == 2] == [True], 60
        )
        assert [answer("two") for _ in range(4)] == [truth["three"]] * 4
        assert [answer("one") for _ in range(4)] == [truth["two"]] * 4
        assert tell(ports, "/v1/unload_lora_adapter", lora_name="one")[0] == 200

        assert tell(ports, "/v1/unload_lora_adapter", lora_name="two")[0] == 200
        assert models(ports) == {SHIPPED_MODEL}
        gone = tell(ports, "/v1/unload_lora_adapter", lora_name="two")
        assert (gone[0], "cannot be found" in gone[1]) == (404, True)
        assert answer("") == truth[""]

        tensors = base64.b64encode((adapted.places["two"] / WEIGHTS).read_bytes()).decode()
        settings = json.loads((adapted.places["two"] / CONFIG).read_text())
        body = {"lora_name": "sent", "config_dict": settings, "serialized_tensors": tensors}
        status, text = tell(ports, "/load_lora_adapter_from_tensors", **body)
        assert (status, set(json.loads(text)["loaded_adapters"])) == (200, {"sent"})
        assert answer("sent") == truth["two"]
        status, text = tell(ports, "/load_lora_adapter", lora_name="bad", lora_path="/none")
        assert (status, json.loads(text)["success"]) == (400, False)
        assert tell(ports, "/unload_lora_adapter", lora_name="sent")[0] == 200
        assert "Traceback" not in command.log
        assert command.stop() == 0


@pytest.mark.nightly
def test_workers_of_an_instance_read_their_parts(adapted: Adapted, tmp_path: Path) -> None:
    ports, first = Ports(), adapted.places["one"]
    truth = {name: adapted.truth(name, PROMPT, TOKENS) for name in ("one", "two")}
    with start(adapted, tmp_path / "log", ports, first, "-dp", "1", "-tp", "2") as command:
        command.wait_for("1 instance ready")
        bad = tell(ports, "/v1/load_lora_adapter", lora_name="two", lora_path=str(tmp_path))
        assert bad[0] == 404, bad
        found = tell(ports, "/v1/load_lora_adapter", lora_name="two", lora_path=str(adapted.places["two"]))
        assert found[0] == 200, found
        for name in ("two", "one"):
            assert asyncio.run(stream(ports, name, PROMPT, TOKENS)) == truth[name]
        assert tell(ports, "/v1/unload_lora_adapter", lora_name="one")[0] == 200
        assert models(ports) == {SHIPPED_MODEL, "two"}
        assert "Traceback" not in command.log
        assert command.stop() == 0
