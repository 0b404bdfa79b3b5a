"""Metrics of low-rank adapters."""

from __future__ import annotations

import msgspec

from engine.messages import AdapterUse, Counters, InstanceReport
from router.metrics.report_metrics import of_reports


def test_adapters_stand_in_the_labels_that_gateways_read() -> None:
    without = InstanceReport(0, 0, 0, 0, 0, 10, Counters())
    use = AdapterUse(2, ["poet", "lawyer"], [])
    reports = {0: without, 1: msgspec.structs.replace(without, adapters=use)}
    (sample,) = [
        sample
        for family in of_reports("m", reports)
        for sample in family.samples
        if sample.name == "vllm:lora_requests_info"
    ]
    assert sample.labels == {
        "max_lora": "2",
        "running_lora_adapters": "poet,lawyer",
        "waiting_lora_adapters": "",
        "engine": "1",
    }
    names = {sample.name for family in of_reports("m", {0: without}) for sample in family.samples}
    assert "vllm:lora_requests_info" not in names
