"""Buffers between the operations of a step, which grow with the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.attention.base import Int64s
from engine.kernels.adapters.sites import EXPERT_LOW, EXPERT_NUMBERS, LOW, Sites
from engine.kernels.core.pages import Arena
from engine.kernels.core.rows import SLACK, bytes_pitch, pitch_of
from engine.kernels.exchange.exchange import ExpertExchange, ExpertShape
from engine.kernels.lowering.scratch import Scratch

MIN_TOKENS = 64
"""Tokens that the first buffers have room for; the room doubles as steps grow."""


class BufferRoom(NamedTuple):
    """Tokens of a step that buffers have room for; none at first."""

    own: int = 0
    selected: int = 0
    """Tokens whose logits are wanted."""
    total: int = 0
    """Tokens of all members of a group together."""

    def holds(self, wanted: BufferRoom) -> bool:
        return self.own > 0 and all(want <= room for want, room in zip(wanted, self, strict=True))

    def grown(self, wanted: BufferRoom) -> BufferRoom:
        """Room for at least as much, in powers of two."""
        powers = [1 << (max(want, MIN_TOKENS) - 1).bit_length() for want in wanted]
        return BufferRoom(*map(max, powers, self))


class Needs(NamedTuple):
    """Sizes of a decoder that decide its buffers."""

    hidden: int
    vocab: int
    """Tokens of this rank; 0 before the last stage."""
    dtype: torch.dtype
    scratch: Mapping[str, Scratch]
    exchanged: ExpertShape | None
    """Sizes that all expert layers share; None without any."""
    rounds: bool
    """Whether some weights want rows in 8 bits."""
    slack: int = 0
    """Rows behind all others, which products of some of them may read."""

    def with_adapters(self, sites: Sites) -> Needs:
        """The same beside which adapters add something."""
        scratch = {name: replace(each, slack=each.slack + SLACK) for name, each in self.scratch.items()}
        low, of_experts = (sites.low_width(of_experts=each) for each in (False, True))
        scratch[LOW] = Scratch(LOW, low, dtype=torch.float32, is_input=False)
        for name, width, dtype in (
            (EXPERT_LOW, of_experts, torch.float32),
            (EXPERT_NUMBERS, min(of_experts, 1), torch.int64),
        ):
            scratch[name] = Scratch(name, width, "group token", sites.times, dtype=dtype, is_input=False)
        return self._replace(scratch=scratch, slack=SLACK)

    def rows_of(self, scratch: Scratch, room: BufferRoom) -> int:
        """Rows of one kind of scratch, for steps of a size."""
        tokens = room.own if scratch.per == "token" else room.total
        return tokens * scratch.times + scratch.slack if scratch.width else 0

    def rounded_bytes(self, room: BufferRoom) -> int:
        """Bytes of rows in 8 bits, of the widest kind."""
        inputs = [each for each in self.scratch.values() if each.is_input and each.dtype is None]
        widest = max(self.hidden, *(each.width for each in inputs))
        most = max(room.own, room.selected, *(self.rows_of(each, room) for each in inputs))
        return (most + SLACK) * bytes_pitch(widest) if self.rounds else 0


def num_bytes(needs: Needs, wanted: BufferRoom) -> int:
    """Bytes that :class:`Buffers` take for this, with what experts exchange."""
    room, dtype = BufferRoom().grown(wanted), needs.dtype
    of_stream = dtype.itemsize * pitch_of(needs.hidden, dtype)
    total = (
        of_stream * (3 * room.own + room.selected + 4 * needs.slack) + (4 * needs.vocab + 8) * room.selected
    )
    for each in needs.scratch.values():
        if each.dtype is None:
            pitch = dtype.itemsize * pitch_of(each.width, dtype)
        else:
            pitch = each.dtype.itemsize * each.width
        total += pitch * needs.rows_of(each, room)
    if needs.exchanged is not None:  # rows, results, and rows sorted by expert
        total += 3 * of_stream * (room.total * needs.exchanged.top_k + SLACK)
    return int(total + needs.rounded_bytes(room))


class Buffers:
    """Buffers for one :class:`BufferRoom`. Written lists of operations point to them."""

    def __init__(self, needs: Needs, room: BufferRoom, exchange: ExpertExchange | None) -> None:
        """``exchange``: of the expert layers, if there are any; its scratch is made here, too."""
        dtype, arena = needs.dtype, Arena()

        def rows(number: int, width: int) -> torch.Tensor:
            """[number, pitch]: see :func:`engine.kernels.core.rows.pitch_of`."""
            return arena.zeros((number, pitch_of(width, dtype)), dtype)

        own, selected = room.own + needs.slack, room.selected + needs.slack
        self.stream = rows(own, needs.hidden)
        """[tokens, hidden]: what each part of a layer adds to."""
        self.normed = rows(own, needs.hidden)
        self.branch = rows(own, needs.hidden)
        """Result of a layer's part, if a norm comes before it is added."""
        self.last = rows(selected, needs.hidden)
        """The selected rows of the stream."""
        self.logits = arena.zeros((room.selected, needs.vocab), torch.float32)
        """[selected, tokens of this rank]; of no token before the last stage."""
        self.chosen: Int64s = arena.zeros((room.selected,), torch.int64).numpy()
        """The token that is chosen for each row of logits."""
        self.rounded = arena.zeros((needs.rounded_bytes(room),), torch.uint8)
        """Rows that were rounded to 8 bits, for the next product."""
        self._scratch: dict[str, torch.Tensor] = {}
        for name, each in needs.scratch.items():
            number = needs.rows_of(each, room)
            if each.dtype is None:
                self._scratch[name] = rows(number, each.width)
            else:
                self._scratch[name] = torch.empty(number, each.width, dtype=each.dtype)
        self.gathered = None if exchange is None else exchange.make_room(room.total)
        """Rows of all members that go through the experts here."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Rows of :class:`~engine.kernels.lowering.scratch.Scratch` of this name."""
        return self._scratch[name]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers but those that the exchange holds."""
        fixed = (self.stream, self.normed, self.branch, self.last, self.logits, self.rounded)
        held = [*fixed, *self._scratch.values()]
        return int(sum(each.nbytes for each in held) + self.chosen.nbytes)
