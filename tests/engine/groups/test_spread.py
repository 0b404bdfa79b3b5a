"""Experts that an instance holds before its first group is known."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from engine.config import EngineConfig
from engine.groups.spread import Spread, first_share
from engine.settings import resolve


@pytest.mark.parametrize(
    ("rank", "share"),
    [
        (0, (0, 2)),
        (1, (1, 2)),
        (2, (2, 3)),  # a third one will get about a third
        (7, (7, 8)),
        (8, (0, 8)),  # there are no more experts than eight: something that a dead one may have held
        (19, (3, 8)),
    ],
)
def test_newcomers_load_about_what_they_will_get(rank: int, share: tuple[int, int]) -> None:
    settings = resolve(EngineConfig(), 2)[1]
    assert settings.num_experts == 8
    assert first_share(rank, settings) == share


def test_newcomers_of_several_ranks_load_a_share_for_each() -> None:
    settings = msgspec.structs.replace(resolve(EngineConfig(), 2)[1], tensor_parallel_size=2)
    assert [first_share(rank, settings) for rank in (1, 2, 3, 4)] == [(1, 2), (2, 3), (3, 4), (0, 4)]


def test_a_mesh_as_large_as_its_experts_are_many() -> None:
    settings = msgspec.structs.replace(resolve(EngineConfig(), 2)[1], data_parallel_size=8)
    assert [first_share(rank, settings) for rank in range(8)] == [(rank, 8) for rank in range(8)]


@pytest.mark.parametrize(("sharers", "each"), [(None, 20), (1, 160), (2, 80)])
def test_spare_memory_is_shared_by_those_that_share_it(sharers: int | None, each: int) -> None:
    """On a CPU all instances of the host do.

    A device belongs to those that compute on it."""
    spread = Spread.__new__(Spread)
    spread._sharers = sharers
    spread._membership = SimpleNamespace(neighbours=8)
    spread._executor = SimpleNamespace(
        spare_memory=lambda: 160, max_experts=lambda free_bytes: free_bytes // 2
    )
    assert spread._max_experts() == each // 2
