"""Clients and gateways that know adapters as models, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.model.finding import find_model
from tests.engine.adapters.made_adapters import make_adapter
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]
CLIENTS = Path(__file__).parents[3] / "examples" / "clients"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """A mesh on the shipped model with two adapters."""
    folder, ports = tmp_path_factory.mktemp("clients"), Ports()
    model = find_model(SHIPPED_MODEL, None)
    for number, name in enumerate(("poet", "lawyer")):
        make_adapter(model, folder / name, seed=number, lora_alpha=1, target_modules=["q_proj", "o_proj"])
    adapters = [f"{name}={folder / name}" for name in ("poet", "lawyer")]
    flags = ["-dp", "1", "--dtype", "float32", "--max-num-seqs", "64", "--enable-auto-tool-choice"]
    flags += [
        "--tool-call-parser",
        "hermes",
        "--enable-lora",
        "--max-loras",
        "4",
        "--lora-modules",
        *adapters,
    ]
    with serve(folder / "log", *ports.head(), *flags) as command:
        command.wait_for("1 instance ready")
        yield ports
        command.stop()


@pytest.mark.nightly
def test_a_package_asks_for_an_adapter_by_the_name_of_a_model(ports: Ports, tmp_path: Path) -> None:
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, str(CLIENTS / "use_openai.py")],
        cwd=tmp_path,
        env=surroundings | {"LOCKSTEP_URL": ports.url, "LOCKSTEP_MODEL": "poet"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def scraped(url: str) -> dict[str, set[str]]:
    """Running and waiting adapters, as the picker of a Gateway reads them: lists in labels."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, set[str]] = {"running": set(), "waiting": set(), "max": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == "vllm:lora_requests_info" else ():
            found["running"] |= {*filter(None, sample.labels["running_lora_adapters"].split(","))}
            found["waiting"] |= {*filter(None, sample.labels["waiting_lora_adapters"].split(","))}
            found["max"].add(sample.labels["max_lora"])
    return found


def test_a_gateway_sees_which_adapters_run(ports: Ports) -> None:
    client = openai.OpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0)
    parents = {card.id: (card.model_extra or {})["parent"] for card in client.models.list()}
    assert parents == {SHIPPED_MODEL: None, "poet": SHIPPED_MODEL, "lawyer": SHIPPED_MODEL}
    assert scraped(ports.url)["max"] == {"4"}

    def ask(name: str) -> None:
        client.completions.create(model=name, prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True})

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("poet", "lawyer")]
    for thread in threads:
        thread.start()
    wait_until(lambda: scraped(ports.url)["running"] == {"poet", "lawyer"}, 30)
    for thread in threads:
        thread.join()
    wait_until(lambda: not scraped(ports.url)["running"], 30)
