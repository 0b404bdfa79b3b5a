"""Settings of an instance whose workers run on several hosts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from coordinator.addresses import check_not_wildcard, check_written, is_loopback
from coordinator.config import MeshConfig
from coordinator.settings.flags import Count, Natural, Port, flag


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts over which the workers of each instance are spread."""

    nnodes: Annotated[
        Count,
        flag(
            "-n",
            help="Hosts over which the workers (-tp, -pp) of each instance are spread; start the same "
            "command on each, with its --node-rank.",
        ),
    ] = 1
    node_rank: Annotated[
        Natural,
        flag("-r", help="Number of this host among them; 0 runs the instances, the others only workers."),
    ] = 0
    master_addr: Annotated[
        str, flag(help="Address of the host with node rank 0: its workers' own, and where the others ask.")
    ] = "127.0.0.1"
    master_port: Annotated[Port, flag(help="Port there; each further instance takes the next one.")] = 29501
    ray_placement_strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        flag(help="With a ray backend, how the workers of an instance are laid over the cluster's nodes."),
    ] = "PACK"

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is out of range: with --nnodes {self.nnodes} ranks are 0 to "
                f"{self.nnodes - 1}"
            )
        if self.nnodes > 1:
            check_written("--master-addr", self.master_addr)
            check_not_wildcard("--master-addr", self.master_addr)
            if self.master_port == 0:
                raise ValueError("--master-port must be a port that all hosts know, not 0")


def check_keys(mesh: MeshConfig, nodes: NodesConfig) -> None:
    """Checks that a mesh key guards the port for workers of other hosts.

    Raises:
        ValueError: there is no key; the message says what to do.
    """
    if nodes.nnodes > 1 and not is_loopback(nodes.master_addr) and not mesh.is_guarded:
        raise ValueError(
            f"--master-addr {nodes.master_addr} is not loopback, so the mesh needs a key: make one with "
            "`lockstep keygen FILE`, copy it to all hosts and give --mesh-key-file FILE everywhere (or "
            "--insecure-mesh, if nobody else can reach that network)"
        )
