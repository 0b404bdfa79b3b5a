"""The ways to start a mesh, in every order, as the README shows them.

How it ends; what it refuses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import openai
import psutil
import pytest

from coordinator.messages import State
from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.mesh.harness import Command, Ports, serve, wait_until

pytestmark = pytest.mark.mesh

SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "32", "--dtype", "float32"]
JOINER = ["--num-gpu-blocks-override", "400"]


def ask(ports: Ports, rank: int | None = None, prompt: str = "It was", max_tokens: int = 8) -> str:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    with openai.OpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=SHIPPED_MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers=headers,
        )
    return answer.choices[0].text


def ready_ranks(ports: Ports) -> list[int]:
    return [member.rank for member in ports.view().members if member.state is State.READY]


def test_head_and_headless_instances_in_any_order_then_one_more(tmp_path: Path) -> None:
    """The three-terminal form, last one first; then an instance that knows nothing but the address."""
    ports = Ports()
    with (
        serve(
            tmp_path / "1.log", SHIPPED_MODEL, "-dp", "2", "-dpr", "1", "--headless", *ports.join(), *SMALL
        ) as one,
    ):
        one.wait_for(f"waiting for the coordinator at tcp://127.0.0.1:{ports.rpc}")
        with (
            serve(
                tmp_path / "head.log", SHIPPED_MODEL, "-dp", "2", "-dpl", "0", *ports.head(), *SMALL
            ) as head,
            serve(tmp_path / "0.log", "-dp", "2", "-dpr", "0", "--headless", *ports.join(), *JOINER) as zero,
        ):
            head.wait_for("2 instances ready")
            zero.wait_for("ready on")
            assert ready_ranks(ports) == [0, 1]
            status = ports.status()
            for word in ("rank", "state", "epoch", "load", "KV use", "tokens/s", "ready", "0.0%"):
                assert word in status
            assert ask(ports, 0) == ask(ports, 1)
            assert_joins_serves_and_drains(ports, tmp_path)
            assert one.stop() == 0
            assert zero.stop() == 0
            assert head.stop() == 0


def assert_joins_serves_and_drains(ports: Ports, tmp_path: Path) -> None:
    """A third instance joins without a restart; its end on SIGTERM disturbs no client."""
    with serve(tmp_path / "third.log", "--headless", *ports.join(), *JOINER) as third:
        third.wait_for("ready on")
        wait_until(lambda: ready_ranks(ports) == [0, 1, 2], 10)
        expected = ask(ports, 0, "She was", 200)
        assert ask(ports, 2) == ask(ports, 0)
        texts: list[str] = []
        errors: list[Exception] = []

        def stream() -> None:
            try:
                texts.append(streamed(ports))
            except openai.OpenAIError as error:
                errors.append(error)

        clients = [threading.Thread(target=stream) for _ in range(12)]
        for client in clients:
            client.start()
        wait_until(lambda: ports.view().members[2].load.running > 0, 20, "the third has requests")
        third.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(120)
        assert not errors
        assert len(texts) == 12
        assert set(texts) == {expected}
        assert third.end(30) == 0
        assert ready_ranks(ports) == [0, 1]
        assert "draining" in third.log


def streamed(ports: Ports) -> str:
    with (
        openai.OpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(
            model=SHIPPED_MODEL,
            prompt="She was",
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as chunks,
    ):
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.parametrize(
    ("head_flags", "node_flags"),
    [
        (["-dp", "3", "-dpl", "1"], ["--headless", "-dp", "3", "-dpl", "2", "-dpr", "1"]),
        pytest.param(
            ["-dp", "2", "-dpl", "0"], ["--headless", "-dp", "2", "-dpl", "2"], marks=pytest.mark.nightly
        ),
    ],
    ids=["both nodes", "all engines on the second node"],
)
def test_multi_node_forms(head_flags: list[str], node_flags: list[str], tmp_path: Path) -> None:
    ports = Ports()
    size = int(head_flags[1])
    with (
        serve(tmp_path / "head.log", SHIPPED_MODEL, *head_flags, *ports.head(), *SMALL) as head,
        serve(tmp_path / "node.log", SHIPPED_MODEL, *node_flags, *ports.join(), *SMALL) as node,
    ):
        head.wait_for(f"{size} instances ready")
        assert ready_ranks(ports) == list(range(size))
        assert len({ask(ports, rank) for rank in range(size)}) == 1
        assert node.stop(signal.SIGHUP) == 0, "its terminal is gone"
        assert head.stop() == 0


def streaming(ports: Ports) -> HTTPResponse:
    """An answer that goes on for long."""
    body = {"prompt": "It was", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{ports.url}/v1/completions", json.dumps(body).encode(), headers)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=30)
    return answer


def test_one_command_ends_cleanly_and_leaves_no_orphan(tmp_path: Path) -> None:
    """``serve`` prints its process tree; Ctrl-C or a killed parent ends all processes."""
    ports = Ports()
    with serve(tmp_path / "serve.log", *ports.head(), *SMALL, "--shutdown-timeout", "1") as command:
        command.wait_for("1 instance ready")
        for name in ("Coordinator", "Engine_0", "Router", "rank 0", "thread", ports.url):
            assert name in command.log.split("INFO")[0], "the tree comes before anything is started"
        assert "native kernels: off for" not in command.log, "they are off for no model that they know"
        family = command.family()
        titles = {" ".join(member.cmdline()).split("\0")[0].strip() for member in family}
        mesh = f":{ports.http} {SHIPPED_MODEL}"
        expected = {f"lockstep: {role} {mesh}" for role in ("Coordinator", "Engine_0", "Router")}
        assert {title for title in titles if "ForkServer" not in title} == expected
        serving = " ".join(psutil.Process(command.process.pid).cmdline()).strip()
        assert serving == f"lockstep: Serve {mesh}"
        with ThreadPoolExecutor(1) as thread, streaming(ports) as answer:
            answer.readline()
            rest = thread.submit(answer.read)
            half = socket.create_connection(("127.0.0.1", ports.http))
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            command.child("Engine_0").kill()
            assert command.end(30) != 0, "the only instance is gone"
            half.close()
            events = rest.result(30).decode().strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 503, "clients hear of it"
        assert (
            "1 requests have not ended within --shutdown-timeout (1 s): they end with an error" in command.log
        )
        assert "Cancel 1 running task(s)" in command.log, "the one whose body never came"
        assert "Traceback" not in command.log
        assert "Engine_0" in command.log
        assert "was killed by signal 9" in command.log
        psutil.wait_procs(family, timeout=10)
        assert not any(member.is_running() for member in family)
    for how, limit in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        with serve(tmp_path / f"{how}.log", *ports.head(), *SMALL) as command:
            command.wait_for("1 instance ready")
            family = command.family()
            began = time.monotonic()
            status = command.stop(how)
            assert status == (0 if how is signal.SIGINT else -signal.SIGKILL)
            _, alive = psutil.wait_procs(family, timeout=limit)
            assert not alive
            assert time.monotonic() - began < limit


def copy_of_shipped(path: Path, **changes: object) -> Path:
    shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def test_instances_that_do_not_fit_are_refused_and_nobody_notices(tmp_path: Path) -> None:
    ports = Ports()
    other = copy_of_shipped(tmp_path / "other", rms_norm_eps=1e-4)
    half = ["-dp", "2", "-dpl", "1", "--no-enable-expert-parallel"]  # which serves without the other one
    with serve(tmp_path / "head.log", SHIPPED_MODEL, *half, *ports.head(), *SMALL) as head:
        head.wait_for("ready on")
        cases = {
            "taken": (["-dpr", "0", "--headless", *SMALL], "rank 0 is taken by"),
            "size": (["-dp", "3", "-dpr", "1", "--headless", *SMALL], "-dp 3 differs from the mesh's -dp 2"),
            "dtype": (
                [SHIPPED_MODEL, "--headless", "--dtype", "bfloat16"],
                "--dtype is bfloat16, the mesh has float32",
            ),
            "model": ([str(other), "--headless", *SMALL, "--served-model-name", SHIPPED_MODEL], "model is "),
        }
        commands = {
            name: serve(tmp_path / f"{name}.log", *argv, *ports.join()) for name, (argv, _) in cases.items()
        }
        for name, command in commands.items():
            with command:
                assert command.end() == 3
                assert cases[name][1] in command.log
                assert "Traceback" not in command.log
        assert ask(ports)
        elsewhere = ["--port", str(Ports().http), *ports.join()]
        with serve(tmp_path / "second.log", *elsewhere, "-dp", "1", *SMALL) as second:
            assert second.end() == 1
            assert f"tcp://127.0.0.1:{ports.rpc} is in use: choose another port" in second.log
        with serve(tmp_path / "head2.log", "-dp", "2", "-dpl", "0", *elsewhere) as head2:
            assert head2.end() == 1, "another mesh's coordinator is not ours"
            assert "ready at" not in head2.log
        third_rpc = Ports().rpc
        with serve(
            tmp_path / "third.log", "--port", str(ports.http), "-dpp", str(third_rpc), *SMALL
        ) as third:
            assert third.end() == 1
            assert f"port {ports.http} on 127.0.0.1 is in use: choose another with --port" in third.log
        assert ask(ports)


def unsupported(path: Path) -> Path:
    return copy_of_shipped(path, architectures=["NoSuchForCausalLM"], model_type="no_such")


def without_tokenizer(path: Path) -> Path:
    copy_of_shipped(path)
    os.unlink(path / "tokenizer.json")
    return path


def with_half_a_tokenizer(path: Path) -> Path:
    copy_of_shipped(path)
    text = (path / "tokenizer.json").read_bytes()
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").write_bytes(text[: len(text) // 2])
    return path


def with_hot_defaults(path: Path) -> Path:
    copy_of_shipped(path)
    (path / "generation_config.json").unlink()
    (path / "generation_config.json").write_text('{"temperature": "hot"}')
    return path


def without_weights(path: Path) -> Path:
    copy_of_shipped(path)
    os.unlink(path / "model.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    return path


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["/nowhere"], 2, "model '/nowhere' does not exist: give a directory with config.json"),
        (["no-such/model"], 2, "is neither a local directory nor in the Hugging Face cache"),
        (["-dp", "2", "-dpr", "2", "--headless"], 2, "rank 2 is out of range: with -dp 2 ranks are 0 to 1"),
        (["--kv-cache-memory-bytes", "1k"], 1, "is too little for one block of 16 tokens"),
        (["--max-model-len", "100k"], 2, "is more than the model's context of 2048 tokens"),
        (["--headless", "--startup-timeout", "2"], 1, "waiting for the coordinator at"),
        (
            ["--headless", "--port", "81", "--startup-timeout", "1"],
            1,
            "--port ignored: with --headless there",
        ),
        ([unsupported], 2, "NoSuchForCausalLM is not served: this version of transformers has no model type"),
        ([without_tokenizer], 2, "has no tokenizer.json: name a directory that has one with --tokenizer"),
        ([with_half_a_tokenizer], 2, "tokenizer.json cannot be used"),
        ([with_hot_defaults], 2, "generation_config.json: temperature = 'hot' is no number: repair it, or"),
        (["--generation-config", "/nowhere"], 2, "/nowhere has no generation_config.json: repair it, or"),
        (
            ["--chat-template", "nowhere.jinja"],
            2,
            "--chat-template cannot be used: The chat template nowhere.jinja cannot be read: No such file",
        ),
        ([without_weights], 2, "It has pytorch_model.bin, a pickle format, which is never loaded"),
    ],
    ids=[
        "path",
        "hub id",
        "rank",
        "memory",
        "context",
        "nobody",
        "headless",
        "architecture",
        "tokenizer",
        "half a tokenizer",
        "sampling defaults",
        "named defaults",
        "chat template",
        "weights",
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    argv: list[object], status: int, message: str, tmp_path: Path
) -> None:
    ports = Ports()
    made = [item(tmp_path / "model") if callable(item) else item for item in argv]
    flags = ports.join() if "--headless" in made else ports.head()
    env = {"HF_HUB_OFFLINE": "1"} if "no-such/model" in made else None
    with serve(tmp_path / "log", *map(str, made), *flags, env=env) as command:
        assert command.end() == status
        assert message in command.log
        assert "Traceback" not in command.log


def test_a_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone} && exec {sys.executable} -P -m router.launcher.serve"
    done = subprocess.run(
        ["sh", "-c", command], cwd=gone, env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the current directory has been deleted" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_can_be_started_one_by_one(tmp_path: Path) -> None:
    """`python -m coordinator`, `-m engine` and `-m router`, the router first."""
    ports = Ports()
    with Command(tmp_path / "router.log", "router", "--port", str(ports.http), *ports.join()) as router:
        router.wait_for("listening on")
        with socket.create_connection(("127.0.0.1", ports.http)) as early:
            early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"503" in early.recv(100)
        with (
            Command(tmp_path / "engine.log", "engine", SHIPPED_MODEL, *ports.join(), *SMALL) as engine,
            Command(tmp_path / "coordinator.log", "coordinator", *ports.join()) as coordinator,
        ):
            engine.wait_for("ready on")
            router.wait_for("instance 0 at")
            wait_until(lambda: _answers(ports), 10)
            assert coordinator.stop(signal.SIGKILL) != 0
            assert ask(ports), "serving goes on without a coordinator"
            with Command(tmp_path / "again.log", "coordinator", *ports.join()) as again:
                again.wait_for("instance 0 is ready")
                assert ask(ports)
                assert engine.stop() == 0
                again.wait_for("instance 0 left")


def _answers(ports: Ports) -> bool:
    try:
        return bool(ask(ports))
    except openai.APIStatusError:
        return False
