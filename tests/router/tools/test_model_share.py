"""Share of the machine's limits that a model's steps reach, and its print."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from engine.roofline.facts import RooflineRequest, StepFacts
from parallel.machine_rates import MachineRates
from router.tools.bench import command
from router.tools.bench.model_share import ModelShare, measure_model, share_of

RATES = MachineRates(
    kind="avx2",
    cores=2,
    one_core={"float32": 100.0},
    all_cores={"float32": 200.0, "int8": 800.0},
    read_one_core=20.0,
    read_all_cores=40.0,
    caches={},
)


@pytest.mark.parametrize(
    ("read_gb", "gflop", "rounds", "share", "limit"),
    [
        (1.0, 2.0, False, 0.5, "memory"),
        (1.0, 8.0, False, 0.8, "products"),
        (1.0, 8.0, True, 0.5, "memory"),  # whose products are those of bytes
        (1.0, 32.0, True, 0.8, "products"),
    ],
)
def test_the_nearest_limit_counts(
    read_gb: float, gflop: float, rounds: bool, share: float, limit: str
) -> None:
    step = StepFacts(1, 0.05, read_gb * 1e9, gflop * 1e9)
    found = share_of(step, RATES, "bfloat16", rounds=rounds)
    assert (found.share, found.limit) == (pytest.approx(share), limit)


def test_the_command_prints_steps_as_lines_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = share_of(StepFacts(8, 0.05, 1e9, 2e9), RATES, "bfloat16", rounds=False)
    asked: list[RooflineRequest] = []

    def measured(ask: RooflineRequest, rates: MachineRates) -> ModelShare:
        asked.append(ask)
        return ModelShare(ask.model, rates.kind, [step])

    monkeypatch.setattr("router.tools.bench.machine_command.measure_machine", lambda _: RATES)
    monkeypatch.setattr("router.tools.bench.machine_command.measure_model", measured)
    assert command.main(["machine", "--model", "m", "-q", "int4"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split(maxsplit=3)[3] == "50.00 ms, 20.0 GB/s, 40 G/s: 50 % of what memory allows"
    assert command.main(["machine", "--model", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["steps"][0]["share"] == 0.5
    assert [(ask.threads, ask.quantization) for ask in asked] == [(2, "int4"), (2, None)]


def test_a_model_that_is_not_there_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.tools.bench.machine_command.measure_machine", lambda _: RATES)
    assert command.main(["machine", "--model", str(tmp_path / "absent")]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'absent'} cannot be measured" in error


def test_a_process_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr("router.tools.bench.model_share.subprocess.run", run)
    found = measure_model(RooflineRequest("m", 1), RATES)
    assert found == "the steps of m were not measured within 1800 s"
