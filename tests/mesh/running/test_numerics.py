"""Instances of two numerics classes in one mesh.

Both are shown, answers name theirs, and requests go on in theirs. Another one can be refused.
"""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from coordinator.process.process import EXIT_REFUSED, EXIT_USAGE
from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from parallel.kernel_kinds import KINDS
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = pytest.mark.mesh

SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "32", "--no-enable-expert-parallel"]
LACKING = [kind for kind in KINDS if library.why_not(kind) is not None]

OTHER = "torch" if library.why_not("avx512") else "avx512"
"""Kernels of another class than avx2; torch's operators where the CPU has no AVX-512."""


def fingerprint_of_answer(ports: Ports, rank: int, *, stream: bool = False) -> str | None:
    headers = {"X-data-parallel-rank": str(rank)}
    asked: dict[str, Any] = {"model": SHIPPED_MODEL, "prompt": "It was", "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
        if not stream:
            return client.completions.create(**asked, extra_headers=headers).system_fingerprint
        chunks = list(client.completions.create(**asked, stream=True, extra_headers=headers))
    (found,) = {chunk.system_fingerprint for chunk in chunks}
    return found


def get(ports: Ports, path: str) -> str:
    with urllib.request.urlopen(ports.url + path, timeout=10) as answer:
        return str(answer.read().decode())


@dataclass
class Got:
    """What a request has got so far."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)
    changes: list[dict[str, Any]] = field(default_factory=list)
    """What the answer says of changes of its class."""
    header: str | None = None

    def take(self, answer: dict[str, Any]) -> None:
        """Take in a chunk, or a whole answer."""
        self.fingerprints.add(answer["system_fingerprint"])
        self.changes += answer.get("numerics_changes") or (answer.get("usage") or {}).get(
            "numerics_changes", []
        )
        for choice in answer["choices"]:
            self.ids += choice.get("token_ids") or []
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            told = choice.get("logprobs") or {}
            self.logprobs += told.get("token_logprobs") or [
                each["logprob"] for each in told.get("content", [])
            ]

    @property
    def bits(self) -> tuple[list[int], str, list[float]]:
        return self.ids, self.text, self.logprobs


NUM_TOKENS = 1900
"""So many that the first request still runs when an instance is killed."""
COMMON = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
SEEDED = COMMON | {"prompt": "It was a dark", "seed": 7, "temperature": 0.9, "logprobs": 1}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", SEEDED),
    "sampled": ("/v1/completions", SEEDED | {"prompt": "She saw", "stream": True}),
    "greedy": (
        "/v1/chat/completions",
        COMMON | {"messages": [{"role": "user", "content": "Tell me."}], "temperature": 0, "logprobs": True,
                  "stream": True},
    ),
}  # fmt: skip
"""Requests by name, with their paths."""


def ask(ports: Ports, name: str, rank: int, got: Got) -> None:
    """Send a request to an instance; ``got`` grows with what comes."""
    path, body = ASKED[name]
    salted = body | {
        "model": SHIPPED_MODEL,
        "cache_salt": secrets.token_hex(4),
    }  # no instance knows its prompt
    headers = {"content-type": "application/json", "x-data-parallel-rank": str(rank)}
    asked = urllib.request.Request(ports.url + path, json.dumps(salted).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        got.header = answer.headers["x-lockstep-numerics-changed"]
        for line in answer:
            if line.startswith((b"data: {", b"{")):
                got.take(json.loads(line.removeprefix(b"data: ")))


def run(ports: Ports, rank: int, act: Callable[[], object] | None = None) -> dict[str, Got]:
    """All requests at once at an instance; once they run there, do this."""
    got = {name: Got() for name in ASKED}
    with ThreadPoolExecutor(len(ASKED)) as threads:
        asking = [threads.submit(ask, ports, "whole", rank, got["whole"])]
        wait_until(lambda: "lockstep:requests_in_flight 1.0" in get(ports, "/metrics"), 20, "it runs")
        asking += [threads.submit(ask, ports, name, rank, got[name]) for name in ("sampled", "greedy")]
        if act is not None:
            wait_until(lambda: all(len(got[name].ids) > 8 for name in ("sampled", "greedy")), 20, "they run")
            act()
        for each in asking:
            each.result(120)
    assert all(len(each.ids) == len(each.logprobs) == NUM_TOKENS for each in got.values())
    return got


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_requests_go_on_in_their_class_and_say_when_they_could_not(tmp_path: Path) -> None:
    """Both classes are shown, and each answer names its own.

    The first instance of the class of two is killed, then the second one; the third is of another class.
    """
    ports = Ports()
    forced = ["-dp", "3", "-dpr", "1", "-dpl", "2", "--headless", *ports.join(), *SMALL]
    with (
        serve(tmp_path / "head.log", SHIPPED_MODEL, "-dp", "3", "-dpl", "1", *ports.head(), *SMALL,
              "--numerics", OTHER) as head,
        serve(tmp_path / "1.log", *forced, "--numerics", "avx2") as others,
    ):  # fmt: skip
        head.wait_for("3 instances ready")
        first, second, third = (member.numerics for member in ports.view().members)
        assert first is not None
        assert second is not None
        assert (first.kernels, first.invariant) == (OTHER, OTHER != "torch")
        assert (second.kernels, second.invariant) == ("avx2", True)
        assert third == second
        assert f"numerics class {first}, " in head.log
        assert f"numerics class {second}, invariant" in others.log
        assert "may give other bits for the same seed" in head.log
        status = ports.status()
        assert first.fingerprint in status
        assert second.fingerprint in status
        for rank, numerics in enumerate((first, second, second)):
            for stream in (False, True):
                assert fingerprint_of_answer(ports, rank, stream=stream) == numerics.fingerprint
        info = json.loads(get(ports, "/server_info"))
        assert {each["system_fingerprint"]: each["dp_ranks"] for each in info["numerics"]} == {
            first.fingerprint: [0], second.fingerprint: [1, 2],
        }  # fmt: skip
        assert f'fingerprint="{second.fingerprint}",invariant="true",kernels="avx2"}} 2.0' in get(
            ports, "/metrics"
        )

        undisturbed = run(ports, 2)
        resumed = run(ports, 1, others.child("Engine_1").kill)
        assert "3 requests of instance 1 go on elsewhere" in head.log
        for name, got in resumed.items():
            assert got == undisturbed[name], "in its class, with the idle instance of the other one left out"
            assert got.fingerprints == {second.fingerprint}
            assert (got.changes, got.header) == ([], None)

        changed = run(ports, 2, others.child("Engine_2").kill)
        assert "3 requests of instance 2 go on elsewhere" in head.log
        for name, got in changed.items():
            assert got.fingerprints == {second.fingerprint}, "that of the first token"
            (change,) = got.changes
            after = change.pop("after_tokens")
            assert change == {"choice": 0, "from": second.fingerprint, "to": first.fingerprint}
            assert 0 < after < NUM_TOKENS
            assert got.ids[:after] == undisturbed[name].ids[:after]
            assert got.logprobs[:after] == undisturbed[name].logprobs[:after]
            assert got.logprobs[after:] != undisturbed[name].logprobs[after:], "as the answer says"
        assert changed["whole"].header == f"{second.fingerprint} -> {first.fingerprint}"
        assert changed["greedy"].header is None, "its headers were sent before"
        assert head.log.count("goes on in another numerics class after") == 3
        assert 'lockstep:numerics_changes_total{promised="true"} 3.0' in get(ports, "/metrics")


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_another_class_is_refused_where_one_is_required(tmp_path: Path) -> None:
    ports = Ports()
    with serve(
        tmp_path / "head.log", SHIPPED_MODEL, "-dp", "1", *ports.head(), *SMALL,
        "--numerics", "avx2", "--require-same-numerics",
    ) as head:  # fmt: skip
        head.wait_for("1 instance ready")
        join = ["--headless", *ports.join(), "--num-gpu-blocks-override", "400"]
        with serve(tmp_path / "other.log", *join, "--numerics", "torch") as other:
            assert other.end() == EXIT_REFUSED
            assert "the mesh refused this instance: this instance is of numerics class fp_" in other.log
            assert "--numerics chooses the same kernels" in other.log
        with serve(tmp_path / "same.log", *join, "--numerics", "avx2") as same:
            same.wait_for("ready on")
            wait_until(lambda: len(ports.view().members) == 2, 20)
            first, second = (member.numerics for member in ports.view().members)
            assert first == second
            assert fingerprint_of_answer(ports, 0) == getattr(second, "fingerprint", "")


@pytest.mark.skipif(not LACKING, reason="this CPU has all kinds of kernels")
def test_kernels_that_this_cpu_has_not_are_refused_before_the_start(tmp_path: Path) -> None:
    ports = Ports()
    kind = LACKING[0]
    with serve(tmp_path / "head.log", SHIPPED_MODEL, *ports.head(), *SMALL, "--numerics", kind) as head:
        assert head.end() == EXIT_USAGE
        assert f"--numerics {kind}: this CPU lacks " in head.log
        assert "Coordinator" not in head.log, "nothing was started"
