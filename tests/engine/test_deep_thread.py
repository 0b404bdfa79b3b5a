from __future__ import annotations

import pytest

from engine.deep_thread import DeepThread


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


def panic() -> None:
    raise Panic("in Rust")


def test_a_panic_reaches_whoever_waits_and_not_the_next() -> None:
    thread = DeepThread("test")
    failed, after = thread.submit(panic), thread.submit(lambda: 7)
    with pytest.raises(Panic):
        failed.result(10)
    assert after.result(10) == 7
