"""The metrics page for Prometheus."""

from __future__ import annotations

import re

import msgspec

from coordinator.messages import Role
from coordinator.numerics import Numerics
from engine.messages import Counters, InstanceReport, LockstepCounters
from parallel.links.counts import LinkCount
from router.config import HttpConfig
from router.mesh import ServedModel
from router.metrics.metrics import Metrics
from router.metrics.report_metrics import of_reports
from router.text.tokens import Tokenizer
from tests.router.conftest import serving
from tests.router.fake_mesh import Facts, FakeMesh, failing, saying


def test_metrics(served: ServedModel) -> None:
    mesh = FakeMesh(served, saying([70, 71, 72]))
    sizes = [0, 4, 3] + [0] * 11
    report = InstanceReport(
        9, 2, 3, 40, 25, 100, Counters(11, 12, 1, 50, 7, 7, 0, scheduled_tokens=60, step_sizes=sizes)
    )
    facts = Facts(
        reports={1: report},
        epoch=4,
        instances={"ready": 2},
        refused_peers={"coordinator": 5, "0": 1},
        roles={0: Role.MIXED, 1: Role.PREFILL},
        choices={"affinity_hits": 3, "moves": 2},
        numerics_changes={"true": 2},
        shadow_checks={"equal": 5, "odd": 1},
        shadow_differences={"2": 1},
        numerics={
            Numerics("fp_1", "amx", "bfloat16", True): [0, 2],
            Numerics("fp_2", "torch", "float32", False): [1],
        },
    )
    metrics = Metrics(FakeMesh(served, mesh.script, facts))
    with serving(mesh, HttpConfig()) as server:
        server.post("/v1/completions", {"prompt": "a", "n": 2})
        server.client.post("/v1/completions", json={"prompt": "a"}, headers={"X-data-parallel-rank": "1"})
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        page = server.client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=")
        values = parsed(page.text)
        zero, one = '{engine="0",model_name="tiny"}', '{engine="1",model_name="tiny"}'
        assert values[f"vllm:time_to_first_token_seconds_count{zero}"] == 3
        assert values[f"vllm:inter_token_latency_seconds_count{zero}"] == 4
        assert values[f"vllm:inter_token_latency_seconds_count{one}"] == 2
        assert values[f"vllm:e2e_request_latency_seconds_count{one}"] == 1
        assert values[f"vllm:request_generation_tokens_sum{zero}"] == 7
        assert values[f"vllm:request_params_n_sum{zero}"] == 3
        assert values[f"vllm:request_params_max_tokens_sum{one}"] == 16
        assert values['vllm:request_prompt_tokens_bucket{engine="1",le="2.0",model_name="tiny"}'] == 1
        assert values['vllm:request_prompt_tokens_bucket{engine="1",le="+Inf",model_name="tiny"}'] == 1
        assert (
            values['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 3
        )
        assert values["lockstep:requests_in_flight"] == 0
        openmetrics = server.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert openmetrics.text.endswith("# EOF\n")
        assert "\nvllm:request_success_total{" in openmetrics.text  # not vllm_request_success_total
    values = parsed(metrics.exposition("")[0].decode())
    results = {name: value for name, value in values.items() if name.startswith("lockstep:shadow_")}
    assert results == {
        'lockstep:shadow_checks_total{result="equal"}': 5,
        'lockstep:shadow_checks_total{result="odd"}': 1,
        'lockstep:shadow_checks_total{result="undecided"}': 0,
        'lockstep:shadow_checks_total{result="lost"}': 0,
        'lockstep:shadow_checks_total{result="dropped"}': 0,
        'lockstep:shadow_checks_total{result="skipped"}': 0,
        'lockstep:shadow_differences_total{rank="2"}': 1,
    }
    classes = {name: value for name, value in values.items() if name.startswith("lockstep:numerics_class")}
    assert classes == {
        'lockstep:numerics_class{dtype="bfloat16",fingerprint="fp_1",invariant="true",kernels="amx"}': 2,
        'lockstep:numerics_class{dtype="float32",fingerprint="fp_2",invariant="false",kernels="torch"}': 1,
    }
    told = {name: value for name, value in values.items() if one in name and not name.endswith(f"_sum{one}")}
    assert {name: value for name, value in told.items() if value} == {
        f"vllm:num_requests_running{one}": 2,
        f"vllm:num_requests_waiting{one}": 3,
        f"vllm:kv_cache_usage_perc{one}": 0.25,
        f"vllm:prompt_tokens_total{one}": 11,
        f"vllm:generation_tokens_total{one}": 12,
        f"vllm:num_preemptions_total{one}": 1,
        f"vllm:prefix_cache_queries_total{one}": 50,
        f"vllm:prefix_cache_hits_total{one}": 7,
        f"vllm:prompt_tokens_cached_total{one}": 7,
        f"vllm:iteration_tokens_total_count{one}": 7,
    }
    assert told[f"vllm:request_queue_time_seconds_count{one}"] == 0  # there before anything happened
    kinds = {
        name.partition("{")[0] + of.group(0): value
        for name, value in values.items()
        if 'engine="1"' in name and (of := re.search(r'(reason|source|sleep_state)="\w+"', name))
    }
    assert kinds == {
        **{
            f'vllm:request_success_totalreason="{reason}"': 0
            for reason in ("abort", "error", "length", "stop")
        },
        'vllm:num_requests_waiting_by_reasonreason="capacity"': 3,
        'vllm:num_requests_waiting_by_reasonreason="deferred"': 0,
        'vllm:engine_sleep_statesleep_state="awake"': 1,
        'vllm:engine_sleep_statesleep_state="weights_offloaded"': 0,
        'vllm:engine_sleep_statesleep_state="discard_all"': 0,
        'vllm:prompt_tokens_by_source_totalsource="local_compute"': 4,
        'vllm:prompt_tokens_by_source_totalsource="local_cache_hit"': 7,
        'vllm:prompt_tokens_by_source_totalsource="external_kv_transfer"': 0,
    }
    assert values['vllm:iteration_tokens_total_bucket{engine="1",le="8.0",model_name="tiny"}'] == 4
    assert (values["lockstep:epoch"], values['lockstep:instances{state="ready"}']) == (4, 2)
    assert values['lockstep:refused_peers_total{by="coordinator"}'] == 5
    assert values['lockstep:refused_peers_total{by="0"}'] == 1
    roles = {name for name in values if name.startswith("lockstep:instance_role")}
    assert roles == {
        'lockstep:instance_role{engine="0",role="mixed"}', 'lockstep:instance_role{engine="1",role="prefill"}',
    }  # fmt: skip
    outcomes = ("affinity_hits", "affinity_misses", "moves", "queue_full")
    choices = [values[f'lockstep:choices_total{{outcome="{outcome}"}}'] for outcome in outcomes]
    assert choices == [3, 0, 2, 0]
    changes = [
        values[f'lockstep:numerics_changes_total{{promised="{promised}"}}'] for promised in ("true", "false")
    ]
    assert changes == [2, 0]


def test_an_error_is_no_token(served: ServedModel) -> None:
    mesh = FakeMesh(served, failing("broken"))
    with serving(mesh, HttpConfig()) as server:
        for num_samples in (1, 2):
            assert server.post("/v1/completions", {"prompt": "a", "n": num_samples}).status_code == 400
        mesh.script = failing("broken", after=[70, 71])
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 400
        values = parsed(server.client.get("/metrics").text)
    assert values['vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"}'] == 1
    assert values['vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"}'] == 1


def parsed(page: str) -> dict[str, float]:
    """Samples by name and labels, these sorted."""
    values = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        metric, _, labels = name.partition("{")
        ordered = ",".join(sorted(labels.removesuffix("}").split(","))) if labels else ""
        values[f"{metric}{{{ordered}}}" if ordered else metric] = float(value)
    return values


def test_tokens_behind_a_stop_string_count_for_instances_alone(
    served: ServedModel, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" Hello world! Hello world!", add_special_tokens=False)
    report = InstanceReport(0, 0, 0, 0, 0, 100, Counters(generation_tokens=len(ids)))
    mesh = FakeMesh(served, saying(ids), Facts(reports={0: report}))
    with serving(mesh, HttpConfig()) as server:
        body = {"prompt": "a", "max_tokens": 100, "stop": "world"}
        usage = server.post("/v1/completions", body).json()["usage"]
        page = server.client.get("/metrics").text
    values, labels = parsed(page), '{engine="0",model_name="tiny"}'
    assert usage["completion_tokens"] < len(ids)
    assert values[f"vllm:request_generation_tokens_sum{labels}"] == usage["completion_tokens"]
    assert values[f"vllm:generation_tokens_total{labels}"] == len(ids)
    (told,) = re.findall(r"# HELP vllm:generation_tokens_total (.*)", page)
    assert "stop strings" in told


def test_links_are_counted_by_peer_and_direction() -> None:
    lockstep = LockstepCounters(
        5,
        1,
        2,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        30,
        20.0,
        {},
        step_counts=[0] * 15,
        links={2: LinkCount(700, 900, 1.5)},
    )
    report = InstanceReport(0, 0, 0, 0, 0, 100, Counters(), lockstep)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=InstanceReport)
    assert decoded == report
    samples = {
        (sample.name, sample.labels.get("direction")): (sample.value, sample.labels["engine"])
        for family in of_reports("tiny", {1: decoded, 2: InstanceReport(0, 0, 0, 0, 0, 100, Counters())})
        for sample in family.samples
        if sample.labels.get("peer") == "2"
    }
    assert samples == {
        ("lockstep:link_bytes_total", "sent"): (700, "1"),
        ("lockstep:link_bytes_total", "received"): (900, "1"),
        ("lockstep:link_wait_seconds_total", None): (1.5, "1"),
    }


def test_counts_of_pooling_are_shown_once_there_are_any() -> None:
    counters = {0: Counters(), 1: Counters(pooled_requests=7, pooled_tokens=90, pooled_steps=2, not_finite=3)}
    reports = {rank: InstanceReport(0, 0, 0, 0, 0, 100, each) for rank, each in counters.items()}
    samples = {
        sample.name.removeprefix("lockstep:pooling_"): (sample.labels["engine"], sample.value)
        for family in of_reports("tiny", reports)
        for sample in family.samples
        if sample.name.startswith("lockstep:pooling")
    }
    assert samples == {
        "requests_total": ("1", 7), "tokens_total": ("1", 90), "steps_total": ("1", 2),
        "not_finite_total": ("1", 3),
    }  # fmt: skip
