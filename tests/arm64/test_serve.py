"""A mesh of an emulated ARM64 machine answers with the text of AVX2 kernels.

The command is that of ``make serve``, the prompt that of the quickstart. It takes some minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from parallel import compiler
from parallel.kernel_kinds import KINDS
from tests.arm64 import machine
from tests.mesh.harness import free_port, wait_until

ABSENT = machine.why_absent()
pytestmark = [
    pytest.mark.mesh,
    pytest.mark.nightly,
    pytest.mark.skipif(ABSENT is not None, reason=f"no ARM64 machine: {ABSENT}"),
    pytest.mark.timeout(1200),
]

SERVE = "from router.launcher.entry import serve; raise SystemExit(serve())"
START_SECONDS = 300.0
"""Time of a start on a quiet machine, where two instances take two minutes."""
PROMPT = "It is a truth universally acknowledged, that"
GREEDY = (
    " it is not to be supposed that any one can be supposed to be in love with him, and that he is not the person to be in"
    " love with him, and that he is a very good sort of man, and he is a very good sort of man, and he is a very good"
)
DRAWN = (
    " it would be very bad for me to think it. I was quite convinced that it was a very great relief to me, for I was not"
    " allowed to speak. I was in the right way, and left the room for me, and, I had my pleasure, in being reconciled to"
)
"""What AVX2 kernels make of the prompt, at temperature 0 and drawn with seed 5."""


@contextmanager
def served(command: list[str], environment: dict[str, str], log: Path) -> Iterator[str]:
    """A mesh of this command, as its base URL, until the context ends."""
    port, own = free_port(), free_port()
    with log.open("wb") as file:
        arguments = [*command, "--port", str(port), "-dpp", str(own)]
        process = subprocess.Popen(
            arguments, stdout=file, stderr=file, env=os.environ | environment, start_new_session=True
        )
    try:
        wait_until(
            lambda: process.poll() is not None or "ready at http" in log.read_text(),
            START_SECONDS,
            log.name,
            every=0.5,
        )
        assert process.poll() is None, log.read_text()[-2000:]
        yield f"http://127.0.0.1:{port}/v1"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) in (0, 130), log.read_text()[-2000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def completion(url: str, **parameters: Any) -> dict[str, Any]:
    """The one choice of a completion of the prompt with log-probabilities."""
    asked = {"model": "lockstep-moe", "prompt": PROMPT, "max_tokens": 60, "logprobs": 1, **parameters}
    header = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(asked).encode(), header)
    with urllib.request.urlopen(request, timeout=300) as answer:
        (choice,) = json.load(answer)["choices"]
    return dict(choice)


def answers(command: list[str], environment: dict[str, str], log: Path) -> list[dict[str, Any]]:
    """The greedy and the drawn answer of a mesh that is started for it."""
    with served(command, environment, log) as url:
        return [completion(url, temperature=0), completion(url, seed=5)]


@pytest.fixture(scope="module")
def of_avx2(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Answers of this host's AVX2 kernels."""
    if not KINDS["avx2"].needs <= compiler.cpu_flags():
        pytest.skip("this CPU has no AVX2 to compare with")
    log = tmp_path_factory.mktemp("avx2") / "log"
    return answers([sys.executable, "-c", SERVE], {"LOCKSTEP_NATIVE_KERNELS": "avx2"}, log)


@pytest.mark.parametrize("instances", ["1", "2"])
def test_an_arm64_mesh_answers_as_one_with_avx2(
    of_avx2: list[dict[str, Any]], instances: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    found = answers(machine.command(["-c", SERVE, "-dp", instances]), {}, log)
    assert "native kernels: on, with NEON" in log.read_text()
    assert ("2 instances in lockstep over shared_memory" in log.read_text()) == (instances == "2")
    assert [each["text"] for each in found] == [each["text"] for each in of_avx2] == [GREEDY, DRAWN]
    for mine, expected in zip(found, of_avx2, strict=True):
        assert mine["logprobs"]["token_logprobs"] == pytest.approx(
            expected["logprobs"]["token_logprobs"], abs=1e-4
        )
