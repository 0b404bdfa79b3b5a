"""The units of systemd and the Slurm job, each on a machine in namespaces."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.files import ROOT
from tests.deploy.gateways import status
from tests.deploy.machine import Machine, booted
from tests.deploy.rolling import is_right, roll
from tests.mesh.faults.load import Answer, ask, body_of, session
from tests.mesh.harness import free_port, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(900)]

UNITS = (1, 2, 3)
"""Units of instances: one instance each."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with booted(tmp_path) as found:
        yield found


# ---- systemd


def installation() -> str:
    """The commands of docs/run/deploy-hosts.md, up to those that start the units."""
    page = (ROOT / "docs" / "run" / "deploy-hosts.md").read_text()
    lines = page.split("```")[1].strip().splitlines()
    assert lines[-1].startswith("systemctl daemon-reload")
    return "set -e; cd /opt/source; export PATH=$PATH:/opt/lockstep/bin\n" + "\n".join(lines[:-1])


def test_a_rolling_update_under_systemd_costs_nothing(machine: Machine) -> None:
    """Three units of instances are restarted one after another, under load."""
    port, rpc = free_port(), free_port()
    machine.run(installation())
    key = "--mesh-key-file /etc/lockstep/mesh.key"
    head = f"lockstep-moe -dp {len(UNITS)} -dpl 0 --port {port} -dpp {rpc} {key}"
    machine.write("/etc/lockstep/main.env", f"LOCKSTEP_ARGS={head}\n", "640", "lockstep")
    for number in UNITS:
        text = f"LOCKSTEP_ARGS=-dpl 1 -dpp {rpc} {key} --drain-timeout 60\n"
        machine.write(f"/etc/lockstep/instance-{number}.env", text, "640", "lockstep")
    units = " ".join(f"lockstep-instance@{number}" for number in UNITS)
    machine.run(f"systemctl daemon-reload && systemctl start lockstep@main {units}", timeout=300)
    assert machine.run(f"systemctl is-active lockstep@main {units}").split() == ["active"] * 4

    def update() -> bool:
        for number in UNITS:
            machine.run(f"systemctl restart lockstep-instance@{number}", timeout=200)
        return True

    counts = roll(f"http://127.0.0.1:{port}", update, streams=4, requests=24, tokens=120)
    print(counts)
    assert is_right(counts)
    journal = machine.run("journalctl -o cat LOCKSTEP_ROLE=instance")
    assert len(re.findall("draining for at most 60 s", journal)) == len(UNITS)
    assert "Traceback" not in journal
    shown = machine.run("systemctl show -p StatusText lockstep-instance@1")
    assert "1 of 1 local instances ready" in shown
    machine.run(f"systemctl stop {units} lockstep@main", timeout=200)
    failed = machine.run("systemctl list-units --failed --no-legend --plain 'lockstep*'")
    assert failed.strip() == ""


# ---- Slurm

SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmdPidFile=/run/slurmd-%n.pid
SlurmdLogFile=/var/log/slurmd-%n.log
SlurmctldLogFile=/var/log/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first}
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second}
PartitionName=all Nodes=node0,node1 Default=YES State=UP
"""


class Streams:
    """One stream after another, until the endpoint takes none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers: list[Answer] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    async def _run(self) -> None:
        async with session() as client:
            while not self._stopped.is_set():
                answer = Answer(len(self.answers), time.monotonic())
                self.answers.append(answer)
                await ask(client, self._url, body_of(len(self.answers), longest=100, most_tokens=400), answer)
                if answer.error is not None and not answer.ids:
                    await asyncio.sleep(0.2)  # it takes none any more


def slurm(machine: Machine) -> None:
    """Start a Slurm with two node daemons."""
    host = machine.run("hostname").strip()
    text = SLURM.format(host=host, control=free_port(), first=free_port(), second=free_port())
    machine.write("/etc/slurm/slurm.conf", text)
    machine.write(
        "/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n"
    )  # nothing uses it; else it looks for one
    machine.run("mkdir -p /var/spool/slurmctld /var/spool/slurmd-node0 /var/spool/slurmd-node1")
    machine.run("systemctl is-active munge && slurmctld && slurmd -N node0 && slurmd -N node1")
    wait_until(
        lambda: machine.run("sinfo --noheader -o '%T %D'", check=False).strip() == "idle 2",
        60,
        "both nodes are idle",
        every=1,
    )


def test_a_slurm_job_serves_and_drains_before_its_limit(machine: Machine) -> None:
    """Slurm signals the job 60 to 120 s before its limit of three minutes."""
    slurm(machine)
    port = free_port()
    variables = {
        "LOCKSTEP": "/opt/lockstep/bin/lockstep",
        "LOCKSTEP_HEAD_ADDRESS": "127.0.0.1",
        "LOCKSTEP_PORT": port,
        "LOCKSTEP_RPC_PORT": free_port(),
        "LOCKSTEP_DRAIN": 30,
        "LOCKSTEP_REQUEUE": 0,
        "LOCKSTEP_BUILT_KERNELS": "/opt/lockstep/kernels",
        "LOCKSTEP_RUN_CLUSTER": "/opt/source/examples/cluster/run_cluster.sh",
    }
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    submit = "sbatch --parsable --time=3 --signal=B:TERM@60 --output=/root/job.log"
    job = machine.run(
        f"cd /root && {given} {submit} /opt/source/examples/cluster/lockstep.sbatch lockstep-moe"
    )
    job = job.strip()

    def log() -> str:
        return machine.run("cat /root/job.log", check=False)

    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: "2 instances ready" in log(), 60, "the mesh serves", every=1)
    assert status(f"{url}/health") == 200
    with Streams(url) as streams:
        wait_until(lambda: "the mesh has ended" in log(), 80, "the job drains", every=1)
    text = log()
    print(text)
    assert "SIGTERM: instances drain, for at most 30 s" in text
    assert "the mesh has ended, status 0" in text
    for node in (0, 1):
        assert re.search(rf"^{node}: .*draining for at most 30 s", text, re.MULTILINE)
    begun = [answer for answer in streams.answers if answer.ids]
    broken = [answer.error for answer in begun if answer.error is not None]
    assert len(begun) > 3
    assert broken == [], "what was under way has finished"
    wait_until(
        lambda: "JobState=COMPLETED" in machine.run(f"scontrol show job {job}"), 30, "COMPLETED", every=1
    )
    shown = machine.run(f"scontrol show job {job}")
    assert "TimeLimit=00:03:00" in shown
    print(re.findall(r"RunTime=\S+", shown))
