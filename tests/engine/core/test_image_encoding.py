"""Requests that wait for rows of their images from an encoder in the test's hands."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.image_encoding import ImageEncoding
from engine.messages import ImageCounters, Submit
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, from_submit

PLACEHOLDER = 9


class Encoder:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, int, Callable[[str, bool], None]]] = []

    def begin(self, image: PromptImage, num_rows: int, done: Callable[[str, bool], None]) -> None:
        self.asked.append((image.digest[:1], num_rows, done))


def request(number: int, *names: bytes) -> Request:
    """Three placeholders for each image, and a token of text before each."""
    images = tuple(PromptImage(4 * at + 1, 4 * at + 4, name * 16) for at, name in enumerate(names))
    submit = Submit(
        request=number, request_id=str(number), prompt_ids=[1, *[PLACEHOLDER] * 3] * len(names),
        params=SamplingParams(), seed=0, images=images,
    )  # fmt: skip
    return from_submit(submit, b"router", arrival=number, eos_ids=(), max_model_len=99)


def waiting_for(encoder: Encoder) -> ImageEncoding:
    encoding = ImageEncoding(PLACEHOLDER)
    encoding.encoder = encoder
    return encoding


def test_a_request_waits_for_all_its_images() -> None:
    encoder, calls = Encoder(), list[int]()
    encoding = waiting_for(encoder)
    encoding.on_done = lambda: calls.append(1)
    both, one = request(1, b"a", b"b"), request(2, b"c")
    assert encoding.takes(both, 0)
    assert encoding.takes(one, 0)
    assert [each[:2] for each in encoder.asked] == [(b"a", 3), (b"c", 3)]
    assert (both.key in encoding, len(encoding), encoding.num_tokens) == (True, 2, 12)
    encoder.asked[0][2]("", False)
    assert encoding.take() == []
    assert encoder.asked[2][0] == b"b", "the second image follows the first"
    encoder.asked[1][2]("", False)
    encoder.asked[2][2]("", False)
    assert encoding.take() == [(one, ""), (both, "")]
    assert (len(encoding), encoding.num_under_way, len(calls)) == (0, 0, 3)


def test_a_problem_ends_the_wait_at_once() -> None:
    encoder = Encoder()
    encoding, both = waiting_for(encoder), request(1, b"a", b"b")
    assert encoding.takes(both, 0)
    encoder.asked[0][2]("too wide", False)
    assert encoding.take() == [(both, "too wide")]
    assert len(encoder.asked) == 1


def test_what_is_cached_needs_no_rows() -> None:
    encoder = Encoder()
    encoding = waiting_for(encoder)
    assert not encoding.takes(request(1, b"a"), 4)
    assert encoding.takes(request(2, b"a", b"b"), 4)
    assert [each[0] for each in encoder.asked] == [b"b"]
    assert not ImageEncoding(None).takes(request(3, b"a"), 0)


def test_images_are_counted_by_what_was_done_for_them() -> None:
    encoder = Encoder()
    encoding = waiting_for(encoder)
    encoding.takes(request(1, b"a", b"b"), 4)
    encoding.takes(request(2, b"c"), 0)
    encoding.takes(request(3, b"b"), 0)
    for at, outcome in enumerate([("", False), ("too wide", False), ("", True)]):
        encoder.asked[at][2](*outcome)
    encoding.take()
    assert encoding.counters == ImageCounters(encoded=1, kept=1, cached=1, failed=1)
    assert ImageEncoding(None).counters is None


def test_a_forgotten_request_is_counted_until_its_image_is_done() -> None:
    encoder = Encoder()
    encoding, first = waiting_for(encoder), request(1, b"a", b"b")
    encoding.takes(first, 0)
    assert encoding.forget(first.key)
    assert not encoding.forget(first.key)
    assert (len(encoding), encoding.num_under_way) == (0, 1)
    again = request(1, b"c")
    encoding.takes(again, 0)
    encoder.asked[0][2]("", False)
    assert encoding.take() == [], "its answer is no answer to the new one of that number"
    encoder.asked[1][2]("", False)
    assert (encoding.take(), encoding.num_under_way) == ([(again, "")], 0)
