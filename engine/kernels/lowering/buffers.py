"""Buffers between the operations of a step, which grow with the steps."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from engine.attention.base import Int64s
from engine.kernels.core.pages import Arena
from engine.kernels.core.rows import SLACK, bytes_pitch, pitch_of
from engine.kernels.decoder import Decoder, Mlp, Moe
from engine.kernels.exchange.exchange import Exchange
from engine.kernels.weights import rounds_inputs

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


def num_bytes(decoder: Decoder, wanted: Room) -> int:
    """Bytes that :class:`Buffers` take for this, with what experts exchange."""
    room, itemsize = Room().grown(wanted), decoder.dtype.itemsize
    widths = *3 * [decoder.hidden], *_widths(decoder), _latent_width(decoder), _apart_width(decoder)
    own = sum(pitch_of(width, decoder.dtype) for width in widths)
    total: int = itemsize * (own * room.own + pitch_of(decoder.hidden, decoder.dtype) * room.selected)
    total += (4 * decoder.vocab + 8) * room.selected
    total += (
        itemsize * pitch_of(_inputs_width(decoder), decoder.dtype) * room.own * bool(_inputs_width(decoder))
    )
    if rounds_inputs(decoder):
        total += _rounded_bytes(decoder, room)
    for moe in _mlps(decoder, Moe)[:1]:
        widest = max(each.width for each in _mlps(decoder, Moe))
        # rows, results and gathered rows, then what lies between two products
        pitches = 3 * pitch_of(decoder.hidden, decoder.dtype) + pitch_of(widest, decoder.dtype)
        total += itemsize * pitches * (room.total * moe.top_k + SLACK) + 4 * room.own * moe.num_experts
        total += 4 * room.own * (1 + _widened_pitch(decoder))
        total += itemsize * pitch_of(decoder.hidden, decoder.dtype) * room.own * _has_norms(decoder)
    return total


class Buffers:
    """Buffers for one :class:`Room`. Written lists of operations point to them."""

    def __init__(
        self, decoder: Decoder, room: Room, exchange: Exchange | None, *, rounds: bool = False
    ) -> None:
        """``exchange``: of the expert layers, if there are any; its scratch is made here, too.

        ``rounds``: whether some weights want rows in 8 bits.
        """
        projected, attended, middle = _widths(decoder)
        dtype, arena = decoder.dtype, Arena()

        def rows(number: int, width: int) -> torch.Tensor:
            """[number, pitch]: see :func:`engine.kernels.core.rows.pitch_of`."""
            return arena.zeros((number, pitch_of(width, dtype)), dtype)

        self.stream = rows(room.own, decoder.hidden)
        """[tokens, hidden]: what each part of a layer adds to."""
        self.normed = rows(room.own, decoder.hidden)
        self.branch = rows(room.own, decoder.hidden)
        """What a part of a layer gives, where a norm comes before it is added."""
        self.last = rows(room.selected, decoder.hidden)
        """The selected rows of the stream."""
        self.projected = rows(room.own, projected)
        """Queries, keys and values, and latents before a norm."""
        self.latent = rows(room.own, _latent_width(decoder))
        """What heads are made from, behind a norm."""
        self.apart = rows(room.own, _apart_width(decoder))
        """Queries before they meet latents, and sums of latents once they are values."""
        self.attended = rows(room.own, attended)
        self.middle = rows(room.own, middle)
        self.inputs = rows(room.own if _inputs_width(decoder) else 0, _inputs_width(decoder))
        """Inputs of all layers beside the stream, token by token."""
        self.logits = arena.zeros((room.selected, decoder.vocab), torch.float32)
        """[selected, tokens of this rank]; of no token before the last stage."""
        self.chosen: Int64s = arena.zeros((room.selected,), torch.int64).numpy()
        """The token that is chosen for each row of logits."""
        self.rounded = arena.zeros((_rounded_bytes(decoder, room) if rounds else 0,), torch.uint8)
        """Rows that were rounded to 8 bits, for the next product."""
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
        self.shared_logits = torch.empty(room.own)
        """Logits of the gate of a shared expert, token by token."""
        self.widened = torch.empty(room.own, _widened_pitch(decoder))
        """[tokens, hidden] in float32, for routers in it."""
        self.mixed = rows(room.own if _has_norms(decoder) else 0, decoder.hidden)
        """What experts give, where a norm comes before it is added."""
        widest = max(moe.width for moe in _mlps(decoder, Moe))
        self.expert_middle = rows(room.total * shape.top_k + SLACK, widest)


def _widths(decoder: Decoder) -> tuple[int, int, int]:
    """Widest rows of queries with keys and values, of attention's results, and between products."""
    attentions = [layer.attention for layer in decoder.layers]
    dense = _mlps(decoder, Mlp) + [moe.shared for moe in _mlps(decoder, Moe) if moe.shared is not None]
    inputs = [layer.input.width for layer in decoder.layers if layer.input is not None]
    return (
        max(each.projected_width for each in attentions),
        max(each.attended_width for each in attentions),
        max([*(mlp.width for mlp in dense), *inputs], default=0),
    )


def _inputs_width(decoder: Decoder) -> int:
    """Numbers of a token's inputs beside the stream, of all layers."""
    return max((layer.input.total for layer in decoder.layers if layer.input is not None), default=0)


def _rounded_bytes(decoder: Decoder, room: Room) -> int:
    """Bytes of rows in 8 bits, of the widest kind."""
    moes = _mlps(decoder, Moe)
    pairs = max((room.total * moe.top_k for moe in moes), default=0)
    widest = max(decoder.hidden, *_widths(decoder), _latent_width(decoder), *(moe.width for moe in moes))
    return (max(room.own, room.selected, pairs) + SLACK) * bytes_pitch(widest)


def _latent_width(decoder: Decoder) -> int:
    """Numbers of the widest latent."""
    found = [layer.attention.latents for layer in decoder.layers]
    sizes = [each.size for latents in found if latents is not None for each in latents.normed]
    return max(sizes, default=0)


def _apart_width(decoder: Decoder) -> int:
    """Widest rows of heads whose latents are cached, as they are without these."""
    kept = [layer.attention for layer in decoder.layers if layer.attention.keeps_latents]
    return max((each.heads * max(each.dim - each.shared, each.value_dim) for each in kept), default=0)


def _widened_pitch(decoder: Decoder) -> int:
    """Numbers of a row in float32 for routers of that type, if there are any."""
    is_wide = any(moe.router.dtype != decoder.dtype for moe in _mlps(decoder, Moe))
    return pitch_of(decoder.hidden, torch.float32) if is_wide else 0


def _has_norms(decoder: Decoder) -> bool:
    """Whether there are norms between experts and the stream."""
    return any(isinstance(layer.mlp, Moe) and layer.mlp_last_norm is not None for layer in decoder.layers)


def _mlps(decoder: Decoder, kind: type[_Mlp]) -> list[_Mlp]:
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, kind)]
