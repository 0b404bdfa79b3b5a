"""``python -m coordinator``: keeps the list of instances and numbers its changes."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import msgspec
import uvloop

from coordinator.addresses import AddressError, own
from coordinator.config import CoordinatorConfig, endpoint
from coordinator.membership.records import Rules
from coordinator.messages import Settings
from coordinator.process import process
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import PortInUse
from coordinator.server import Coordinator
from coordinator.settings.flags import parse

logger = logging.getLogger("coordinator")


def rules_of(config: CoordinatorConfig) -> Rules:
    """Settings that the registry needs to know."""
    mesh = config.mesh
    local = 0 if mesh.headless else mesh.data_parallel_size_local or 0
    start = mesh.data_parallel_start_rank or 0
    return Rules(
        name=config.mesh_name,
        require_same_numerics=mesh.require_same_numerics,
        size=mesh.data_parallel_size,
        reserved=tuple(range(start, start + local)),
        settings=msgspec.json.decode(config.settings, type=Settings) if config.settings else None,
    )


async def serve(config: CoordinatorConfig, keys: MeshKeys | None) -> int:
    """Run until SIGTERM or SIGINT."""
    mesh = config.mesh
    try:
        address = own("--data-parallel-address", mesh.data_parallel_address)
        coordinator = Coordinator(
            endpoint(address, mesh.data_parallel_rpc_port), rules_of(config), keys, config.listen_fd
        )
    except AddressError as error:
        logger.error("%s", error)
        return process.EXIT_FAILED
    except PortInUse as error:
        logger.error("%s with --data-parallel-rpc-port", error)
        return process.EXIT_FAILED
    logger.info("listening on %s", coordinator.endpoint)
    task = asyncio.ensure_future(coordinator.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logger.info("ends")
    return 0


def main(argv: list[str] | None = None) -> int:
    config = parse(
        CoordinatorConfig,
        sys.argv[1:] if argv is None else argv,
        prog="python -m coordinator",
        description="The coordinator of a Lockstep mesh: who is in it, and in which epoch.",
    )
    process.set_up("Coordinator", config.log_level, config.mesh.observability.log_format)
    keys = process.member_keys(config.mesh, "python -m coordinator")
    process.warn_if_open(config.mesh)
    return uvloop.run(serve(config, keys))


if __name__ == "__main__":
    sys.exit(main())
