"""``serve`` with ``--node-rank`` above 0: only the workers of each instance on this host."""

from __future__ import annotations

import uvloop

from coordinator.process import process
from parallel.devices import cuda_devices
from parallel.topology import usable_cores
from router.config import ServeConfig
from router.launcher.launch import mesh_title, node_specs, print_table
from router.launcher.supervisor import Supervisor


def run_node(config: ServeConfig, title: str) -> int:
    """Run until the instances end, as node rank 0 reports; returns the exit status."""
    nodes = config.engine.nodes
    process.set_title("Serve", mesh_title(config))
    table = node_specs(config, usable_cores(), cuda_devices())
    print_table(f"{title}: node {nodes.node_rank} of {nodes.nnodes}", table)
    supervisor = Supervisor(table, restart=config.restart)

    async def at_once() -> None:
        """Whether the mesh serves is the business of node rank 0."""

    return uvloop.run(supervisor.run(at_once))
