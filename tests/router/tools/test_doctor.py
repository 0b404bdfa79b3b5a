"""``lockstep doctor``: what it makes of what it reads, and its reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.addresses import Interface
from coordinator.config import MeshConfig
from coordinator.membership.records import Rules
from coordinator.rpc import keys
from coordinator.server import Coordinator
from coordinator.settings import flags
from engine.probe.facts import Device, HostFacts, LinkFacts, ProbeFailed, Timing, TorchFacts
from engine.probe.links import ProbeRequest
from parallel.rounds import memory_order
from router.tools.doctor import command, links, machine, mesh, network, packages, ports
from router.tools.doctor.findings import Finding, Level, broken, note, ok, warning, worst
from router.tools.doctor.gpu import TritonFacts, check_triton, read_triton
from router.tools.doctor.machine import GIB, MachineFacts
from router.tools.doctor.report import DoctorReport, print_report, report_of

REPLACE = msgspec.structs.replace

# ---- installation


def test_old_pythons_and_other_systems_are_broken() -> None:
    assert worst(packages.check_python((3, 11, 0), "linux")) is Level.OK
    assert worst(packages.check_python((3, 10, 9), "linux")) is Level.BROKEN
    assert worst(packages.check_python((3, 12, 0), "darwin")) is Level.BROKEN


def test_this_installation_has_what_it_needs() -> None:
    (finding,) = packages.check_packages()
    assert finding.level in (Level.OK, Level.NOTE), finding


NEEDS = ["torch>=2.6", "msgspec>=0.19", "pyzmq (>=26.0)", "rich<16,>=13.0", 'aiohttp>=3.9; extra == "bench"']


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"torch": "2.5.1+cpu"}, "torch>=2.6 is needed, 2.5.1+cpu is there"),
        ({"torch": "2.6"}, None),
        ({"torch": "2.6.0rc1"}, None),
        ({"msgspec": "0.18.6"}, "msgspec>=0.19 is needed, 0.18.6 is there"),
        ({"pyzmq": "25.1"}, "pyzmq>=26.0 is needed, 25.1 is there"),
        ({"rich": "16.0"}, "rich<16,>=13.0 is needed, 16.0 is there"),
        ({"msgspec": None}, "msgspec>=0.19 is needed, it is missing"),
    ],
)
def test_packages_are_held_against_the_needs(
    changed: dict[str, str | None], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: dict[str, str | None] = {
        "torch": "2.13.0+cpu",
        "msgspec": "0.22.0",
        "pyzmq": "27.3.0",
        "rich": "15.0.0",
    }
    versions |= changed

    def installed(name: str) -> str:
        found = versions[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(packages, "requires", lambda _name: NEEDS)
    monkeypatch.setattr(packages, "version", lambda _name: "0.1.0")
    (finding,) = packages.check_packages(installed)
    if problem is None:
        assert finding.level is Level.OK
        assert "the 4 packages" in finding.text
    else:
        assert finding.level is Level.BROKEN
        assert problem in finding.text
        assert finding.fix.startswith("pip install '")


TORCH = TorchFacts(
    version="2.13.0", transformers="5.23.0", cuda=None, devices=[], cpu_capability="AVX512", threads=2, gloo=True, nccl=None
)  # fmt: skip
H200 = Device("NVIDIA H200", 139 * GIB, "9.0")


@pytest.mark.parametrize(
    ("facts", "has_gpu", "level", "text"),
    [
        (TORCH, False, Level.OK, "no GPU; computes on the CPU"),
        (TORCH, True, Level.WARNING, "there is a GPU, but torch is the CPU build"),
        (REPLACE(TORCH, cuda="13.0"), True, Level.WARNING, "torch for CUDA 13.0 does not see it"),
        (REPLACE(TORCH, cuda="13.0", devices=[H200], nccl="2.28"), True, Level.OK, "NVIDIA H200 (139 GiB, sm 9.0); NCCL 2.28"),
        (REPLACE(TORCH, gloo=False), False, Level.BROKEN, "no gloo"),
        (ProbeFailed("ImportError: libgomp"), False, Level.BROKEN, "cannot be loaded: ImportError: libgomp"),
    ],
)  # fmt: skip
def test_torch_and_its_devices(
    facts: TorchFacts | ProbeFailed, has_gpu: bool, level: Level, text: str
) -> None:
    findings = packages.check_torch(facts, has_gpu)
    assert worst(findings) is level
    assert any(text in each.text for each in findings), findings


def test_a_torch_that_crashes_is_told_from_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken_python = tmp_path / "python"
    broken_python.write_text("#!/bin/sh\necho 'Illegal instruction' >&2\nexit 132\n")
    broken_python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken_python))
    assert packages.ask_torch() == ProbeFailed(
        "the child that loads it ended with status 132: Illegal instruction"
    )


@pytest.mark.parametrize(
    ("changes", "text", "fix"),
    [
        ({}, "its kernels can be compiled, with gcc", ""),
        ({"compiler": ""}, "without a C compiler Triton compiles nothing", "install gcc"),
        ({"headers": False}, "without Python.h", "python3-dev"),
        ({"package": False, "headers": False}, "without the package triton and Python.h", "pip install"),
    ],
)
def test_what_kernels_of_a_gpu_need_is_looked_for(changes: dict[str, Any], text: str, fix: str) -> None:
    facts = REPLACE(TritonFacts(package=True, compiler="gcc", headers=True), **changes)
    (finding,) = check_triton(facts, has_gpu=True)
    assert text in finding.text
    assert fix in finding.fix
    assert finding.level is (Level.NOTE if fix else Level.OK)
    assert check_triton(facts, has_gpu=False) == []


def test_the_compiler_of_kernels_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_triton({}).compiler == ""
    assert read_triton({"CC": "clang-19"}).compiler == "clang-19"


# ---- machine

GOOD = MachineFacts(
    cores=8, cores_of_host=8, quota=None, cpu="CPU", features=("avx2", "avx512_bf16"), environment={},
    memory=64 * GIB, free_memory=60 * GIB, open_files=65536, has_gpu=False,
)  # fmt: skip


def test_this_machine_can_be_read() -> None:
    found = machine.read_machine()
    assert 1 <= found.cores <= found.cores_of_host
    assert 0 < found.free_memory <= found.memory
    assert len(machine.check_machine(found)) == 6


def test_a_good_machine_has_no_problem() -> None:
    assert worst(machine.check_machine(GOOD)) is Level.OK


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        (
            {"quota": 2.5},
            Level.NOTE,
            "the control group grants the time of 2.5: instances compute with 2 threads",
        ),
        ({"quota": 8.0}, Level.OK, "8 of 8 cores"),
        ({"environment": {"OMP_NUM_THREADS": "16"}}, Level.WARNING, "OMP_NUM_THREADS=16 on 8 cores"),
        ({"environment": {"OMP_NUM_THREADS": "4,2"}}, Level.OK, "OMP_NUM_THREADS=4,2"),
        ({"environment": {"OMP_WAIT_POLICY": "ACTIVE"}}, Level.WARNING, "OMP_WAIT_POLICY=ACTIVE"),
        ({"features": ("avx2",)}, Level.NOTE, "no bfloat16 arithmetic"),
        ({"features": ("avx2", "fma")}, Level.OK, "multiplied as float32"),
        ({"features": ("avx2",), "has_gpu": True}, Level.OK, "avx2"),
        ({"free_memory": GIB}, Level.WARNING, "1.0 GiB free of 64.0 GiB, which is little"),
        ({"open_files": 1024}, Level.WARNING, "1024 open files"),
    ],
)
def test_what_is_wrong_with_a_machine_is_said_with_its_fix(
    changes: dict[str, Any], level: Level, text: str
) -> None:
    findings = machine.check_machine(REPLACE(GOOD, **changes))
    assert worst(findings) is level
    (about,) = [each for each in findings if text in each.text]
    assert bool(about.fix) == (level is not Level.OK)


def test_a_machine_without_a_fence_uses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_order, "fence_here", lambda: None)
    (found,) = [each for each in machine.check_machine(GOOD) if each.level is not Level.OK]
    assert (found.level, found.fix) == (Level.NOTE, "install g++")
    assert "members of one host use sockets" in found.text


# ---- ports


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_that_is_held_names_its_holder(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    finding = ports.check_port("HTTP", "127.0.0.1", port, "--port")
    assert finding.level in (Level.BROKEN, Level.WARNING)
    assert f"127.0.0.1:{port} is held by pid" in finding.text
    assert "--port" in finding.fix
    listener.close()
    assert ports.check_port("HTTP", "127.0.0.1", port, "--port").level is Level.OK


def test_a_port_that_a_mesh_holds_is_no_breakage() -> None:
    code = (
        "import setproctitle, socket, sys\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "setproctitle.setproctitle('lockstep: Coordinator')\n"
        "print(server.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, "room for a title " * 5]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        finding = ports.check_port("coordinator", "127.0.0.1", int(child.stdout.readline()), "-dpp")
        child.communicate()
    assert finding.level is Level.WARNING
    assert f"is held by pid {child.pid} (lockstep: Coordinator)" in finding.text


def test_a_foreign_address_is_no_port() -> None:
    finding = ports.check_port("HTTP", "198.51.100.7", 8000, "--port")
    assert finding.level is Level.BROKEN
    assert "Cannot assign requested address" in finding.text


def test_loopback_works_here() -> None:
    assert ports.check_loopback() == ok("ports", "loopback", "127.0.0.1 works")


# ---- network

ETH = Interface("eth0", "10.0.0.1", 10_000, 1500)
FAST = Interface("eth1", "10.1.0.1", 100_000, 9000)


def test_addresses_and_the_choice_among_them() -> None:
    assert network.check_interfaces([])[0].level is Level.NOTE
    (one,) = network.check_interfaces([ETH])
    assert (one.level, one.text) == (Level.OK, "10.0.0.1, 10 Gbit/s, MTU 1500")
    assert "--instance-address" in network.check_interfaces([ETH, FAST])[-1].fix


def test_a_host_name_that_means_loopback_is_no_address_for_others() -> None:
    assert network.check_host_name("h", ["10.0.0.1"]).level is Level.OK
    assert network.check_host_name("h", ["127.0.1.1"]).level is Level.NOTE
    assert network.check_host_name("h", []).level is Level.NOTE


@pytest.mark.parametrize(
    ("infiniband", "environment", "has_gpu", "level", "text"),
    [
        ([], {}, False, Level.OK, "TCP links"),
        (["mlx5_0:1"], {}, False, Level.OK, "UCX over mlx5_0:1 where all hosts have it"),
        ([], {}, True, Level.OK, "through the host's memory"),
        (["mlx5_0:1"], {}, True, Level.OK, "UCX over mlx5_0:1 where all hosts have it"),
        ([], {"GLOO_SOCKET_IFNAME": "eth1"}, False, Level.NOTE, "is ignored"),
    ],
)
def test_which_network_carries_it(
    infiniband: list[str], environment: dict[str, str], has_gpu: bool, level: Level, text: str
) -> None:
    finding = network.check_transport(infiniband, environment, has_gpu)
    assert finding.level is level
    assert text in finding.text


# ---- a running mesh


def asked(config: MeshConfig, key: keys.MeshKeys | None, its_key: keys.MeshKeys | None) -> list[Finding]:
    async def ask() -> list[Finding]:
        server = Coordinator("tcp://127.0.0.1:0", Rules(name="m", size=2), its_key)
        running = asyncio.create_task(server.run())
        try:
            port = int(server.endpoint.rpartition(":")[2])
            return await mesh.check_mesh(REPLACE(config, data_parallel_rpc_port=port), key, 5.0)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    return asyncio.run(ask())


def test_a_mesh_that_waits_says_for_whom() -> None:
    (finding,) = asked(MeshConfig(), None, None)
    assert finding.level is Level.NOTE
    assert "waiting for ranks 0, 1" in finding.text


def test_a_mesh_with_another_key_is_broken_from_here() -> None:
    (finding,) = asked(MeshConfig(), None, keys.generate())
    assert finding.level is Level.BROKEN
    assert "takes only peers with the key of its mesh" in finding.text


def test_no_mesh_is_broken() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        config = MeshConfig(data_parallel_rpc_port=probe.getsockname()[1])
        (finding,) = asyncio.run(mesh.check_mesh(config, None, 0.3))
    assert finding.level is Level.BROKEN
    assert "nothing answers at tcp://127.0.0.1" in finding.text


# ---- between hosts

ASK = ProbeRequest(
    rank=0,
    size=2,
    master_address="10.0.0.1",
    master_port=29500,
    own_address=None,
    timeout=60.0,
    mesh_key_file="mesh.key",
)


def host(rank: int, **changes: Any) -> HostFacts:
    facts = HostFacts(
        rank=rank, host=f"host{rank}", address=f"10.0.0.{rank + 1}", interface="eth0", mbit=10_000, mtu=1500,
        lockstep="0.1.0", protocol=1, torch="2.13.0", faster=[], infiniband=[],
    )  # fmt: skip
    return REPLACE(facts, **changes)


def found(latency: float = 100e-6, rate: float = 1e9, **changes: Any) -> LinkFacts:
    timings = [
        Timing(
            ranks=[0, 1], collective=collective, num_bytes=num_bytes, seconds=latency, bytes_per_second=rate
        )
        for num_bytes in (64, 8 << 20)
        for collective in ("all_reduce", "all_gather")
    ]
    return LinkFacts(hosts=[host(0), host(1, **changes)], timings=timings)


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        (found(), Level.OK, "latency 100 us, bandwidth 1000 MB/s (80% of 10 Gbit/s)"),
        (found(latency=8e-3), Level.WARNING, "each layer with spread experts takes 16 ms longer"),
        (found(rate=50e6), Level.WARNING, "slower than 1 Gbit/s"),
        (found(rate=200e6), Level.NOTE, "(16% of 10 Gbit/s): a small part"),
        (found(mtu=9000), Level.WARNING, "the MTU differs: host0 1500, host1 9000"),
        (found(torch="2.12.0"), Level.WARNING, "torch differs: host0 2.13.0, host1 2.12.0"),
        (found(lockstep="0.2.0"), Level.WARNING, "Lockstep differs"),
        (found(lockstep="0.2.0", protocol=2), Level.BROKEN, "do not understand each other"),
        (found(faster=["10.1.0.1 (eth1)"]), Level.NOTE, "host1 (10.0.0.2): TCP over eth0"),
        (found(host="host0"), Level.OK, "one host: its instances use shared memory instead"),
        (ProbeFailed("node rank 1 did not come within 60 s"), Level.BROKEN, "node rank 1 did not come"),
    ],
)
def test_what_is_said_of_links(answer: LinkFacts | ProbeFailed, level: Level, text: str) -> None:
    findings = links.check_links(answer, ASK)
    assert worst(findings) is level
    assert any(text in each.text for each in findings), findings
    assert all(each.fix for each in findings if each.level is not Level.OK)


# ---- the report and the command


def test_the_worst_level_counts() -> None:
    levels = [ok("a", "b", ""), note("a", "b", ""), warning("a", "b", "", "f"), broken("a", "b", "", "f")]
    for count in range(1, 5):
        assert worst(levels[:count]) is list(Level)[count - 1]
    assert worst([]) is Level.OK


def test_the_tables_show_everything_and_what_to_fix(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(
        report_of(
            [ok("machine", "cores", "8"), broken("ports", "HTTP", "held at [::1]:80", "end [it]")], found()
        )
    )
    shown = capsys.readouterr().out
    for text in ("cores", "held at [::1]:80", "broken HTTP: end [it]", "2 checks, 1 broken", "all-reduce", "host0 (10.0.0.1)",
                 "8,388,608", "100 us, 1000 MB/s"):  # fmt: skip
        assert text in shown


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags with free ports; the child that loads torch (tested elsewhere) is left out."""
    monkeypatch.setattr(packages, "ask_torch", lambda: TORCH)
    argv = []
    for name in ("--port", "-dpp"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            argv += [name, str(probe.getsockname()[1])]
    return argv


def test_json_and_exit_status(free: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", *free]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=DoctorReport)
    assert report.level is not Level.BROKEN
    assert {"Python", "packages", "torch", "cores", "loopback", "HTTP", "coordinator", "transport"} <= {
        each.check for each in report.findings
    }
    with socket.create_server(("127.0.0.1", int(free[1]))):
        assert command.main(["--json", *free]) in (0, 1)  # 0 if this process is called lockstep
        answer = json.loads(capsys.readouterr().out)
        (http,) = [each for each in answer["findings"] if each["check"] == "HTTP"]
        assert "held by pid" in http["text"]


def test_a_bad_key_file_and_a_mesh_elsewhere_are_findings(
    free: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json", "--mesh-key-file", str(tmp_path / "none"), *free]) == 1
    assert "make one with `lockstep keygen" in capsys.readouterr().out
    assert command.main(["--running", "--timeout", "0.3", *free]) == 1
    assert "nothing answers at tcp://127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs --master-addr"),
        (["--node-rank", "1"], "--node-rank 1 is out of range: with --nnodes 1 ranks are 0 to 0"),
        (["--nnodes", "2", "--master-addr", "h", "--master-port", "0"], "not 0"),
        (["-dpa", "10.0.0.1"], "so the mesh needs a key"),
        (["--host", "a..b"], "--host 'a..b' is no address"),
        (["--nnodes", "2", "--master-addr", "a..b"], "--master-addr 'a..b' is no address"),
    ],
)
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flags.parse(command.DoctorConfig, argv, prog="lockstep doctor", description="")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
