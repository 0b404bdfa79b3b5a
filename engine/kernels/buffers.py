"""Buffers between the operations of a step, which grow with the steps."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from engine.attention.base import Int64s
from engine.kernels.decoder import Decoder, Mlp, Moe
from engine.kernels.exchange import Exchange
from engine.kernels.pages import Arena
from engine.kernels.rows import SLACK, pitch_of

MIN_TOKENS = 64
"""Tokens that the first buffers have room for; the room doubles as steps grow."""

_Mlp = TypeVar("_Mlp", Mlp, Moe)


class Room(NamedTuple):
    """Tokens of a step that buffers have room for; none at first."""

    own: int = 0
    selected: int = 0
    """Tokens whose logits are wanted."""
    total: int = 0
    """Tokens of all members of a group together."""

    def holds(self, wanted: Room) -> bool:
        return self.own > 0 and all(want <= room for want, room in zip(wanted, self, strict=True))

    def grown(self, wanted: Room) -> Room:
        """Room for at least as much, in powers of two."""
        powers = [1 << (max(want, MIN_TOKENS) - 1).bit_length() for want in wanted]
        return Room(*map(max, powers, self))


class Buffers:
    """Buffers for one :class:`Room`. Written lists of operations point to them."""

    def __init__(self, decoder: Decoder, room: Room, exchange: Exchange | None) -> None:
        """``exchange``: of the expert layers, if there are any; its scratch is made here, too."""
        attentions = [layer.attention for layer in decoder.layers]
        dtype, arena = decoder.dtype, Arena()

        def rows(number: int, width: int) -> torch.Tensor:
            """[number, pitch]: see :func:`engine.kernels.rows.pitch_of`."""
            return arena.zeros((number, pitch_of(width, dtype)), dtype)

        self.stream = rows(room.own, decoder.hidden)
        """[tokens, hidden]: what each part of a layer adds to."""
        self.normed = rows(room.own, decoder.hidden)
        self.branch = rows(room.own, decoder.hidden)
        """What a part of a layer gives, where a norm comes before it is added."""
        self.last = rows(room.selected, decoder.hidden)
        """The selected rows of the stream."""
        self.projected = rows(room.own, max(each.projected_width for each in attentions))
        """Queries, keys and values."""
        self.attended = rows(room.own, max(each.width for each in attentions))
        self.middle = rows(room.own, max((mlp.width for mlp in _mlps(decoder, Mlp)), default=0))
        self.logits = arena.zeros((room.selected, decoder.vocab), torch.float32)
        """[selected, tokens of this rank]; of no token before the last stage."""
        self.chosen: Int64s = arena.zeros((room.selected,), torch.int64).numpy()
        """The token that is chosen for each row of logits."""
        if exchange is None:
            return
        shape = exchange.shape
        pairs = room.own * shape.top_k
        self.scores = torch.empty(pairs)
        """Weights of a token's experts, token by token."""
        self.router_logits = torch.empty(room.own * shape.num_experts)
        self.ids = torch.empty(pairs, dtype=torch.int64)
        """Numbers of a token's experts, token by token."""
        self.gathered = exchange.make_room(room.total)
        """Rows of all members that go through the experts here."""
        widest = max(moe.width for moe in _mlps(decoder, Moe))
        self.expert_middle = rows(room.total * shape.top_k + SLACK, widest)


def _mlps(decoder: Decoder, kind: type[_Mlp]) -> list[_Mlp]:
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, kind)]
