"""Metrics of KV blocks in files."""

from __future__ import annotations

import msgspec

from engine.messages import Counters, FileCounters, InstanceReport
from router.metrics.file_metrics import of_files


def test_instances_with_files_have_them_and_a_disk_that_hangs_shows() -> None:
    without = InstanceReport(0, 0, 0, 0, 0, 10, Counters())
    files = FileCounters(found_blocks=7, directory_bytes=4096, hung_seconds=12.5)
    reports = {0: without, 1: msgspec.structs.replace(without, files=files)}
    found = {
        sample.name: (sample.labels["engine"], sample.value)
        for family in of_files("m", reports)
        for sample in family.samples
    }
    assert found["lockstep:kv_cache_dir_hung_seconds"] == ("1", 12.5)
    assert found["lockstep:kv_cache_dir_bytes"] == ("1", 4096)
    assert found["vllm:kv_offload_tiering_block_hits_total"] == ("1", 7)


def test_a_report_of_an_older_instance_hangs_not() -> None:
    data = msgspec.msgpack.encode(msgspec.to_builtins(FileCounters())[:-1])
    assert msgspec.msgpack.decode(data, type=FileCounters).hung_seconds == 0
