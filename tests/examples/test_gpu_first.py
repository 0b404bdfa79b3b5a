"""The script for the first ten minutes on a GPU, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.benchmarks.gpu import coded_steps, gpu_first, shapes
from tests.nightly import NIGHTLY


def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both shapes; at night beside transformers, and two instances, too."""
    output = tmp_path / "results.json"
    without = ["tests", *(["peer", "mesh"] if not NIGHTLY else [])]
    status = gpu_first.main(
        ["--device", "cpu", "--tiny", "--output-json", str(output), "--without", *without, "--seconds", "200"]
    )
    results = json.loads(output.read_text())
    assert status == 0, results
    printed = capsys.readouterr().out
    for shape in shapes.SHAPES:
        rows = [row for row in results[shape]["rows"] if "step_ms" in row]
        assert [(row["rows"], row["sampling"]) for row in rows] == [
            (count, kind)
            for count in (1, 4)
            for kind in ("greedy", "temperature", "top-k and top-p", "top-p")
        ]
        assert all(row["step_ms"] > 0 and row["limit_tokens_per_s"] > 0 for row in rows)
        assert printed.count(f"{shape} ") >= 1 + len(rows)
    assert results["qwen3-30b-a3b"]["parameters"] > results["qwen3-0.6b"]["parameters"]
    for name in ("prompts", "prompts without graphs"):
        assert [each["tokens"] for each in results[name]["prompts"]] == [40, 100]
        assert all(each["ms"] > 0 and each["step_ms"] > 0 for each in results[name]["prompts"])
    products = results["quantised products"]["products"]
    assert {row["kind"] for row in products} == set(coded_steps.KINDS)
    assert all(row["difference"] < row["tolerance"] and row["ms"] > 0 for row in products)
    assert printed.count("mxfp4") == 2
    if NIGHTLY:
        assert [row["rows"] for row in results["qwen3-0.6b peer"]["rows"]] == [1, 4]
        assert results["two instances"]["answer"]
    assert "failed: nothing" in printed


def test_a_part_that_hangs_or_fails_costs_only_itself(tmp_path: Path) -> None:
    parts = gpu_first.Parts(tmp_path / "results.json", 30.0)
    hangs = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    parts.run("hangs", 6.0, lambda seconds: gpu_first.call(hangs, seconds - 5.0, tmp_path / "log"))

    def fails(_: float) -> gpu_first.Result:
        raise subprocess.SubprocessError("no device")

    parts.run("fails", 5.0, fails)
    parts.run(
        "ends", 5.0, lambda seconds: gpu_first.call([sys.executable, "-c", "1"], seconds, tmp_path / "log")
    )
    late = gpu_first.Parts(tmp_path / "late.json", 1.0)
    late.run("late", 90.0, fails)
    assert parts.results["hangs"]["status"] == "ended after 1 s"
    assert parts.results["hangs"]["last_lines"] == ["begun"]
    assert parts.results["fails"]["failed"] == "SubprocessError: no device"
    assert parts.results["ends"]["status"] == 0
    assert late.results["late"]["skipped"] == "no time is left"
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"hangs", "fails", "ends"}
    assert "ended after 1 s" in gpu_first.table(parts.results)


def test_a_part_gets_what_is_left_of_the_time() -> None:
    parts = gpu_first.Parts(Path("/dev/null"), 20.0)
    assert parts.left(90.0) <= 20.0


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    config = shapes.config_of("qwen3-30b-a3b", tiny=False)
    weights = 61_000_000_000
    one, all_of_them = (shapes.read_bytes(config, weights, rows, 0, 0) for rows in (1, 10_000))
    assert 6.0e9 < one < 7.5e9  # about 3.3 billion parameters of a token, but for the embedding
    assert all_of_them == pytest.approx(weights - 151936 * 2048 * 2)
    assert shapes.read_bytes(config, weights, 2, 100, 1000) > one + 200_000


def test_a_model_has_as_many_layers_as_fit_the_device() -> None:
    large, small = (shapes.config_of(shape, tiny=False) for shape in ("qwen3-30b-a3b", "qwen3-0.6b"))
    assert shapes.layers_that_fit(large, 144 << 30) == shapes.layers_that_fit(large, 80 << 30) == 48
    assert shapes.layers_that_fit(small, 8 << 30) == 28
    assert 10 < shapes.layers_that_fit(large, 24 << 30) < 16
    assert shapes.layers_that_fit(large, 0) == 1


def test_the_last_line_of_tests_counts_not_what_libraries_print_after_it(tmp_path: Path) -> None:
    prints = [sys.executable, "-c", "print('3 passed, 1 failed in 2 s'); print('leaked')"]
    result = gpu_first.call(prints, 20.0, tmp_path / "log")
    assert result["last_lines"][-1] == "3 passed, 1 failed in 2 s"
