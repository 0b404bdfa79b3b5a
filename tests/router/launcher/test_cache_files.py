"""Memory of KV caches: who holds it, and until when."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine.inheritance.names import MEMORY_VARIABLE, PREDECESSOR_VARIABLE
from router.launcher.cache_files import CacheFiles


@pytest.fixture
def files() -> Iterator[CacheFiles]:
    files = CacheFiles()
    yield files
    files.close()


def test_a_dead_cache_is_kept_until_its_successor_serves(files: CacheFiles) -> None:
    first = files.begin(1)
    assert PREDECESSOR_VARIABLE not in first
    second = files.begin(1)
    assert second[PREDECESSOR_VARIABLE] == first[MEMORY_VARIABLE]
    assert os.path.exists(first[MEMORY_VARIABLE])
    files.serves(1)
    assert not os.path.exists(first[MEMORY_VARIABLE])
    assert os.path.exists(second[MEMORY_VARIABLE])


def test_a_place_has_one_dead_cache_at_most(files: CacheFiles) -> None:
    first, second, third = (dict(files.begin(1)) for _ in range(3))
    assert not os.path.exists(first[MEMORY_VARIABLE]) or first[MEMORY_VARIABLE] == third[MEMORY_VARIABLE]
    assert third[PREDECESSOR_VARIABLE] == second[MEMORY_VARIABLE]
    assert repr(files) == "<CacheFiles 1 in use, 1 dead>"


def test_nothing_is_kept_of_one_that_ended_in_order(files: CacheFiles) -> None:
    first = files.begin(1)
    files.forget(1)
    assert not os.path.exists(first[MEMORY_VARIABLE])
    assert PREDECESSOR_VARIABLE not in files.begin(1)
