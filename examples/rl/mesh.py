"""Mesh of two instances for a trainer: samples, scores, new weights; in plain HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT, TIMEOUT = 180.0, 300.0
"""Seconds for the mesh to start, and for a call."""


@dataclass
class Rollout:
    """One answer of the policy."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    """Log-probabilities of the answer's tokens, when they were sampled."""
    text: str
    reward: float = 0.0


class Mesh:
    """``lockstep serve`` with two independent instances."""

    def __init__(self, model: Path, log: Path) -> None:
        self._log = log
        self.port, self._admin, rpc = (free_port() for _ in range(3))
        command = [
            sys.executable, "-P", "-m", "router.launcher.serve", str(model), "-dp", "2",
            "--no-enable-expert-parallel", "--dtype", "float32", "--restart", "-dpp", str(rpc),
            "--port", str(self.port), "--admin-port", str(self._admin),
        ]  # fmt: skip
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def wait(self, size: int = 2) -> None:
        """Wait until so many instances are ready."""
        deadline = time.monotonic() + START_TIMEOUT
        while len(self._ready()) < size:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"serve did not start:\n{self._log.read_text()}")
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def kill_one(self) -> int:
        """Kill an instance (SIGKILL); returns its rank. ``serve`` starts another one."""
        victim = self._ready()[-1]
        os.kill(victim["pid"], signal.SIGKILL)
        return int(victim["rank"])

    def sample(self, prompts: Sequence[list[int]], group: int, tokens: int, seed: int) -> list[list[Rollout]]:
        """Sample a group of answers to each prompt, with their log-probabilities."""

        def one(number: int) -> list[Rollout]:
            body = {
                "prompt": prompts[number], "n": group, "max_tokens": tokens, "temperature": 1.0,
                "seed": seed + number, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
            }  # fmt: skip
            choices = self._post(self.port, "/v1/completions", body)["choices"]
            return [
                Rollout(prompts[number], each["token_ids"], each["logprobs"]["token_logprobs"], each["text"])
                for each in choices
            ]

        return _at_once(one, len(prompts))

    def score(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Log-probabilities of the answers' tokens, computed again as prompts in one prefill each."""

        def one(number: int) -> list[float]:
            rollout = rollouts[number]
            body = {
                "prompt": rollout.prompt + rollout.answer, "max_tokens": 1, "prompt_logprobs": 0,
                "temperature": 0.0,
            }  # fmt: skip
            (choice,) = self._post(self.port, "/v1/completions", body)["choices"]
            scored = choice["prompt_logprobs"][len(rollout.prompt) :]
            pairs = zip(scored, rollout.answer, strict=True)
            return [each[str(token)]["logprob"] for each, token in pairs]

        return _at_once(one, len(rollouts))

    def update(self, weights: Path, label: str) -> None:
        """All instances go over to the weights of a directory, by vLLM's calls."""
        self._post(self._admin, "/start_weight_update", {})
        self._post(self._admin, "/update_weights", {"update_info": {"path": str(weights)}})
        self._post(self._admin, "/finish_weight_update", {"weight_version": label})

    def _ready(self) -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/admin/world", timeout=10) as answer:
                instances = json.load(answer)["instances"]
        except OSError:
            return []
        return [each for each in instances if each["state"] == "ready"]

    def _post(self, port: int, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)


def _at_once(work: Any, count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
