"""Metrics of expert load balancing, from the coordinator's view."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from coordinator.messages import ExpertBalance

Family = CounterMetricFamily | GaugeMetricFamily


class LastChange:
    """Tracks when the count of rebalancings last rose."""

    def __init__(self) -> None:
        self._changes: int | None = None
        self._at = 0.0

    def look(self, changes: int, now: float) -> float:
        """Seconds since the last rebalancing began, or since the first call."""
        if changes != self._changes:
            self._changes, self._at = changes, now
        return now - self._at


def balance_metrics(balance: ExpertBalance, since_change: float) -> Iterator[Family]:
    """Gauges of the newest window of steps, and counters since the coordinator began.

    ``since_change``: see :class:`LastChange`.
    """
    yield GaugeMetricFamily(
        "lockstep:eplb_balancedness",
        "Mean over maximum of the instances' rows in expert layers, in the newest window of steps.",
        balance.balancedness,
    )
    by_layer = GaugeMetricFamily(
        "lockstep:eplb_layer_balancedness", "The same for each layer with experts.", labels=("layer",)
    )
    for layer, value in enumerate(balance.by_layer):
        by_layer.add_metric((str(layer),), value)
    yield by_layer
    held = GaugeMetricFamily(
        "lockstep:eplb_copies", "Copies of experts that an instance holds, over all layers.", labels=("rank",)
    )
    for rank, copies in sorted(balance.held.items()):
        held.add_metric((str(rank),), copies)
    yield held
    replicas = GaugeMetricFamily(
        "lockstep:eplb_expert_copies", "Copies of an expert, over all layers.", labels=("expert",)
    )
    for expert, copies in enumerate(balance.replicas):
        replicas.add_metric((str(expert),), copies)
    yield replicas
    yield GaugeMetricFamily(
        "lockstep:eplb_least_copies", "Copies of the expert that has fewest.", balance.copies
    )
    yield GaugeMetricFamily(
        "lockstep:eplb_seconds_since_rebalancing",
        "Since this router saw at a scrape that a rebalancing had begun, or since its first scrape.",
        since_change,
    )
    yield GaugeMetricFamily(
        "lockstep:eplb_failing",
        "1 if the last three rebalancings have failed, or no loads came from all for three intervals.",
        int(balance.is_failing),
    )
    for name, text, value in (
        ("windows", "Windows of steps whose loads are known.", balance.windows),
        ("rebalancings", "Groups that were formed to move experts, and have begun.", balance.changes),
        ("failed_rebalancings", "Groups that were formed to move experts, and have not.", balance.failures),
        ("moves", "Copies of experts that moved.", balance.moves),
        ("moved_bytes", "Memory of these copies, with what kernels make of them.", balance.moved_bytes),
        ("rebalancing_seconds", "From the plan of a rebalancing until all step in it.", balance.seconds),
    ):
        yield CounterMetricFamily(f"lockstep:eplb_{name}", text, value)
