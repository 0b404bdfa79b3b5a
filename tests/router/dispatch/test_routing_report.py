"""What the comparison of policies makes of its runs."""

from __future__ import annotations

from examples.benchmarks.routing.report import key_of, table, verdict


def runs(policy: str, *p99: float) -> list[dict[str, object]]:
    """One run per seed; every median is 10 ms."""
    figures = {"ttft_p50": 10.0, "hit_rate": 0.5, "balance": 1.0}
    return [
        {**key_of("a GPU", "uniform burst", policy, 8, seed), **figures, "ttft_p99": value}
        for seed, value in enumerate(p99)
    ]


def test_the_verdict_is_the_median_over_seeds_of_the_distance_to_each_seeds_best() -> None:
    others = [*runs("round_robin", 100, 100, 100), *runs("vllm_waiting", 120, 120, 50)]
    good = [*runs("prefix_aware", 90, 102, 100), *others, *runs("least_loaded", 1, 1, 1)]
    p50, p99 = verdict(good)
    assert p50.endswith("ok")
    assert "ttft_p99: 1.020 of the best (1.000 to 2.000, 3 seeds; best other round_robin)  ok" in p99
    assert "| 10 / 100 (0.50, 1.00) |" in table(good)
    assert "1.000 [1.00, 1.00] / 1.020 [1.00, 2.00]" in table(good)
    assert verdict([*runs("prefix_aware", 90, 104, 105), *others])[1].endswith("WORSE")


def test_noise_is_what_two_runs_of_the_same_differ_by() -> None:
    again = [
        {**run, "repeat": 1, "ttft_p99": 1.25 * float(str(run["ttft_p99"]))}
        for run in [*runs("prefix_aware", 90), *runs("round_robin", 100)]
    ]
    both = [*runs("prefix_aware", 90), *runs("round_robin", 100), *again]
    assert (
        "(1.000 to 1.000, 2 seeds; best other round_robin; two runs of the same differ 1.25 times)"
        in (verdict(both)[1])
    )
    assert "differ" not in verdict(again)[1]
