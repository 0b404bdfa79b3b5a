"""Exchange of rows and results between the experts of a group, inside a step.

``experts.hpp`` does it. Every member has an arena that the others map. Whether all members of a group can
exchange like this (same kernels, same model) is known when the first step begins: each has written its
signature into its arena before it gave the header of that step. If one has not, all go through
:class:`parallel.expert_parallel.ExpertParallel`.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.rows import SLACK, pitch_of
from engine.kernels.exchange.layouts import EXCHANGE
from engine.kernels.exchange.peer_waits import NativeWaits
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.placement import Placement, assign_experts
from parallel.replicas import Ints, Replicas, line, replicas_at

WORDS_BYTES = 4096
"""Bytes at the beginning of an arena that hold its words."""
_SIGNATURE = 32
"""Index of the signature's word in an arena.

The first words count layers, and the rows of one.
"""
_ALIGNMENT = 64


class ExpertShape(NamedTuple):
    """Sizes and type that all expert layers of a model share."""

    hidden: int
    top_k: int
    num_experts: int
    dtype: torch.dtype


class ArenaLayout(NamedTuple):
    """Offsets in bytes of the parts of an arena.

    The arena is for so many rows of all members.
    """

    rows_at: int
    ids_at: int
    places_at: int
    results_at: int
    num_bytes: int

    @classmethod
    def of(cls, shape: ExpertShape, rows: int) -> ArenaLayout:
        row_bytes = pitch_of(shape.hidden, shape.dtype) * shape.dtype.itemsize
        parts = ((rows + SLACK) * row_bytes, rows * shape.top_k * 8, rows * shape.top_k * 8)
        ends = [WORDS_BYTES]
        for part in (*parts, (rows * shape.top_k + SLACK) * row_bytes):
            ends.append(-(-(ends[-1] + part) // _ALIGNMENT) * _ALIGNMENT)
        return cls(*ends)

    @classmethod
    def room(cls, shape: ExpertShape, num_bytes: int, num_mirrors: int = 0) -> int:
        """Rows that fit into an arena.

        As many fit into each mirror of others' rows and choices behind it.
        """
        large = cls.of(shape, 1 << 20)
        each = (large.num_bytes + num_mirrors * large.places_at) / (1 << 20)
        rows = int((num_bytes - 2 * WORDS_BYTES * (1 + num_mirrors)) / each) - 2 * SLACK
        return max(0, rows)


class ExpertExchange:
    """Exchange of expert rows through arenas: the common part of its kinds."""

    def __init__(self, shape: ExpertShape, rows: int, replicas: Replicas) -> None:
        """``rows``: of all members, at most, in a step."""
        self.shape, self.rows = shape, rows
        self.layout = ArenaLayout.of(shape, rows)
        self._replicas = replicas
        self.record = np.zeros((), dtype=EXCHANGE)
        """Record of addresses for the kernels; the arrays behind them are kept here."""
        self._layers: dict[int, np.ndarray[Any, Any]] = {}
        self._kept: dict[str, Any] = {}
        self._held: dict[int, Int64s] = {}
        most = max(map(len, replicas.mine))
        self.begins = self.keep("begins", np.zeros(most + 1, dtype=np.int64))
        self.record["top_k"], self.record["hidden"] = shape.top_k, shape.hidden
        self.record["num_experts"], self.record["most_copies"] = shape.num_experts, replicas.most_copies
        for name in ("rows_at", "ids_at", "places_at", "results_at"):
            self.record[name] = getattr(self.layout, name)
        self.keep("rounds", np.zeros(1, dtype=np.int64))
        self._counted: Ints | None = None
        self.firsts = np.zeros(0, dtype=np.int64)
        """Number of the first pair of each member in a step."""
        self._line = np.zeros(0, dtype=np.int64)

    def of_layer(self, layer: int) -> np.ndarray[Any, Any]:
        """The record for a layer, counted among those with experts.

        It is written anew, in the same memory, and stays as long as this exchange.
        """
        record = self._layers.setdefault(layer, np.zeros((), dtype=EXCHANGE))
        record[...] = self.record
        replicas, at = self._replicas, self._replicas.row_of(layer)
        record["num_local"] = len(replicas.mine[at])
        record["copies"] = replicas.ranks[at].ctypes.data
        record["counts"] = replicas.counts[at].ctypes.data
        record["numbers"] = replicas.numbers[at].ctypes.data
        if self._counted is not None:
            record["counted"] = self._counted[layer].ctypes.data
        return record

    def held(self, record: np.ndarray[Any, Any]) -> Int64s:
        """Numbers of the experts here in the layer of a record; kept here."""
        layer = next(layer for layer, each in self._layers.items() if each is record)
        mine = self._replicas.mine[self._replicas.row_of(layer)]
        return self._held.setdefault(layer, np.array(mine, np.int64))

    def keep(self, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Let a field of the record point to an array, which is kept alive."""
        assert array.flags.c_contiguous
        self._kept[name] = array
        self.record[name] = array.ctypes.data
        return array

    def make_room(self, rows: int) -> torch.Tensor:
        """Scratch for steps of so many rows over all members; returns the gathered rows."""
        pairs = rows * self.shape.top_k
        self.keep("sources", np.zeros(pairs, dtype=np.int64))
        pitch = pitch_of(self.shape.hidden, self.shape.dtype)
        gathered = torch.zeros(pairs + SLACK, pitch, dtype=self.shape.dtype)
        self._kept["gathered"] = gathered
        self.record["gathered"] = gathered.data_ptr()
        return gathered

    def take_room(self, before: ExpertExchange) -> None:
        """Use the scratch of the exchange before, which is not used any more."""
        for name in ("sources", "gathered"):
            self._kept[name] = before._kept[name]
            self.record[name] = before.record[name]

    def begin(self, sizes: Sequence[int]) -> None:
        """Prepare for a step. ``sizes``: rows of each member by its header."""
        if sizes:
            self._line[:] = line(sizes)

    @property
    def error(self) -> BaseException | None:
        """Why a step was given up, if it was."""
        return None

    @property
    def own(self) -> int:
        """Address of this member's arena."""
        address: int = self._kept["arenas"][int(self.record["rank"])]
        return int(address)

    def _place(self, arenas: Sequence[int]) -> None:
        self.record["rank"], self.record["size"] = self._replicas.rank, len(arenas)
        self.keep("arenas", np.array(arenas, dtype=np.int64))
        self.record["returned"] = self.record["arenas"]
        self.firsts = self.keep("firsts", np.zeros(len(arenas), dtype=np.int64))
        self.keep("sizes", np.zeros(len(arenas), dtype=np.int64))
        self._line = self.keep("line", np.zeros(len(arenas) + 1, dtype=np.int64))


class LocalExchange(ExpertExchange):
    """Exchange of an instance that has all experts, with itself."""

    def __init__(self, shape: ExpertShape, rows: int) -> None:
        super().__init__(shape, rows, Replicas(assign_experts(shape.num_experts, 1), 0))
        self._arena = torch.zeros(self.layout.num_bytes + _ALIGNMENT, dtype=torch.uint8)
        address = -(-self._arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._place([address])


class SharedMemoryExchange(ExpertExchange):
    """Exchange of one member with a group in shared memory."""

    def __init__(
        self,
        library: KernelLibrary,
        group: SharedMemoryCommunicator,
        placement: Placement,
        shape: ExpertShape,
        num_layers: int,
        counted: np.ndarray[Any, Any],
    ) -> None:
        """``counted``: pairs computed here so far [layers, experts], counted on."""
        room = ArenaLayout.room(shape, group.arena_bytes)
        super().__init__(shape, room, replicas_at(placement, group.rank))
        self._group = group
        self._members = group.arenas  # keeps the memory mapped
        self._place([member.arena for member in self._members])
        self._counted = counted
        self.record["crowded"] = group.is_crowded
        self.waits = NativeWaits(group, "an expert layer")
        self.record["check"] = self.waits.address
        self._agreed: bool | None = None
        self._signature = signature_of(library.key, *shape, num_layers)
        if room > 0:
            self._signature_of(group.rank).value = self._signature

    def __repr__(self) -> str:
        return f"<SharedMemoryExchange rank {self._group.rank} of {self._group.size}, up to {self.rows} rows>"

    def can(self, sizes: Sequence[int]) -> bool:
        """Whether a step with these sizes is exchanged here.

        That is known after the step's headers, and the same at all members.
        """
        if self._agreed is None:
            self._agreed = all(
                self._signature_of(rank).value == self._signature for rank in range(self._group.size)
            )
        return self._agreed and sum(sizes) <= self.rows

    @property
    def error(self) -> BaseException | None:
        return self.waits.error

    def begin(self, sizes: Sequence[int]) -> None:
        """See :class:`ExpertExchange`.

        Raises:
            parallel.communicators.base.CollectiveError: the group is broken.
        """
        super().begin(sizes)
        self.waits.begin()

    def _signature_of(self, rank: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self._members[rank].arena + 8 * _SIGNATURE)


def signature_of(*facts: object) -> int:
    """Digest of facts as a number, never 0: equal where facts are equal."""
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest[:7], "little") + 1
