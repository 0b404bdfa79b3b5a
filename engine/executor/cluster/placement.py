"""Finding the Ray cluster, and room in it, within a bounded time."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from engine.config import EngineConfig
from engine.executor_contract import CannotStart

logger = logging.getLogger(__name__)

NAMESPACE = "lockstep"
LOOK_SECONDS = 0.2
"""Seconds between two checks for the resources of a placement group."""
SAY_INTERVAL = 5.0
"""Seconds between two reports that a placement group waits for resources."""
CONNECT_VARIABLE = "RAY_ADDRESS"
CONNECT_SECONDS = 5.0
"""Seconds for a connection to the address of a Ray cluster."""

Resources = dict[str, float]


def connect() -> None:
    """Join the cluster that runs on this host, or the one of RAY_ADDRESS.

    Raises:
        CannotStart: there is none.
    """
    if ray.is_initialized():
        return
    address = os.environ.get(CONNECT_VARIABLE) or "auto"
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise _no_cluster(f"nothing answers at {address}: {error.strerror or error}") from error
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            logging_level=logging.WARNING,
            log_to_driver=True,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(first_line(error)) from error
    finally:
        for number, handler in kept.items():  # Ray installs its own
            signal.signal(number, handler)


def _no_cluster(why: str) -> CannotStart:
    return CannotStart(
        f"no Ray cluster can be reached ({why}): start one with `ray start --head`, or name its head in "
        f"{CONNECT_VARIABLE}"
    )


def worker_resources(config: EngineConfig) -> Resources:
    """Resources of one worker: threads as CPUs, and a GPU where it uses one."""
    device = config.device
    cpus = float(max(1, device.cpu_threads // device.num_workers))
    wants_gpu = device.device == "cuda" or (
        device.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    return {"CPU": cpus, "GPU": 1.0} if wants_gpu else {"CPU": cpus}


def reserve(
    name: str,
    bundles: Sequence[Resources],
    strategy: str,
    timeout: float,
    progress: Callable[[str], None],
) -> PlacementGroup:
    """A placement group with all its resources.

    Raises:
        CannotStart: ``timeout`` seconds went by without; says what was asked for and what the cluster has.
    """
    group = placement_group(list(bundles), strategy=strategy, name=name)
    deadline = time.monotonic() + timeout
    said_at = float("-inf")
    try:
        while not group.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now > deadline:
                raise CannotStart(f"gave up after {timeout:g} s: {_shortage(bundles, strategy)}")
            if now - said_at > SAY_INTERVAL:
                said_at = now
                progress(f"waiting for {_amount(bundles)} in the Ray cluster")
                if now > deadline - timeout + SAY_INTERVAL:
                    logger.warning(
                        "%s; waits at most %.0f s more", _shortage(bundles, strategy), deadline - now
                    )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _shortage(bundles: Sequence[Resources], strategy: str) -> str:
    nodes = [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}): {_amount([node['Resources']])}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return (
        f"the Ray cluster has no room for {_amount(bundles)} ({len(bundles)} bundle(s) of "
        f"{_amount(bundles[:1])}, {strategy}). It has {'; '.join(nodes)}; free are now "
        f"{_amount([ray.available_resources()])}. Add nodes, lower -tp, -pp, -dp or "
        "--cpu-threads, or end what uses them"
    )


def _amount(resources: Sequence[Mapping[str, Any]]) -> str:
    total = {kind: sum(float(each.get(kind, 0)) for each in resources) for kind in ("CPU", "GPU")}
    return ", ".join(f"{count:g} {kind}" for kind, count in total.items() if count or kind == "CPU")


def nodes_of(group: PlacementGroup) -> list[str]:
    """The node of each bundle."""
    table = placement_group_table(group)["bundles_to_node_id"]
    return [table[number] for number in sorted(table)]


def release(group: PlacementGroup) -> None:
    """Give the resources back."""
    remove_placement_group(group)


def first_line(error: BaseException) -> str:
    """Text of a Ray error in one line, cut to 300 characters."""
    return " ".join(str(error).split())[:300]
