"""Address at which an instance listens for routers and other instances."""

from __future__ import annotations

import logging

from coordinator.addresses import interfaces, is_loopback, own, toward
from coordinator.config import MeshConfig

logger = logging.getLogger(__name__)


def listen_address(mesh: MeshConfig) -> str:
    """Address that routers elsewhere can reach: the given one, or that towards the coordinator."""
    if mesh.instance_address is not None:
        return own("--instance-address", mesh.instance_address)
    target = mesh.data_parallel_address
    if is_loopback(target):
        return "127.0.0.1"
    address = toward(target, mesh.data_parallel_rpc_port)
    others = [str(each) for each in interfaces() if each.address != address]
    if others:
        logger.info(
            "listens on %s, the way to the coordinator; --instance-address chooses another (%s)",
            address,
            ", ".join(others),
        )
    return address
