"""Tables and plots of the benchmark against other systems, of pages whole and cut short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import peer_systems
from examples.benchmarks import peer_tables as tables


def run(speed: float, first: float, failed: int = 0) -> dict[str, float]:
    return {"tokens_per_second": speed, "ttft_ms": first, "itl_ms": 5.0, "failed": failed}


def page() -> dict[str, Any]:
    """Results of a benchmark that was interrupted in its second repeat.

    A request of vLLM's failed in it.
    """
    runs = {
        ("lockstep", 1): [run(300, 20), run(330, 22)],
        ("vllm", 1): [run(100, 50), run(90, 40, failed=1)],
        ("vllm-cores", 1): [run(120, 30), run(110, 33)],
        ("lockstep", 8): [run(1000, 60)],
        ("vllm", 8): [run(500, 90)],
        ("vllm-cores", 8): [],
    }
    cells = [
        {"system": system, "workload": "plain", "concurrency": count, "runs": found}
        for (system, count), found in runs.items()
    ]
    model = {"model": "m", "dtype": "bfloat16", "workloads": {"plain": [0, 128, 64]}, "cells": cells}
    model |= {"calibration": [{"read_gb_per_s": 10.0, "bf16_gflop_per_s": 400}]}
    model |= {"start_seconds": {"lockstep": 2.0}, "left_out": {"llama.cpp": "is not installed\nfor now"}}
    return json.loads(json.dumps({"models": [model]}))  # type: ignore[no-any-return]


def test_ratios_are_of_what_both_finished() -> None:
    of = {(one["system"], one["concurrency"]): one["runs"] for one in page()["models"][0]["cells"]}
    assert tables.ratios(of, "lockstep", ["vllm-cores"], 1, "tokens_per_second") == [2.5, 3.0]
    assert tables.ratios(of, "lockstep", ["vllm"], 1, "tokens_per_second") == [3.0]
    assert tables.ratios(of, "lockstep", ["vllm", "vllm-cores"], 1, "tokens_per_second") == [2.5]
    assert tables.ratios(of, "lockstep", ["vllm", "vllm-cores"], 1, "ttft_ms") == [1.5]
    assert tables.ratios(of, "lockstep", ["vllm-cores"], 8, "ttft_ms") == []


def test_tables_of_a_page_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_model(page()["models"][0])
    said = capsys.readouterr().out
    cells = {tuple(part.strip() for part in line.split("|")[1:-1]) for line in said.splitlines()}
    assert ("lockstep", "315 (300-330)", "1000") in cells
    assert ("vllm-cores", "115 (110-120)", "") in cells
    assert ("lockstep / best of vllm", "2.50", "") in cells
    assert "Left out: llama.cpp is not installed" in said


def test_a_plot_of_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables.plot(tmp_path, page())
    assert (tmp_path / "m-bfloat16-plain.svg").read_text().rstrip().endswith("</svg>")


def test_systems_that_may_use_nothing_beyond_avx2() -> None:
    """torch answers so in every process of theirs."""
    vllm = peer_systems.SYSTEMS["vllm"].only_avx2()
    environment = peer_systems.environment_of(vllm, peer_systems.USUAL_ROOM)
    asked = "import torch; print(torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported(), "
    asked += "torch.cpu._is_vnni_supported(), torch.backends.cpu.get_cpu_capability())"
    answers = subprocess.run([sys.executable, "-c", asked], env=environment, check=True, capture_output=True)
    assert answers.stdout.split() == [b"False", b"False", b"False", b"AVX2"]
    ours = peer_systems.SYSTEMS["lockstep"].only_avx2()
    assert peer_systems.environment_of(ours, peer_systems.USUAL_ROOM)["LOCKSTEP_NATIVE_KERNELS"] == "avx2"
