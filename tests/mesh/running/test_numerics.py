"""Instances of two numerics classes in one mesh.

Both are shown, answers name theirs, and another one can be refused.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from coordinator.process.process import EXIT_REFUSED, EXIT_USAGE
from engine.config import SHIPPED_MODEL
from engine.kernels import library
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(280)]

SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "32", "--no-enable-expert-parallel"]
LACKING = [kind for kind in library.KIND_FLAGS if library.why_not(kind) is not None]


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


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_two_classes_are_shown_and_each_answer_names_its_own(tmp_path: Path) -> None:
    ports = Ports()
    forced = ["-dp", "2", "-dpr", "1", "--headless", *ports.join(), "--num-gpu-blocks-override", "400"]
    with (
        serve(tmp_path / "head.log", SHIPPED_MODEL, "-dp", "2", "-dpl", "1", *ports.head(), *SMALL,
              "--numerics", "torch") as head,
        serve(tmp_path / "1.log", *forced, "--numerics", "avx2") as other,
    ):  # fmt: skip
        head.wait_for("2 instances ready")
        first, second = (member.numerics for member in ports.view().members)
        assert first is not None
        assert second is not None
        assert (first.kernels, first.invariant) == ("torch", False)
        assert (second.kernels, second.invariant) == ("avx2", True)
        assert f"numerics class {first}, variant" in head.log
        assert f"numerics class {second}, invariant" in other.log
        assert head.log.count("may give other bits for the same seed") == 1
        status = ports.status()
        assert first.fingerprint in status
        assert second.fingerprint in status
        for rank, numerics in enumerate((first, second)):
            for stream in (False, True):
                assert fingerprint_of_answer(ports, rank, stream=stream) == numerics.fingerprint
        info = json.loads(get(ports, "/server_info"))
        assert {each["system_fingerprint"]: each["dp_ranks"] for each in info["numerics"]} == {
            first.fingerprint: [0], second.fingerprint: [1],
        }  # fmt: skip
        assert f'fingerprint="{second.fingerprint}",invariant="true",kernels="avx2"}} 1.0' in get(
            ports, "/metrics"
        )


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
