"""Recorded samples and their first difference."""

from __future__ import annotations

import math

import pytest

from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams
from router.mesh import Prompt
from router.recorded import Difference, RecordedSample, Recorder, bits_of, first_difference, with_logprobs

SAMPLE = RecordedSample((5, 6, 7), (-0.5, -0.25, None), "stop", "END")


def logprobs(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(9, value, 1, [], []) for value in values]


def test_a_recorder_keeps_tokens_with_their_log_probabilities() -> None:
    recorder = Recorder()
    recorder.add([5], logprobs(-0.5))
    recorder.add([6, 7], logprobs(-0.25, math.nan))
    assert recorder.sample("stop", "END") == SAMPLE


def test_tokens_behind_a_stop_string_are_not_recorded() -> None:
    recorder = Recorder()
    recorder.add([5], logprobs(-0.5, -0.25))
    assert recorder.sample("stop", None) == RecordedSample((5,), (-0.5,), "stop")


def test_a_sample_has_a_log_probability_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens have 1 log-probabilities"):
        RecordedSample((5, 6), (-0.5,), "stop")


def test_equal_samples_have_no_difference() -> None:
    assert first_difference(SAMPLE, RecordedSample((5, 6, 7), (-0.5, -0.25, None), "stop", "END")) is None


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        (
            RecordedSample((5, 8, 7), (-0.5, -0.25, None), "stop", "END"),
            Difference(1, (6, -0.25), (8, -0.25)),
        ),
        (
            RecordedSample((5, 6, 7), (-0.5, math.nextafter(-0.25, 0), None), "stop", "END"),
            Difference(1, (6, -0.25), (6, math.nextafter(-0.25, 0))),
        ),
        (
            RecordedSample((5, 6), (-0.5, -0.25), "length"),
            Difference(2, (7, None), None, "stop ('END')", "length"),
        ),
        (
            RecordedSample((5, 6, 7, 8), (-0.5, -0.25, None, -1.0), "length"),
            Difference(3, None, (8, -1.0), "stop ('END')", "length"),
        ),
        (
            RecordedSample((5, 6, 7), (-0.5, -0.25, None), "length"),
            Difference(3, None, None, "stop ('END')", "length"),
        ),
    ],
)
def test_the_first_difference_is_named(found: RecordedSample, difference: Difference) -> None:
    assert first_difference(SAMPLE, found) == difference


def test_tokens_of_another_class_are_left_out() -> None:
    found = RecordedSample((5, 6, 8, 9), (-0.5, -0.25, -2.0, -2.0), "length")
    assert first_difference(SAMPLE, found, up_to=2) is None
    assert first_difference(SAMPLE, found, up_to=3) == Difference(2, (7, None), (8, -2.0))


def test_minus_zero_is_recorded_as_zero() -> None:
    recorder = Recorder()
    recorder.add([5], logprobs(-0.0))
    assert str(recorder.sample("length", None).logprobs) == "(0.0,)"


@pytest.mark.parametrize(
    ("value", "bits"),
    [(-0.5, "bf000000"), (None, "not finite"), (0.1, "3fb999999999999a"), (1e300, "7e37e43c8800759c")],
)
def test_bits_of_a_log_probability(value: float | None, bits: str) -> None:
    assert bits_of(value) == bits


def test_log_probabilities_are_asked_for_where_the_client_did_not() -> None:
    prompt = Prompt("id", [1], SamplingParams(top_k=3), seed=1)
    assert with_logprobs(prompt).params == SamplingParams(top_k=3, logprobs=0)
    prompt = Prompt("id", [1], SamplingParams(logprobs=4), seed=1)
    assert with_logprobs(prompt) is prompt
