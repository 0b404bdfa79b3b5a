"""Instances and workers in a Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from coordinator.process.process import EXIT_WORKER_LOST
from engine.config import SHIPPED_MODEL
from tests.mesh.harness import Command, Ports, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install '.[ray]'"),
]

SMALL = [
    *(SHIPPED_MODEL, "--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "400"),
    *("--max-num-seqs", "32"),
]
PROMPT = "It is a truth universally acknowledged, that"
NUM_TOKENS = 16


class Cluster:
    """One node after another, with one CPU each."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.mesh.running.ray_cluster", "1", "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise AssertionError("the cluster did not start")
        self.environment = {"RAY_ADDRESS": json.loads(line)}

    def actors(self, kind: str) -> dict[int, int]:
        """Actor processes of this kind, each with its raylet, which stands for its node."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # which a zombie is, too
                if " ".join(child.cmdline()).startswith(f"ray::{kind}"):
                    found[child.pid] = child.ppid()
        return found

    def close(self) -> None:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it did not even start
            family = psutil.Process(self.process.pid).children(recursive=True)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for each in family:
            if each.is_running():
                each.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.close()


def in_cluster(log: Path, cluster: Cluster, ports: Ports, *argv: str) -> Command:
    return serve(log, *SMALL, *ports.head(), *argv, env=cluster.environment)


def ids(ports: Ports, rank: int) -> list[int]:
    body: dict[str, Any] = {"model": SHIPPED_MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    with urlopen(
        Request(f"{ports.url}/v1/completions", json.dumps(body).encode(), headers), timeout=60
    ) as answer:
        choice = json.load(answer)["choices"][0]
    found: list[int] = choice["token_ids"]
    assert len(found) == NUM_TOKENS
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What transformers generates in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine.model.finding import find_model

    directory = find_model(SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(directory)(PROMPT, return_tensors="pt").input_ids
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
        do_sample=False, temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    generated: list[int] = output[0, prompt.shape[1] :].tolist()
    return generated


@pytest.mark.nightly
def test_instances_on_both_nodes(cluster: Cluster, expected: list[int], tmp_path: Path) -> None:
    """One command starts them; nodes have room for one each, and for no third."""
    ports = Ports()
    flags = ["-dp", "2", "--data-parallel-backend", "ray", "--no-enable-expert-parallel"]
    with in_cluster(tmp_path / "log", cluster, ports, *flags) as command:
        command.wait_for("2 instances ready", 240)
        actors = cluster.actors("InstanceActor")
        assert len(actors) == len(set(actors.values())) == 2, "one on each node"
        assert [ids(ports, rank) for rank in (0, 1)] == [expected, expected]
        members = {member.rank: member.pid for member in ports.view().members}
        assert {psutil.Process(pid).ppid() for pid in members.values()} == set(actors), (
            "children of the actors"
        )
        os.kill(next(pid for pid in actors if psutil.Process(members[1]).ppid() == pid), 9)
        wait_until(lambda: not psutil.pid_exists(members[1]), 10, "an instance ends with its actor")
        command.wait_for("the instance's actor died", 20)
        wait_until(lambda: [each.rank for each in ports.view().members] == [0], 20, "the mesh knows")
        assert ids(ports, 0) == expected, "the other one serves on"
        assert command.stop() == 0
    wait_until(lambda: not cluster.actors("InstanceActor"), 20, "nothing is left in the cluster")


@pytest.mark.nightly
def test_workers_of_one_instance_on_both_nodes(cluster: Cluster, expected: list[int], tmp_path: Path) -> None:
    """A tensor-parallel rank on each node; the end of an actor ends the instance."""
    ports = Ports()
    flags = ["-tp", "2", "--distributed-executor-backend", "ray", "--collective-timeout", "20"]
    with in_cluster(tmp_path / "log", cluster, ports, *flags) as command:
        command.wait_for("1 instance ready", 240)
        assert "actors on 2 nodes: Worker_0_PP0_TP0" in command.log
        actors = cluster.actors("WorkerActor")
        assert len(actors) == len(set(actors.values())) == 2
        assert ids(ports, 0) == expected
        killed_at = time.monotonic()
        os.kill(next(iter(actors)), 9)
        command.wait_for("lost a worker: Worker_0_PP0_TP", 20)
        assert time.monotonic() - killed_at < 5.0, "a second, on a host that is not busy"
        assert command.end(30) == EXIT_WORKER_LOST
    wait_until(lambda: not cluster.actors("WorkerActor"), 20, "nothing is left in the cluster")


@pytest.mark.nightly
def test_no_room_is_said_with_what_there_is(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["-tp", "2", "--distributed-executor-backend", "ray", "--cpu-threads", "6"]
    with in_cluster(tmp_path / "log", cluster, Ports(), *flags, "--startup-timeout", "10") as command:
        assert command.end(60) == 1
    assert "no room for 6 CPU (2 bundle(s) of 3 CPU, PACK)" in command.log
    assert "free are now 2 CPU" in command.log


def test_no_cluster_is_said(tmp_path: Path) -> None:
    flags = [*SMALL, "--data-parallel-backend", "ray", *Ports().head()]
    with serve(tmp_path / "log", *flags, env={"RAY_ADDRESS": "127.0.0.1:1"}) as command:
        assert command.end(120) == 1
    assert "no Ray cluster can be reached" in command.log
    assert "ray start --head" in command.log
