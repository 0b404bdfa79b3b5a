"""Steps to another number of instances (pure): which ranks to start, which to drain."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import msgspec

from coordinator.messages import Member, State

MOST_PER_CORE = 32
"""Most instances per core that compute on a CPU.

More are a typing error that would take the machine down.
"""


class ScalingRefused(Exception):
    """A scale command that is impossible now; the message says why."""


class MachineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """CUDA devices and cores that this machine has for instances."""

    devices: int | None
    """CUDA devices; None when instances compute on the CPU."""
    devices_per_instance: int = 1
    cores: int
    hosts_per_instance: int = 1

    @property
    def room(self) -> int:
        """Instances that can have devices of their own; 0 when they compute on the CPU."""
        return (self.devices or 0) // self.devices_per_instance


class ScalingPlan(msgspec.Struct, frozen=True):
    """Ranks to start and to drain, and the message about it."""

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()
    warning: str = ""


def plan(
    size: int,
    members: Sequence[Member],
    ours: Collection[int],
    machine: MachineCapacity,
    force: bool,
    leaving: Collection[str] = (),
) -> ScalingPlan:
    """Ranks to start or drain for ``size`` instances in the whole mesh.

    ``members`` is the world, ``ours`` the ranks of this launcher's instances, those included that have not
    registered yet; ``leaving`` names those that it told to go, which the world may still show as ready. New
    ones get the lowest free ranks; the highest of our ranks go.

    Raises:
        ScalingRefused: too few of the instances are ours, nobody would serve, or there are too few devices.
    """
    if size < 1:
        raise ScalingRefused("a mesh needs at least one instance: end serve to end them all")
    stayers = [member for member in members if member.state.stays and member.instance not in leaving]
    staying = {member.rank for member in stayers} | set(ours)
    more = size - len(staying)
    if more > 0:
        return _grow(more, {member.rank for member in members} | set(ours), ours, machine)
    if more < 0:
        return _shrink(-more, stayers, staying, ours, force)
    return ScalingPlan()


def check_cores(count: int, machine: MachineCapacity) -> None:
    """Refuse more instances than a machine's cores can be meant for.

    Raises:
        ScalingRefused: they cannot.
    """
    if machine.devices is None and count > MOST_PER_CORE * machine.cores:
        raise ScalingRefused(
            f"{count} instances on {machine.cores} cores: each needs memory of its own, and more than one "
            f"per core is slower; the most that is started is {MOST_PER_CORE * machine.cores}"
        )


def shared_devices(count: int, machine: MachineCapacity) -> str:
    """A warning if there are not enough devices for each instance.

    Empty if there are.
    """
    if not machine.devices or count <= max(1, machine.room):
        return ""
    return (
        f"{count} instances of {machine.devices_per_instance} CUDA device(s) each share the "
        f"{machine.devices} of this machine: each takes an equal part of a device's memory, unless "
        "--gpu-memory-utilization is given"
    )


def free_number(staying: Collection[int], leaving: Collection[int], room: int) -> int:
    """Number of one more instance within its launcher, which decides its devices.

    It is the lowest that no instance has. Where devices are short, it is that of an instance that is about to
    leave.
    """
    with_devices = [number for number in range(room) if number not in staying]
    unused = [number for number in with_devices if number not in leaving]
    beyond = (number for number in itertools.count(room) if number not in staying and number not in leaving)
    return next(itertools.chain(unused, with_devices, beyond))


def _grow(more: int, taken: set[int], ours: Collection[int], machine: MachineCapacity) -> ScalingPlan:
    count = len(ours) + more
    if machine.hosts_per_instance > 1:
        raise ScalingRefused(
            f"an instance needs {machine.hosts_per_instance} hosts (--nnodes): start a further one with "
            "serve --headless on each of them, with another --master-port"
        )
    if machine.devices is not None and count * machine.devices_per_instance > machine.devices:
        raise ScalingRefused(
            f"{count} instances of {machine.devices_per_instance} CUDA device(s) each are more than the "
            f"{machine.devices} of this machine: start further ones elsewhere with serve --headless"
        )
    check_cores(count, machine)
    free = (rank for rank in range(len(taken) + more) if rank not in taken)
    start = tuple(rank for rank, _ in zip(free, range(more), strict=False))
    warning = ""
    if machine.devices is None and count > machine.cores:
        warning = f"{count} instances share {machine.cores} cores: more of them will not be faster"
    return ScalingPlan(start=start, warning=warning)


def _shrink(
    fewer: int, members: Sequence[Member], staying: set[int], ours: Collection[int], force: bool
) -> ScalingPlan:
    drain = tuple(sorted(ours, reverse=True)[:fewer])
    if len(drain) < fewer:
        raise ScalingRefused(
            f"{fewer} instances would have to go, and only {len(ours)} are of this serve: drain the others "
            "by rank (lockstep drain RANK)"
        )
    left = staying - set(drain)
    if not force and not any(member.rank in left and member.state is State.READY for member in members):
        raise ScalingRefused(
            "none of the instances that would stay is ready: wait for them (lockstep status), or say --force"
        )
    return ScalingPlan(drain=drain)
