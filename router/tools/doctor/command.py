"""Command ``lockstep doctor``: its flags and the order of checks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from coordinator.addresses import check_written, is_own
from coordinator.config import MeshConfig
from coordinator.process import process
from coordinator.rpc import keys, own_key
from coordinator.settings.flags import Count, Natural, Port, flag, parse
from engine.probe.facts import LinkFacts, ProbeFailed
from engine.probe.links import ProbeRequest
from router.tools.doctor import gpu, links, machine, mesh, network, packages, ports, rdma
from router.tools.doctor.findings import Finding, Level, broken, ok, worst
from router.tools.doctor.report import print_report, report_of


class DoctorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Doctor."""

    mesh: MeshConfig = MeshConfig()
    host: Annotated[str, flag(help="Address of the planned endpoint.")] = "127.0.0.1"
    port: Annotated[Port, flag(help="Port of the planned endpoint.")] = 8000
    running: Annotated[
        bool,
        flag(
            help="Check the mesh that runs at -dpa and -dpp instead of checking that its ports are free; "
            "always done where -dpa is no address of this host."
        ),
    ] = False
    nnodes: Annotated[
        Count, flag(help="Hosts that measure the network between them; start this command on each.")
    ] = 1
    node_rank: Annotated[
        Natural, flag(help="Number of this host among those of --nnodes; host 0 coordinates.")
    ] = 0
    master_addr: Annotated[str | None, flag(help="Address of the host with node rank 0.")] = None
    master_port: Annotated[Port, flag(help="Free port on the host with node rank 0.")] = 29500
    json: Annotated[bool, flag(help="Print JSON instead of tables.")] = False
    timeout: Annotated[float, Meta(gt=0), flag(help="Seconds to wait for any answer from other hosts.")] = (
        60.0
    )

    def __post_init__(self) -> None:
        check_written("--host", self.host)
        if self.master_addr is not None:
            check_written("--master-addr", self.master_addr)
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is out of range: with --nnodes {self.nnodes} ranks are 0 to "
                f"{self.nnodes - 1}"
            )
        if self.nnodes > 1 and self.master_addr is None:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --master-addr, an address of the host with rank 0"
            )
        if self.nnodes > 1 and self.master_port == 0:
            raise ValueError("--master-port must be a port that all hosts know, not 0")


def main(argv: list[str] | None = None) -> int:
    config = parse(
        DoctorConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep doctor",
        description="Check an installation, this host, a running mesh, or the network between hosts.",
        shares_file=True,
    )
    findings, found = examine(config)
    report = report_of(findings, found)
    if config.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print_report(report)
    return process.EXIT_FAILED if report.level is Level.BROKEN else 0


def examine(config: DoctorConfig) -> tuple[list[Finding], LinkFacts | None]:
    """All checks of these settings; only the first ones where Lockstep cannot run."""
    findings = packages.check_python()
    if worst(findings) is Level.BROKEN:  # what the others look at is not there
        return findings, None
    of_machine = machine.read_machine()
    findings += [
        *packages.check_packages(),
        *packages.check_torch(packages.ask_torch()),
        *packages.check_extras(),
        *gpu.check_triton(gpu.read_triton(os.environ), of_machine.has_gpu),
        *machine.check_machine(of_machine),
        ports.check_loopback(),
        *_check_mesh(config),
        *network.check_network(of_machine.has_gpu),
        *rdma.check_rdma(rdma.read_rdma()),
    ]
    found: LinkFacts | ProbeFailed | None = None
    if config.nnodes > 1:
        assert config.master_addr is not None
        ask = ProbeRequest(
            rank=config.node_rank,
            size=config.nnodes,
            master_address=config.master_addr,
            master_port=config.master_port,
            own_address=config.mesh.instance_address,
            timeout=config.timeout,
            mesh_key_file=config.mesh.mesh_key_file,
        )
        found = links.ask_links(ask)
        findings += links.check_links(found, ask)
    return findings, found if isinstance(found, LinkFacts) else None


def _check_mesh(config: DoctorConfig) -> list[Finding]:
    """Findings about the running mesh, or about ports and key of one to be."""
    findings = []
    of_mesh: keys.MeshKeys | None = None
    if config.mesh.mesh_key_file is not None:
        try:
            of_mesh = keys.load(Path(config.mesh.mesh_key_file))
            findings.append(ok(ports.AREA, "mesh key", config.mesh.mesh_key_file))
        except keys.KeyFileError as error:
            fix = "copy the mesh's key file here, with mode 0600"
            return [broken(ports.AREA, "mesh key", str(error), fix)]
    elif own_key.is_own(config.mesh):
        with contextlib.suppress(keys.KeyFileError):
            of_mesh = own_key.find(config.mesh)
    if config.running or not is_own(config.mesh.data_parallel_address):
        return findings + asyncio.run(mesh.check_mesh(config.mesh, of_mesh, min(config.timeout, 10.0)))
    if not config.mesh.headless:  # those bind no port that has a number
        rpc = config.mesh.data_parallel_rpc_port
        findings += [
            ports.check_port("HTTP", config.host, config.port, "--port"),
            ports.check_port("coordinator", config.mesh.data_parallel_address, rpc, "-dpp"),
        ]
    return findings


if __name__ == "__main__":
    sys.exit(main())
