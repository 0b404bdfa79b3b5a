"""The script for bits on a GPU, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.benchmarks.gpu import bits_matrix, gpu_bits


def test_the_matrix_of_operators_is_written_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows and one context here, in Triton's interpreter."""
    sizes = bits_matrix.Sizes(64, 96, 4, 2, 16, 300, 4, 64, 48, 2, (1, 2), (20,), 5, 40)
    monkeypatch.setattr(bits_matrix, "TINY", sizes)
    output = tmp_path / "bits.json"
    assert bits_matrix.main(["--device", "cpu", "--tiny", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["batch-invariant"] == {"differ": [], "first": None}
    for mode in bits_matrix.MODES:
        cells = [each for each in found["cells"] if each["mode"] == mode]
        attention = [each for each in cells if each["operator"] == "attention"]
        assert {(each["rows"], each["how"]) for each in attention} == {
            (rows, how) for rows in (1, 2) for how in ("eager", "graph")
        }
        assert len({each["operator"] for each in cells}) == 11
    late = tmp_path / "late.json"
    bits_matrix.main(["--device", "cpu", "--tiny", "--seconds", "0", "--output", str(late)])
    assert not late.exists()


def test_an_operator_that_differs_is_named(tmp_path: Path) -> None:
    report = bits_matrix.Report(tmp_path / "bits.json")
    for rows, equal in ((1, True), (8, False), (32, False)):
        report.add(operator="product: down", mode="default", rows=rows, equal=equal, ms=1.0)
    first = json.loads(report.path.read_text())["default"]["first"]
    assert (first["operator"], first["rows"]) == ("product: down", 8)
    steps = [{"rows": 1, "sampling": "greedy", "step_ms": ms} for ms in (2.0, 2.5)]
    results = {
        "operators": report.summary(),
        "steps": {"rows": steps[:1]},
        "steps batch-invariant": {"rows": steps[1:]},
    }
    printed = gpu_bits.table(results)
    assert "default: product: down" in printed
    assert "batch-invariant: all equal" in printed
    assert "(+25%)" in printed
