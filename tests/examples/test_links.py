"""Links between network namespaces, and how a step's length follows from them."""

from __future__ import annotations

import argparse
from statistics import median

import pytest

from examples.benchmarks.links import netns
from examples.benchmarks.links.netns import Link, link_of
from examples.benchmarks.links.step_model import Exchanges, exchanges_of, predicted, slope


def test_a_link_is_written_as_delay_and_rate() -> None:
    assert link_of("200:10") == Link(200, 10)
    assert link_of("50") == Link(50, 0)
    for wrong in ("fast", "-1", "1:2:3", ":"):
        with pytest.raises(argparse.ArgumentTypeError):
            link_of(wrong)


def test_bytes_take_the_delay_and_their_time_on_the_wire() -> None:
    assert Link(200, 10).seconds(1_250_000) == pytest.approx(200e-6 + 1e-3)
    assert Link(200).seconds(1 << 30) == pytest.approx(200e-6), "no bound of bytes"


def test_a_step_over_experts_waits_for_a_header_and_twice_per_layer() -> None:
    assert exchanges_of("ep", 8, 0.0, requests=8).count == 17
    assert exchanges_of("ep", 8, 0.0, requests=1).count == 16, "the other's header is there"
    assert exchanges_of("independent", 8, 100.0, requests=8) == Exchanges(0, 0.0)
    with pytest.raises(ValueError, match="layout"):
        exchanges_of("all", 8, 0.0, requests=1)


def test_a_step_is_its_compute_its_delays_and_its_bytes() -> None:
    seconds = predicted(0.003, Exchanges(17, 125_000), 200e-6, 10)
    assert seconds == pytest.approx(0.003 + 17 * 200e-6 + 100e-6)
    assert predicted(0.003, Exchanges(17, 125_000), 0.0, 0.0) == pytest.approx(0.003)


def test_the_number_of_exchanges_is_found_again_from_steps() -> None:
    exchanges = Exchanges(17, 0.0)
    steps = [(delay, predicted(0.003, exchanges, delay, 10)) for delay in (0.0, 50e-6, 200e-6)]
    assert slope(steps) == pytest.approx(17)
    with pytest.raises(ValueError, match="several delays"):
        slope([(50e-6, 0.1), (50e-6, 0.05)])


@pytest.mark.mesh
@pytest.mark.nightly
def test_packets_take_the_delay_and_the_rate_of_the_link() -> None:
    """The fastest tenth of small messages, since other work on the machine delays the rest."""
    if problem := netns.why_not():
        pytest.skip(problem)
    with netns.network() as made:
        for delay in (200.0, 1000.0):
            made.set(Link(delay))
            way = sorted(made.probe(repeats=500)[0])[50] / 2
            assert delay <= 1e6 * way + 20
            assert 1e6 * way < delay + 60
        made.set(Link(50, 1))
        num_bytes = 16 << 20
        seconds = median(made.probe("stream", (num_bytes,), repeats=2)[0])
        assert 0.5 < 8 * num_bytes / seconds / 1e9 < 1.0
