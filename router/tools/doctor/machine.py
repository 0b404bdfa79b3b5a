"""Cores, instruction sets, memory and limits of this host: reading and (pure) judging them."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.host.memory import available_memory, most_memory
from parallel.control_groups import cpu_quota
from parallel.devices import has_device
from parallel.rounds import memory_order
from router.tools.doctor.findings import Finding, broken, note, ok, warning

AREA = "machine"
GIB = 2**30
LEAST_MEMORY = 2 * GIB
"""Bytes that one instance of even a small model takes."""
LEAST_FILES = 4096
CPU_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host; sizes in bytes."""

    cores: int
    """Cores that this process may run on."""
    cores_of_host: int
    quota: float | None
    """Cores' worth of time that the control group grants; None: no limit."""
    cpu: str
    features: tuple[str, ...]
    environment: Mapping[str, str]
    memory: int
    """Bytes of memory: the host's, or its control group's limit if less."""
    free_memory: int
    open_files: int
    has_gpu: bool


def read_machine() -> MachineFacts:
    """Read the facts of this host, as this process sees it."""
    name, flags = _cpu()
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        cores_of_host=os.cpu_count() or 1,
        quota=cpu_quota(),
        cpu=name,
        features=tuple(each for each in CPU_FEATURES if each in flags),
        environment=dict(os.environ),
        memory=most_memory(),
        free_memory=available_memory(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # the processes take what they may
        has_gpu=has_device(),
    )


def check_machine(machine: MachineFacts) -> list[Finding]:
    """Findings about cores, CPU, memory and limits."""
    return [
        _cores(machine),
        _threads(machine),
        _instructions(machine),
        _memory(machine),
        _shared_memory(machine),
        _files(machine),
    ]


def _cores(machine: MachineFacts) -> Finding:
    text = f"{machine.cores} of {machine.cores_of_host} cores"
    if machine.quota is not None and machine.quota < machine.cores:
        threads = max(1, int(machine.quota))
        return note(
            AREA,
            "cores",
            f"{text}, of which the control group grants the time of {machine.quota:.1f}: instances compute "
            f"with {threads} thread{'s' * (threads > 1)} in all",
            "whole cores (cpuset) are better than a quota, which stops threads in the middle of steps",
        )
    return ok(AREA, "cores", f"{text}; {machine.cpu}")


def _threads(machine: MachineFacts) -> Finding:
    """Findings about variables that set numbers of threads."""
    environment = machine.environment
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given) > machine.cores:
        text = f"OMP_NUM_THREADS={given} on {machine.cores} cores: a matrix product becomes many times slower"
        return warning(AREA, "threads", text, "unset OMP_NUM_THREADS; --cpu-threads sets the number")
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        text = "OMP_WAIT_POLICY=ACTIVE: threads that wait take the cores of other instances"
        return warning(AREA, "threads", text, "unset OMP_WAIT_POLICY")
    set_here = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith("OMP_")]
    return ok(
        AREA, "threads", ", ".join(set_here) or "no OMP settings; each instance gets its share of the cores"
    )


def _instructions(machine: MachineFacts) -> Finding:
    text = ", ".join(machine.features) or "no vector instructions that matter"
    if machine.has_gpu or {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.features):
        return ok(AREA, "instructions", text)
    if {"avx2", "fma"} <= set(machine.features) or "asimd" in machine.features:
        return ok(AREA, "instructions", f"{text}: bfloat16 is stored, and multiplied as float32")
    fix = "on this CPU, --dtype float32 may be as fast"
    return note(AREA, "instructions", f"{text}: no bfloat16 arithmetic", fix)


def _memory(machine: MachineFacts) -> Finding:
    text = f"{machine.free_memory / GIB:.1f} GiB free of {machine.memory / GIB:.1f} GiB"
    if machine.free_memory < LEAST_MEMORY:
        fix = "end something, or give --kv-cache-memory-bytes a small size"
        return warning(AREA, "memory", f"{text}, which is little for one instance", fix)
    return ok(AREA, "memory", text)


def _shared_memory(machine: MachineFacts) -> Finding:
    """Findings about shared memory, for which instances use memfd and pidfd."""
    try:
        os.close(os.memfd_create("lockstep-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        fix = "use Linux 5.3 or newer, or give --all2all-backend allgather_reducescatter"
        text = f"memfd or pidfd does not work here ({error.strerror}): instances cannot share memory"
        return broken(AREA, "shared memory", text, fix)
    if memory_order.fence_here() is None:
        text = "this CPU needs a compiled fence for it, and there is none: members of one host use sockets"
        return note(AREA, "shared memory", text, "install g++")
    return ok(AREA, "shared memory", "memfd and pidfd work")


def _files(machine: MachineFacts) -> Finding:
    text = f"{machine.open_files} open files per process"
    if 0 <= machine.open_files < LEAST_FILES:
        fix = "raise the hard limit: ulimit -n 65536 as root, or LimitNOFILE=65536 of a systemd unit"
        return warning(AREA, "limits", f"{text}: each client of the router takes one", fix)
    return ok(AREA, "limits", text)


def _cpu() -> tuple[str, set[str]]:
    """The CPU's name and its flags."""
    name, flags = "unknown CPU", set[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            return name, set(value.split())
    return name, flags
