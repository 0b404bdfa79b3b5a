"""Adapters of spread experts: rows keep theirs, and their bits, wherever an expert is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.messages import AdapterSource
from engine.adapters.adapter_settings import settled
from engine.adapters.held import HeldAdapters
from engine.kernels.adapters.sites import AdapterRoom
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.make import make_program
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from tests.engine.adapters.made_adapters import make_adapter
from tests.engine.kernels.exchange.test_native_exchange import CACHE, Member, together
from tests.engine.kernels.test_kernels import everything, packed_rows
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

SETTINGS: dict[str, Any] = {
    "target_modules": ["q_proj", "embed_tokens"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
NAMES = ("a", "b", "c")
ROWS = [(0, 0, 9), (1, 0, 4), (2, 0, 6)]
ADAPTERS = ["a", "", "b"], ["c", "a", ""], ["", "", ""]
"""Adapters of the rows of each member."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")
    for number, name in enumerate(NAMES):
        make_adapter(place, place / name, seed=number, **SETTINGS)
    return place


class AdaptedMember(Member):
    """An instance that holds all adapters; its numbers for them are its own."""

    def __init__(self, directory: Path, rank: int, size: int, dtype: torch.dtype) -> None:
        super().__init__(directory, rank, size, dtype)
        program = make_program(self.model, CACHE["block_size"], AdapterRoom(adapters=2, rank=16, held=4))
        assert program is not None, "it was tried out before there was a group"
        self.program = program
        self.program.use(NativeCache(self.model.layers, dtype=dtype, **CACHE))
        if size > 1:
            self.program.spread()
        assert self.program.sites is not None
        self.held = HeldAdapters(self.model, self.program.sites)
        sources = [settled(AdapterSource(name, str(directory / name))) for name in NAMES]
        self.digests = {source.name: source.digest for source in sources}
        self.held.load(sources[rank:] + sources[:rank])
        self._is_odd = bool(rank % 2)

    def adapted(self, names: list[str]) -> torch.Tensor:
        """Logits of :data:`ROWS` with these adapters."""
        used = sorted(set(names) - {""}, reverse=self._is_odd)
        numbers = {"": 0} | {name: number for number, name in enumerate(used, start=1)}
        for name in used:
            self.held.use(numbers[name], self.digests[name])
        packed, ids = packed_rows(ROWS)
        of_rows = np.array([numbers[name] for name in names]) if used else None
        with torch.inference_mode():
            return self.program.forward(replace(packed, adapters=of_rows), ids, everything(ids)).clone()


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str
)
def test_rows_have_the_bits_of_one_instance_wherever_experts_are(
    directory: Path, dtype: torch.dtype, *, natively: bool
) -> None:
    alone = AdaptedMember(directory, 0, 1, dtype)
    expected = [alone.adapted(names) for names in ADAPTERS]
    assert not torch.equal(expected[0], expected[2])
    members = [AdaptedMember(directory, rank, 2, dtype) for rank in range(2)]
    tokens = sum(count for _, _, count in ROWS)

    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        member = members[rank]
        member.join(group, natively=natively)
        assert member.model.experts is not None
        for steps in ((0, 1), (1, 0), (2, 1), (0, 2), (2, 2)):
            member.model.experts.begin([tokens] * 2)
            found = member.adapted(ADAPTERS[steps[rank]])
            assert torch.equal(found, expected[steps[rank]]), (rank, steps)
        assert member.program.exchange.is_native is natively

    together(2, body)


def test_an_adapter_that_was_dropped_leaves_room_for_others(directory: Path) -> None:
    member = AdaptedMember(directory, 0, 2, torch.float32)
    sites = member.program.sites
    assert sites is not None
    assert np.count_nonzero(sites.tagged.tags) == len(NAMES)
    for _ in range(3):
        member.held.drop([member.digests["b"]])
        assert np.count_nonzero(sites.tagged.tags) == len(NAMES) - 1
        member.held.read(AdapterSource("b", str(directory / "b")))
        assert np.count_nonzero(sites.tagged.tags) == len(NAMES)
    member.held.drop(member.digests.values())
    assert not sites.tagged
