"""GPUs of this host, and their assignment to its instances (loads no torch).

Devices are named as in ``CUDA_VISIBLE_DEVICES``, and on ROCm as in ``HIP_VISIBLE_DEVICES``. Where torch is
loaded already, its driver knows best. Else what the kernel shows counts: a variable alone makes no device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

SHARERS_VARIABLE = "LOCKSTEP_DEVICE_SHARERS"
"""Environment variable of an instance: how many instances compute on each of its devices."""
ROOT = Path("/")


def cuda_devices() -> tuple[str, ...]:
    """Names of the CUDA devices visible to processes started from this one.

    As for CUDA, the list ends at the first name that can be none.
    """
    found = sum(1 for _ in _nodes(ROOT))
    names = _chosen(os.environ, found, is_rocm=_has_rocm(ROOT)) if found else ()
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return names
    count = int(torch.cuda.device_count())
    return names[:count] if names else tuple(map(str, range(count)))


def visible_cuda_devices() -> int:
    """Number of CUDA devices visible to processes started from this one."""
    return len(cuda_devices())


def has_device() -> bool:
    """Whether the kernel shows any device, visible to CUDA or not."""
    return next(_nodes(ROOT), None) is not None


def visible_variable() -> str:
    """Name of the environment variable that restricts visible GPUs: CUDA's or ROCm's."""
    return "HIP_VISIBLE_DEVICES" if _has_rocm(ROOT) else "CUDA_VISIBLE_DEVICES"


def _nodes(root: Path) -> Iterator[Path]:
    """GPUs that the kernel shows: NVIDIA's and ROCm's each; on WSL and Tegra one."""
    nvidia = [each for each in (root / "dev").glob("nvidia*") if each.name[len("nvidia") :].isdecimal()]
    yield from nvidia
    if not nvidia:
        yield from (
            each
            for each in (root / "dev/nvhost-gpu", root / "usr/lib/wsl/lib/libcuda.so.1")
            if each.exists() and (each.name == "nvhost-gpu" or (root / "dev/dxg").exists())
        )
        yield from _rocm_nodes(root)


def _has_rocm(root: Path) -> bool:
    return next(_rocm_nodes(root), None) is not None and not list((root / "dev").glob("nvidia[0-9]*"))


def _rocm_nodes(root: Path) -> Iterator[Path]:
    """Nodes of the kernel's topology that have vector units: CPUs are nodes, too, without any."""
    if not (root / "dev/kfd").exists():
        return
    for properties in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        facts = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        if facts.get("simd_count", "0").strip() != "0":
            yield properties


def _chosen(environment: Mapping[str, str], found: int, *, is_rocm: bool) -> tuple[str, ...]:
    """Visible device names out of a number of devices, by environment variables."""
    lists = [environment.get("CUDA_VISIBLE_DEVICES")]
    if is_rocm:  # the first renumbers what the runtime sees, of which the second or the third chooses
        runtime = environment.get("ROCR_VISIBLE_DEVICES")
        found = found if runtime is None else len(_valid(runtime, found))
        lists.insert(0, environment.get("HIP_VISIBLE_DEVICES"))
    listed = next((each for each in lists if each is not None), None)
    return tuple(map(str, range(found))) if listed is None else _valid(listed, found)


def _valid(listed: str, found: int) -> tuple[str, ...]:
    """Names up to the first that is empty, negative, or a number beyond the devices."""

    def is_device(name: str) -> bool:
        return name not in ("", "-1") and not (name.isdecimal() and int(name) >= found)

    return tuple(takewhile(is_device, (name.strip() for name in listed.split(","))))


# ---- which instance has which


def devices_of_instance(
    devices: Sequence[str], number: int, workers: int | None, neighbours: int
) -> tuple[str, ...]:
    """CUDA devices that one of a host's instances sees, in its workers' order.

    None are listed if the instance sees them as they are. Where instances have more workers than there are
    devices, they share them.

    Args:
        devices: of the host.
        number: instances before it have the devices before its own.
        workers: of each instance; None if only the mesh knows. Then it sees all devices, its own first.
        neighbours: instances that share the devices, for that case.
    """
    total = len(devices)
    if not total or (workers is not None and workers >= total):
        return ()
    count = total if workers is None else workers
    first = number * (max(1, total // neighbours) if workers is None else workers)
    seen = tuple(devices[index % total] for index in range(first, first + count))
    return () if seen == tuple(devices) else seen


def sharers_of_device(devices: int, workers: int | None, neighbours: int) -> int:
    """Greatest number of instances that share one device.

    Each of ``neighbours`` has so many workers.

    Without devices it is 1.
    """
    return max(1, -(-neighbours * (workers or 1) // devices)) if devices else 1


def device_sharers() -> int:
    """Number of instances that share this instance's devices, as its launcher set it."""
    listed = os.environ.get(SHARERS_VARIABLE, "")
    return max(1, int(listed)) if listed.isdecimal() else 1
