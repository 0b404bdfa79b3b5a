"""Division of a host's cores and threads among its instances and workers.

More threads than cores would make every step tens of times slower, so the instances of a host share its cores
out anew whenever one comes or goes.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from engine.config import DeviceConfig, EngineConfig
from parallel.devices import visible_cuda_devices
from parallel.topology import threads_per_worker, usable_cores

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """Cores and threads of an instance on one host."""

    threads: int = 0
    """Threads of each worker."""
    cores: tuple[int, ...] = ()
    """Cores reserved for this instance; empty if cores are shared."""


def has_gpu(device: DeviceConfig) -> bool:
    return device.device == "cuda" or (device.device == "auto" and visible_cuda_devices() > 0)


def share_of_cores(workers: int, given: int, sharers: int) -> Share:
    """Cores and threads of an instance with ``workers`` workers here, among ``sharers`` instances.

    An equal part, or the ``given`` number of cores (``--cpu-threads``), 0 for none.
    """
    threads = threads_per_worker(workers if given else sharers * workers, given or usable_cores())
    return Share(threads, tuple(sorted(os.sched_getaffinity(0))) if sharers == 1 else ())


def tell_threads(config: EngineConfig, share: Share, sharers: int) -> None:
    """Log with how many threads an instance computes, and whether that will be slow."""
    workers, cores = config.num_local_workers, usable_cores()
    each = f" in each of {workers} workers" if workers > 1 else ""
    logger.info("computes with %d thread%s%s", share.threads, "s" * (share.threads > 1), each)
    if config.device.cpu_threads > cores and config.device.device != "cuda":
        logger.warning(
            "--cpu-threads %d is more than the %d core%s of this host: each step will take many times longer",
            config.device.cpu_threads, cores, "s" * (cores > 1),
        )  # fmt: skip
    if workers > 1 and sharers * workers > cores and config.device.device != "cuda":
        logger.warning(
            "%d workers share the %d core%s of this host: expect each step to take longer than with "
            "fewer (lower -tp or -pp, or run fewer instances here)",
            sharers * workers, cores, "s" * (cores > 1),
        )  # fmt: skip


def instances_at_once(config: EngineConfig) -> float | None:
    """Instances like this one that the host's cores suffice for; None with own devices."""
    if not config.num_local_workers or has_gpu(config.device):
        return None
    return usable_cores() / max(config.num_local_workers, config.device.cpu_threads)
