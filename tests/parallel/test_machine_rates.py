"""Rates of this machine by kind of kernels, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel import compiler, machine_rates
from parallel.kernel_kinds import KINDS
from parallel.machine_rates import LARGE, MachineRates, best_kind, cache_sizes, measure_machine, probe
from router.tools.bench import command

WIDER = {"bfloat16": 2, "int8": 4}
"""Numbers of a type in the place of one float32."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "TIMES", 2)
    monkeypatch.setattr(machine_rates, "LARGE", 1 << 22)


@pytest.fixture
def rates(quick: None) -> MachineRates:
    found = measure_machine()
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def test_rates_are_positive_and_caches_grow_with_their_level(rates: MachineRates) -> None:
    kind = best_kind()
    assert rates.kind == ("torch" if kind is None else kind.name)
    assert rates.cores >= 1
    assert rates.one_core["float32"] > 0
    assert rates.one_core.keys() == rates.all_cores.keys()
    assert min(*rates.all_cores.values(), rates.read_one_core, rates.read_all_cores) > 0
    assert list(rates.caches.values()) == sorted(rates.caches.values())


@pytest.mark.parametrize("name", ["avx512", "avx512f", "avxvnni", "avx2"])
def test_types_are_those_of_the_kind_of_kernels(name: str) -> None:
    if not KINDS[name].needs <= compiler.cpu_flags():
        pytest.skip("this CPU has no such vectors")
    found = probe(KINDS[name])
    if found is None:
        pytest.skip("no C++ compiler here")
    has = {each for each in WIDER if found.operations(each, 1)}
    of_bytes = {"int8"} if "avx512_vnni" in compiler.cpu_flags() else set()
    expected = {"avx512": {"bfloat16", "int8"}, "avx512f": of_bytes, "avxvnni": {"int8"}, "avx2": set()}
    assert has == expected[name]


def test_a_kind_that_this_cpu_lacks_falls_back() -> None:
    kind = best_kind("amx")
    assert kind is None or kind.needs <= compiler.cpu_flags()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [1 << 16, LARGE >> 6])
def test_blocks_of_any_size_are_read(threads: int, num_bytes: int) -> None:
    found = probe(best_kind())
    if found is None:
        pytest.skip("no C++ compiler here")
    assert found.reading(threads, num_bytes, times=2) > 0


def test_caches_of_instructions_are_left_out(tmp_path: Path) -> None:
    for index, values in enumerate(
        (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "32M"))
    ):
        (tmp_path / f"index{index}").mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (tmp_path / f"index{index}" / name).write_text(f"{value}\n")
    assert cache_sizes(tmp_path) == {"L1": 48 << 10, "L3": 32 << 20}
    assert cache_sizes(tmp_path / "absent") == {}


def test_the_command_prints_lines_or_json(
    rates: MachineRates, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "router.tools.bench.machine_command.measure_machine", lambda kind: (asked.append(kind), rates)[1]
    )
    assert command.main(["machine", "--json", "--kind", "avx2"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (page["kind"], page["all_cores"]) == (rates.kind, rates.all_cores)
    assert command.main(["machine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernels", rates.kind]
    assert any(line.startswith("memory ") and "GB/s by one core" in line for line in lines)
    assert asked == ["avx2", ""]


def test_without_a_compiler_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.tools.bench.machine_command.measure_machine", lambda _: None)
    assert command.main(["machine"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err
