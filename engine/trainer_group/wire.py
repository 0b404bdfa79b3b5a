"""Messages between a router and the process in a trainer's group (no torch).

Lines of JSON: requests go to the process's standard input, one answer to each comes from its standard output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

KINDS = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint8": ("U8", 1), "bool": ("BOOL", 1), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip
"""Name in a safetensors file, and bytes of a number, by torch's names of types."""
MOST_RANKS = 1024
PACKED_BYTES = 1 << 30
"""Bytes at which a packed buffer ends, as vLLM has it."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]


class JoinGroup(msgspec.Struct, frozen=True, tag="join", kw_only=True):
    """Join a trainer's group, under all ranks that it has for this mesh."""

    address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    """Where the trainer has its store."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    first_rank: Annotated[int, msgspec.Meta(ge=1, lt=MOST_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=MOST_RANKS)]
    group: Annotated[str, msgspec.Meta(max_length=255)]
    backend: str
    """``gloo``, or ``nccl``."""
    timeout: float
    """Seconds until all have come, and for each tensor."""

    def __post_init__(self) -> None:
        if self.first_rank >= self.world_size:
            raise ValueError(f"rank_offset {self.first_rank} is not below world_size {self.world_size}")
        if self.backend == "nccl" and self.world_size != self.first_rank + 1:
            raise ValueError("one process receives for the mesh: with nccl, world_size is rank_offset + 1")


class Announced(msgspec.Struct, frozen=True):
    """A tensor that the trainer is about to send."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)], ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * KINDS[self.dtype][1]


class Receive(msgspec.Struct, frozen=True, tag="receive", kw_only=True):
    """Receive tensors in this order from rank 0, and write them to a safetensors file."""

    tensors: tuple[Announced, ...]
    path: str
    packed_bytes: int = 0
    """Bytes at which a buffer of several tensors ends; 0: each comes by itself."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A request was carried out."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request was not carried out, and the group is over."""

    reason: str


ToReceiver = JoinGroup | Receive
FromReceiver = Done | Failed


def header_of(tensors: Iterable[Announced]) -> bytes:
    """First bytes of a safetensors file with these tensors, in this order."""
    entries, begin = {}, 0
    for each in tensors:
        end = begin + each.num_bytes
        entries[each.name] = {
            "dtype": KINDS[each.dtype][0],
            "shape": each.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def buffers_of(tensors: Sequence[Announced], packed_bytes: int) -> Iterator[list[Announced]]:
    """Tensors that come together, cut as vLLM's trainers cut them."""
    together: list[Announced] = []
    for each in tensors:
        together.append(each)
        if sum(one.num_bytes for one in together) > packed_bytes:
            yield together
            together = []
    if together:
        yield together
