"""Result structs of the probe processes (loads no torch)."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True):
    """One accelerator that torch sees."""

    name: str
    memory_bytes: int
    capability: str


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """torch as it is installed here."""

    version: str
    transformers: str
    cuda: str | None
    """The CUDA version that it was built for."""
    devices: list[Device]
    cpu_capability: str
    """The instruction set that its kernels use."""
    threads: int
    gloo: bool
    nccl: str | None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the group that measures."""

    rank: int
    host: str
    address: str
    interface: str
    mbit: int
    """Link speed in Mbit/s; 0 if unknown."""
    mtu: int
    lockstep: str
    protocol: int
    torch: str
    faster: list[str]
    """Interfaces of the host that are faster than the one used."""
    infiniband: list[str]
    """Active InfiniBand and RoCE ports of the host."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One collective between two hosts, or among all."""

    ranks: list[int]
    collective: str
    num_bytes: int
    """Size of the tensor that each member gives, in bytes."""
    seconds: float
    """Median of the measured seconds."""
    bytes_per_second: float
    """Bytes that each member sends, by the second."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a group of hosts."""

    hosts: list[HostFacts]
    timings: list[Timing]


class ProbeFailed(msgspec.Struct, frozen=True):
    """Reason for which there is no measurement."""

    error: str
