"""Several front ends, one /metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.faults import MAX_RECENT, FaultEvent, Faults
from router.mesh import ServedModel
from router.metrics.metrics import Metrics
from router.metrics.shared_counts import SharedCounts, Snapshot
from tests.router.fake_mesh import Facts, FakeMesh, saying
from tests.scarce import out_of_files

MODEL = ServedModel(("tiny",), "", 1, 1)
CHOOSING = FakeMesh(MODEL, saying([]), Facts(choices={"affinity_hits": 4}, numerics_changes={"true": 3}))


def front_end(directory: Path, number: int) -> Metrics:
    shared = SharedCounts(directory, f"router-{number}")
    metrics = Metrics(CHOOSING, shared=shared, alone=False)
    shared.write(metrics.snapshot())
    return metrics


def write(directory: Path, number: int, metrics: Metrics) -> None:
    SharedCounts(directory, f"router-{number}").write(metrics.snapshot())


def page(metrics: Metrics) -> dict[str, float]:
    lines = metrics.exposition("")[0].decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_each_front_end_tells_the_sum_of_all(tmp_path: Path) -> None:
    one, two = front_end(tmp_path, 0), front_end(tmp_path, 1)
    for metrics, count in ((one, 2), (two, 3)):
        metrics.in_flight = count
        metrics.success["0", "stop"] = count
        for _ in range(count):
            metrics.requests.ttft.of("0").observe(0.03)
        metrics.faults.record(FaultEvent.RESUME, "connection_lost", "4 requests", 1.0, 4)
        metrics.http.observe("POST", "/v1/completions", 200, 0.3)
    write(tmp_path, 0, one)
    write(tmp_path, 1, two)
    SharedCounts(tmp_path, "launcher").write(
        Snapshot(pid=1, faults=Faults(counts={FaultEvent.RESTART: {"engine": 1}}))
    )
    for metrics in (one, two):
        found = page(metrics)
        assert found['vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}'] == 5
        labels = 'engine="0",model_name="tiny"'
        assert found[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 5
        assert found['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="tiny"}'] == 0
        assert found['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="tiny"}'] == 5
        assert found["lockstep:requests_in_flight"] == 5
        assert found['lockstep:faults_total{event="resume",kind="connection_lost"}'] == 8
        assert found['lockstep:faults_total{event="restart",kind="engine"}'] == 1
        assert found['lockstep:choices_total{outcome="affinity_hits"}'] == 8
        assert found['lockstep:numerics_changes_total{promised="true"}'] == 6
        http = 'handler="/v1/completions",method="POST"'
        assert found[f'http_requests_total{{{http},status="2xx"}}'] == 2
        assert found[f"http_request_duration_seconds_count{{{http}}}"] == 2
        assert not any(name.startswith("process_") for name in found), "they would be of one of the two"


def test_counters_outlive_the_process_that_counted(tmp_path: Path) -> None:
    one = front_end(tmp_path, 0)
    one.success["0", "stop"] = 7
    one.requests.ttft.of("0").observe(0.1)
    one.in_flight = 3
    one.faults.record(FaultEvent.DETECTION, "connection_lost", "x", 1.0)
    write(tmp_path, 0, one)
    before = page(one)
    assert before["lockstep:requests_in_flight"] == 3
    restarted = FakeMesh(MODEL, saying([]))
    again = Metrics(restarted, shared=SharedCounts(tmp_path, "router-0"), alone=False)
    assert page(again) == {**before, "lockstep:requests_in_flight": 0.0}


def test_what_a_scrape_was_told_outlives_who_told_it(tmp_path: Path) -> None:
    one, two = front_end(tmp_path, 0), front_end(tmp_path, 1)
    one.success["0", "stop"] = 3
    two.success["0", "stop"] = 4
    name = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}'
    assert page(one)[name] == 3, "the other has not written yet"
    assert page(two)[name] == 7
    assert page(front_end(tmp_path, 0))[name] == 7, "started again"


def test_what_a_dead_front_end_had_in_flight_is_no_longer_counted(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    SharedCounts(tmp_path, "router-1").write(Snapshot(pid=dead.pid, in_flight=9))
    SharedCounts(tmp_path, "router-2").write(Snapshot(pid=os.getpid(), in_flight=2))
    assert page(front_end(tmp_path, 0))["lockstep:requests_in_flight"] == 2


def test_a_full_disk_is_not_said_twice_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = SharedCounts(tmp_path / "gone", "router-0")
    for number in range(5):
        missing.write(Snapshot(pid=number))
    (said,) = caplog.messages
    assert "the counts of this process cannot be kept" in said
    assert "No such file or directory" in said


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "router-1.counts").write_bytes(b"torn")
    assert page(front_end(tmp_path, 0))["lockstep:requests_in_flight"] == 0
    assert SharedCounts(tmp_path, "router-1").own() is None
    missing = SharedCounts(tmp_path / "gone", "router-0")
    missing.write(Snapshot(pid=1))
    assert missing.others() == []


def test_the_list_of_faults_is_bounded() -> None:
    one, two = Faults(), Faults()
    for number in range(MAX_RECENT + 10):
        one.record(FaultEvent.DETECTION, "removed", f"{number}", float(number))
        two.record(FaultEvent.RESUME, "removed", "x" * 1000, number + 0.5, 2)
    total = Faults.merged([one, two])
    assert total.counts[FaultEvent.DETECTION]["removed"] == MAX_RECENT + 10
    assert total.counts[FaultEvent.RESUME]["removed"] == 2 * (MAX_RECENT + 10)
    assert len(one.recent) == len(total.recent) == MAX_RECENT
    assert [fault.at for fault in total.recent] == sorted(fault.at for fault in total.recent)
    assert total.recent[-1].at == MAX_RECENT + 9.5


def test_no_sum_falls_for_want_of_a_file(tmp_path: Path) -> None:
    one, two = front_end(tmp_path, 0), front_end(tmp_path, 1)
    two.success["0", "stop"] = 5
    write(tmp_path, 1, two)
    name = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}'
    assert page(one)[name] == 5
    with out_of_files():
        assert page(one)[name] == 5
