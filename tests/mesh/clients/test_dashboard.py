"""The dashboard in a real browser: load, an instance killed and resumed, chat."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.mesh.clients.browser import KEEP, chromium, screenshot
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = pytest.mark.mesh

KEY = "open sesame"
FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-seqs", "32", "--restart"]

LOAD = """
import asyncio, sys
import openai
async def client(index):
    async with openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[2], max_retries=0) as api:
        while True:
            stream = await api.completions.create(
                model="lockstep-moe", prompt=[7 + index] * 50, max_tokens=300, stream=True,
                extra_body={"ignore_eos": True})
            async for _ in stream:
                pass
async def main():
    await asyncio.gather(*map(client, range(6)))
asyncio.run(main())
"""


class Page:
    """What stands on the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def running(self) -> list[int]:
        """Requests of each instance."""
        script = (
            "return [...document.querySelectorAll('#instances [data-rank]')].map((r) => +r.dataset.running)"
        )
        return [int(count) for count in self.run(script)]

    def say(self, text: str, num_tokens: int) -> None:
        self.run(
            "document.getElementById('chat-tokens').value = arguments[1];"
            "document.getElementById('chat-text').value = arguments[0];"
            "document.getElementById('chat-form').requestSubmit()",
            text,
            num_tokens,
        )

    def is_painted(self, selector: str) -> bool:
        """Whether a canvas shows more than one colour."""
        script = """const c = document.querySelector(arguments[0] + ' canvas');
            const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            return new Set(new Uint32Array(d.buffer)).size"""
        return int(self.run(script, selector)) > 10


CELLS_OUTSIDE = """
return [...document.querySelectorAll('#instances td, #requests td')]
  .filter((one) => one.getBoundingClientRect().right > innerWidth || one.scrollWidth > one.clientWidth)
  .map((one) => one.textContent)
"""
HEADS_SHOWN = """
return [...document.querySelectorAll('#instances td')]
  .map((one) => getComputedStyle(one, '::before').content.replaceAll('"', ''))
"""


def endless_model(directory: Path) -> Path:
    """Copy of the shipped model without an end of sequence, so that answers last."""
    directory.mkdir()
    for file in (MODELS_DIRECTORY / SHIPPED_MODEL).iterdir():
        if file.name in ("config.json", "generation_config.json"):
            (directory / file.name).write_text(
                json.dumps(
                    {key: value for key, value in json.loads(file.read_text()).items() if "eos" not in key}
                )
            )
        else:
            (directory / file.name).symlink_to(file)
    return directory


def test_the_page_shows_load_a_loss_and_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slow steps: the page looks once a second, and must see where an answer runs before and after a loss.
    monkeypatch.setenv("LOCKSTEP_NATIVE_KERNELS", "0")
    ports = Ports()
    model = str(endless_model(tmp_path / "lockstep-moe"))
    with (
        chromium() as driver,
        serve(
            tmp_path / "log",
            model,
            "-dp",
            "2",
            *ports.head(),
            *FLAGS,
            "--api-key",
            KEY,
            "--served-model-name",
            "lockstep-moe",
        ) as command,
    ):
        page = Page(driver)
        command.wait_for("2 instances ready")
        driver.get(f"{ports.url}/")

        # A wrong key is refused, the right one opens the page.
        for key in ("wrong", KEY):
            wait_until(
                lambda: page.run("return document.getElementById('key').open"), 30, "asked for the key"
            )
            page.run(
                "document.getElementById('key-text').value = arguments[0];"
                "document.querySelector('#key button').click()",
                key,
            )
        wait_until(lambda: page.text("#link") == "live", 30, "live")
        assert page.text("#tile-instances") == "2 of 2"
        assert page.text("#model") == "lockstep-moe"

        with subprocess.Popen([sys.executable, "-c", LOAD, ports.url, KEY]) as load:
            try:
                # Load: on both instances, in the tiles, the tables and the charts.
                wait_until(lambda: len(page.running()) == 2 and min(page.running()) > 1, 60, "load")
                wait_until(lambda: int(page.text("#tile-tokens")) > 0, 30, "tokens per second")
                wait_until(
                    lambda: (
                        page.run("return document.querySelectorAll('#requests [data-request]').length") >= 4
                    ),
                    30,
                )
                wait_until(lambda: "ms" in page.text("#steps-legend"), 30, "the split of steps")
                for chart in ("#throughput", "#steps", "#experts"):
                    wait_until(lambda chart=chart: page.is_painted(chart), 30, chart)

                # Chat: an answer that begins at one instance and ends at another.
                page.say("Tell me about Mr. Darcy.", 600)  # long enough to be killed in
                wait_until(lambda: "instance" in page.text(".said.assistant small"), 60, "where it runs")
                rank = int(page.text(".said.assistant small").split()[1])
                epoch = int(page.text("#tile-epoch"))
                command.child(f"Engine_{rank}").send_signal(signal.SIGKILL)
                wait_until(lambda: int(page.text("#tile-resumes")) > 0, 30, "resumes")
                wait_until(lambda: f"Engine_{rank} was killed by signal 9" in page.text("#events"), 30)
                wait_until(lambda: "resumed" in page.text("#throughput-legend"), 30, "marks")
                wait_until(lambda: int(page.text("#tile-epoch")) > epoch, 30, "another epoch")
                wait_until(
                    lambda: page.run("return !!document.querySelector('.said.assistant[data-done]')"), 90
                )
                said = page.text(".said.assistant")
                assert f"instance {rank} → {1 - rank}" in said
                assert "tokens" in said
                assert not page.run("return !!document.querySelector('.said.problem')")

                # It comes back, under its rank.
                wait_until(lambda: page.text("#tile-instances") == "2 of 2", 90, "back")
                wait_until(
                    lambda: len(page.running()) == 2 and min(page.running()) > 0, 60, "load on both again"
                )
                if KEEP is not None:  # for the documentation: some seconds of it
                    time.sleep(15)
                for theme in ("light", "dark"):
                    wanted = f"return document.documentElement.dataset.theme === '{theme}'"
                    if not page.run(wanted):
                        page.run("document.getElementById('theme').click()")
                    assert page.run(wanted)
                    assert screenshot(driver, tmp_path, f"dashboard-{theme}").stat().st_size > 20_000
                # On a phone every value is inside the screen, with the head of its column.
                phone = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
                wait_until(lambda: page.run("return innerWidth") == 375, 30, "narrow")
                assert page.run(CELLS_OUTSIDE) == []
                assert {"KV cache", "tokens/s"} <= set(page.run(HEADS_SHOWN))
                driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            finally:
                load.kill()

        # Nothing came from elsewhere, and nothing went wrong in the page.
        sources = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert len(sources) > 8
        assert all(source.startswith(f"{ports.url}/") for source in sources)
        wrong = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert all("401" in json.dumps(entry) for entry in wrong), wrong

        # Idle again; an open page does not hold up the end.
        wait_until(lambda: page.text("#tile-requests") == "0", 30, "idle")
        wait_until(lambda: page.running() == [0, 0], 30, "idle instances")
        assert command.stop() == 0
        wait_until(lambda: page.text("#link") != "live", 30, "says that the router is gone")
