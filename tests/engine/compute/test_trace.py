from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.compute.trace import idle_share, write_chrome_trace


def test_idle_share() -> None:
    assert idle_share([(1.0, 2.0), (3.0, 4.0)], 0.0, 4.0) == 0.5
    assert idle_share([(0.0, 10.0)], 4.0, 6.0) == 0.0
    assert idle_share([], 1.0, 1.0) == 0.0


def test_a_trace_names_workers_and_their_steps(tmp_path: Path) -> None:
    said = write_chrome_trace(tmp_path / "t.json", {"PP0": [(1.0, 1.5)], "PP1": [(1.5, 2.0), (2.5, 3.0)]})
    assert said == "idle within 2.0 s: PP0 75%, PP1 50%"
    events = msgspec.json.decode((tmp_path / "t.json").read_bytes())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["PP0", "PP1"]
    boxes = [(event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert boxes == [(0, pytest.approx(1e6), pytest.approx(5e5)), (1, 1.5e6, 5e5), (1, 2.5e6, 5e5)]
