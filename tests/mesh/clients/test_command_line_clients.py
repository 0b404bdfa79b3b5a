"""``lockstep chat``, ``status --watch`` and ``bench serve`` as a user starts them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mesh.conftest import Mesh
from tests.mesh.harness import free_port, wait_until

pytestmark = pytest.mark.mesh


def lockstep(*argv: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; from router.launcher.serve import main; sys.exit(main())",
        *argv,
    ]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=120, check=False)


URL = "http://mesh"
"""Placeholder for the mesh's URL, which is not known where cases are listed."""


def test_chat(mesh: Mesh) -> None:
    url = f"{mesh.url}/v1"
    once = lockstep(
        "chat", "--url", mesh.url, "--max-tokens", "8", "--temperature", "0", "-q", "Tell me of Emma."
    )
    assert once.returncode == 0, once.stderr
    assert len(once.stdout.strip()) > 5
    said = "Tell me of Emma.\n/reset\nTell me of Emma.\nAnd then?\n/nonsense\n"
    talk = lockstep("chat", "--url", url, "--max-tokens", "8", "--temperature", "0", said=said)
    assert talk.returncode == 0, talk.stderr
    first, forgotten, again, then = talk.stdout.strip("\n").split("\n")[:4]
    assert first == again == once.stdout.strip("\n").split("\n")[0]
    assert forgotten == "(forgotten)"
    assert then
    assert "there is no command /nonsense" in talk.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--url", f"http://127.0.0.1:{free_port()}/v1"], "no server answers at"),
        (
            ["--url", f"{URL}/nothing"],
            "there is no API at http://mesh/nothing or http://mesh/nothing/v1: This server has no",
        ),
        (["--url", "http://a b"], "'http://a b' is no URL"),
        (["--model", "nobody"], "the server has no model 'nobody'; it has lockstep-moe"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_chat_says_what_is_wrong(mesh: Mesh, argv: list[str], said: str) -> None:
    url = [] if "--url" in argv else ["--url", f"{mesh.url}/v1"]
    answer = lockstep("chat", *url, *[each.replace(URL, mesh.url) for each in argv], "-q", "Hello")
    assert answer.returncode in (1, 2)
    assert said.replace(URL, mesh.url) in answer.stderr
    assert "Traceback" not in answer.stderr


def test_ctrl_c_at_the_prompt_costs_no_conversation(mesh: Mesh) -> None:
    """In a terminal: a Ctrl-C that came too late to stop an answer."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-P", "-m", "router.tools.terminal_chat", "--url", mesh.url]
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    ) as process:
        os.close(follower)
        try:
            seen = read_until(leader, b"> ")
            answers: list[int] = []
            while not answers and process.poll() is None:  # when the prompt is there, it may not listen yet
                process.send_signal(signal.SIGINT)
                answers = select.select([leader], [], [], 3.0)[0]
            seen += read_until(leader, b"> ")
            assert b"(/exit or Ctrl-D ends)" in seen
            os.write(leader, b"/exit\n")
            wait_until(lambda: process.poll() is not None, 20)
        finally:
            process.kill()
            os.close(leader)
    assert process.returncode == 0
    assert b"Traceback" not in seen


def read_until(terminal: int, end: bytes, timeout: float = 60.0) -> bytes:
    """What a program writes to its terminal, up to this."""
    seen, deadline = b"", time.monotonic() + timeout
    while not seen.endswith(end):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536)
    return seen


def test_status_watch(mesh: Mesh, tmp_path: Path) -> None:
    """In a terminal: it draws again and again, and Ctrl-C ends it well."""
    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-P",
        "-m",
        "router.tools.status",
        "--watch",
        "--interval",
        "0.2",
        *mesh.join(),
    ]
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, close_fds=True
    ) as process:
        os.close(follower)
        try:
            seen = b""
            deadline = time.monotonic() + 60
            while seen.count(b"2 instances") < 3 and time.monotonic() < deadline:
                seen += os.read(leader, 65536)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: process.poll() is not None, 20)
        finally:
            process.kill()
            os.close(leader)
    assert seen.count(b"2 instances") >= 3
    assert process.returncode == 0
    both = subprocess.run(
        [sys.executable, "-P", "-m", "router.tools.status", "--watch", "--json", *mesh.join()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert both.returncode == 2
    assert "leave out --watch" in both.stderr


@pytest.mark.parametrize(
    "dataset",
    [
        ["--dataset-name", "random", "--burst-size", "4", "--burst-interval", "0.1"],
        ["--dataset-name", "multi_turn", "--multi-turn-num-turns", "3", "--backend", "openai-chat"],
        ["--dataset-name", "prefix_repetition", "--prefix-repetition-output-len", "8"],
    ],
    ids=["bursts", "multi_turn", "prefix_repetition"],
)
def test_bench_serve(mesh: Mesh, dataset: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = [
        "--random-input-len",
        "20",
        "--random-output-len",
        "8",
        "--num-prompts",
        "6",
        "--num-warmups",
        "1",
    ]
    goals = ["--goodput", "ttft:60000", "--ignore-eos", "--output-json", str(file)]
    done = lockstep("bench", "serve", "--base-url", mesh.url, *dataset, *sizes, *goals)
    assert done.returncode == 0, done.stderr
    assert "Serving Benchmark Result" in done.stdout
    (run,) = json.loads(file.read_text())["runs"]
    count = 18 if "multi_turn" in dataset else 6
    assert (run["completed"], run["failed"]) == (count, 0)
    assert run["total_output_tokens"] == 8 * count
    assert run["request_goodput"] == pytest.approx(run["request_throughput"])
    assert 0 < run["median_ttft_ms"] <= run["median_e2el_ms"]
