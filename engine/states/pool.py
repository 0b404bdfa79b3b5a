"""Memory of recurrent states at boundaries: slots that the scheduler hands out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from engine.states.held import State

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Gives a tensor of zeros of a shape and type."""


def own_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory of this process."""
    return torch.zeros(shape, dtype=dtype)


class StatePool:
    """States of all layers of one worker, by slot.

    A slot holds a layer's tensors with those of all other layers, at one position of one context. All of
    them together are one piece, which is copied whole.
    """

    def __init__(self, like: Sequence[State], num_slots: int, first: int, zeros: Zeros = own_zeros) -> None:
        """Room for ``num_slots`` states in the form of ``like`` (by layer), numbered from ``first`` on.

        ``zeros``: where the tensors are.
        """
        self.first = first
        self.num_slots = num_slots
        self.layers = [
            tuple(None if each is None else zeros((num_slots, *each.shape[1:]), each.dtype) for each in state)
            for state in like
        ]
        """By layer: tensors [slots, ...]."""

    @property
    def stored(self) -> list[torch.Tensor]:
        """Tensors of all layers, each of ``num_slots`` equal parts; empty ones are left out."""
        return [each for state in self.layers for each in state if each is not None and each.numel()]

    def read(self, slot: int, layer: int) -> State:
        """State of a layer in a slot; not to be changed."""
        index = slot - self.first
        return tuple(None if each is None else each[index : index + 1] for each in self.layers[layer])

    def write(self, slot: int, layer: int, state: State) -> None:
        """Fill a layer's part of a slot."""
        for place, tensor in zip(self.read(slot, layer), state, strict=True):
            if place is not None and tensor is not None:
                place.copy_(tensor)


def form_of(like: Sequence[State]) -> str:
    """Digest of the data types and shapes of a slot's tensors, layer by layer."""
    text = ";".join(
        ",".join("-" if each is None else f"{each.dtype}{list(each.shape[1:])}" for each in state)
        for state in like
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def state_bytes(like: Sequence[State]) -> int:
    """Bytes of one slot."""
    return sum(each.numel() * each.element_size() for state in like for each in state if each is not None)
