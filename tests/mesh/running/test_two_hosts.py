"""A mesh over two hosts, as in the README: keys, addresses, which peers are refused."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from coordinator.messages import State, View
from coordinator.process.process import EXIT_REFUSED, EXIT_WORKER_LOST
from coordinator.rpc import keys
from engine.config import SHIPPED_MODEL
from router.tools.doctor.findings import Level
from router.tools.doctor.report import DoctorReport
from tests.mesh.harness import wait_until
from tests.mesh.hosts import Host, two_hosts, why_not
from tests.parallel.link_pairs import needs_ucx

pytestmark = pytest.mark.mesh

SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "32", "--dtype", "float32"]
RPC = "62300"
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keys.write(keys.generate(), tmp_path / "mesh.key")
    return tmp_path / "mesh.key"


def view_of(head: Host, *argv: str) -> View:
    done = head.lockstep("status", "--json", "-dpa", head.address, "-dpp", RPC, *argv)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=View)


def completion(head: Host, rank: int) -> str:
    body = {
        "model": SHIPPED_MODEL,
        "prompt": "It was",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = head.ask(f"{URL}/v1/completions", body, {"X-data-parallel-rank": str(rank)})
    text: str = answer["choices"][0]["text"]
    return text


def test_experts_over_two_hosts_with_a_key(hosts: tuple[Host, Host], key: Path, tmp_path: Path) -> None:
    """Coordinator, router and an instance here, an instance there, in lockstep; strangers stay outside."""
    head, other = hosts
    mesh = ["-dpa", head.address, "-dpp", RPC]
    member = [*mesh, "--mesh-key-file", str(key)]
    serve = [SHIPPED_MODEL, "-dp", "2", "-dpl", "1", "-ep", *SMALL]
    with (
        head.command(tmp_path / "head.log", "router.launcher.serve", *serve, *member) as first,
        other.command(
            tmp_path / "other.log", "router.launcher.serve", *serve, "--headless", "-dpr", "1", *member
        ) as second,
    ):
        first.wait_for("2 instances ready")
        assert "2 instances in lockstep over tcp" in first.log
        view = view_of(head, "--mesh-key-file", str(key))
        assert [each.host for each in view.members] == [head.name, other.name]
        assert [each.address.rpartition(":")[0] for each in view.members] == [
            f"tcp://{head.address}",
            f"tcp://{other.address}",
        ]
        assert head.listening() == {"127.0.0.1", head.address}, "HTTP on loopback, the mesh on its address"
        assert other.listening() == {other.address}
        assert completion(head, 0) == completion(head, 1)
        assert_strangers_are_refused(head, other, mesh, tmp_path)
        view = wait_until(
            lambda: found if (found := view_of(head, "--mesh-key-file", str(key))).refused_peers else None,
            10,
            "the coordinator counts whom it refused",
        )
        assert [each.state for each in view.members] == [State.READY, State.READY]
        assert "coordinator: refused a connection without the key of this mesh" in first.log
        assert 'lockstep:refused_peers_total{by="coordinator"}' in head.ask(f"{URL}/metrics")
        assert completion(head, 1) == completion(head, 0)
        assert second.stop() == 0
        assert first.stop() == 0


@pytest.mark.nightly
def test_experts_over_two_hosts_one_of_which_has_two_instances(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path
) -> None:
    """Shared memory there, links between; after a death there, links alone."""
    head, other = hosts
    member = ["-dpa", head.address, "-dpp", RPC, "--mesh-key-file", str(key)]
    serve = [SHIPPED_MODEL, "-dp", "3", "-ep", *SMALL, *member]
    with (
        head.command(tmp_path / "head.log", "router.launcher.serve", *serve, "-dpl", "2") as first,
        other.command(
            tmp_path / "other.log", "router.launcher.serve", *serve, "--headless", "-dpl", "1", "-dpr", "2"
        ) as second,
    ):
        first.wait_for("3 instances ready")
        assert "3 instances in lockstep over shared_memory and tcp" in first.log
        expected = completion(head, 0)
        assert [completion(head, rank) for rank in (1, 2)] == [expected] * 2
        found = linked(head)
        assert found == {("0", "1"), ("0", "2"), ("1", "0"), ("1", "2"), ("2", "0"), ("2", "1")}
        first.child("Engine_1").kill()
        first.wait_for("2 instances in lockstep over tcp")
        assert [completion(head, rank) for rank in (0, 2)] == [expected] * 2
        wait_until(lambda: linked(head) == {("0", "2"), ("2", "0")}, 10, "series of the lost one are gone")
        assert second.stop() == 0
        assert first.stop() == 0


@pytest.mark.nightly
def test_strangers_at_every_port_keep_no_group_from_forming(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path
) -> None:
    """They connect before the mesh begins, and while an instance ends and comes back."""
    head, other = hosts
    member = ["-dpa", head.address, "-dpp", RPC, "--mesh-key-file", str(key)]
    serve = [SHIPPED_MODEL, "-dp", "2", "-dpl", "1", "-ep", *SMALL, *member]
    instance = [*serve, "--headless", "-dpr", "1"]
    strangers = [
        subprocess.Popen(
            [*host.prefix, sys.executable, "-m", "tests.mesh.running.strangers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for host in hosts
    ]
    try:
        with (
            head.command(tmp_path / "head.log", "router.launcher.serve", *serve) as first,
            other.command(tmp_path / "other.log", "router.launcher.serve", *instance) as second,
        ):
            first.wait_for("2 instances ready")
            expected = completion(head, 0)
            assert completion(head, 1) == expected
            second.child("Engine_1").kill()
            second.end()
            with other.command(tmp_path / "again.log", "router.launcher.serve", *instance) as third:
                third.wait_for("2 instances in lockstep over tcp")
                assert completion(head, 1) == completion(head, 0) == expected
                refused = view_of(head, "--mesh-key-file", str(key)).members[0].load.refused_peers
                assert refused > 10
                assert third.stop() == 0
            assert first.stop() == 0
        counts = [each.communicate("\n", timeout=20)[0].splitlines() for each in strangers]
        assert all(len(each) >= 2 for each in counts), counts
    finally:
        for each in strangers:
            each.kill()
            each.communicate()


def linked(head: Host) -> set[tuple[str, str]]:
    """Pairs of instances that the metrics have links of."""
    page: str = head.ask(f"{URL}/metrics")
    return set(re.findall(r'lockstep:link_wait_seconds_total{engine="(\d)",.*peer="(\d)"}', page))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        (["-dp", "2", "-dpl", "1", "-tp", "2"], "tcp"),
        (["-dp", "4", "-dpl", "2"], "shared_memory and tcp"),
        (["-dp", "2", "-dpl", "1", "--mesh-transport", "gloo"], "gloo"),
        (["-dp", "4", "-dpl", "2", "--mesh-transport", "ucx"], "shared_memory and tcp"),
    ],
    ids=["sharded instances", "two instances on each", "gloo", "UCX"],
)
def test_experts_over_two_hosts_in_other_layouts(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path, flags: list[str], transport: str
) -> None:
    """Members that share a host use shared memory there."""
    if "ucx" in flags:
        needs_ucx()
    head, other = hosts
    size, local = int(flags[1]), flags[3]
    serve = [
        SHIPPED_MODEL,
        "-ep",
        *flags,
        *SMALL,
        "-dpa",
        head.address,
        "-dpp",
        RPC,
        "--mesh-key-file",
        str(key),
    ]
    with (
        head.command(tmp_path / "head.log", "router.launcher.serve", *serve) as first,
        other.command(
            tmp_path / "other.log", "router.launcher.serve", *serve, "--headless", "-dpr", local
        ) as second,
    ):
        first.wait_for(f"{size} instances ready")
        assert f"{size} instances in lockstep over {transport}" in first.log
        assert ("tensors between members go over UCX" in first.log) == ("ucx" in flags)
        assert len({completion(head, rank) for rank in range(size)}) == 1
        assert second.stop() == 0
        assert first.stop() == 0


@pytest.mark.nightly
def test_a_router_that_alone_loses_the_way_to_an_instance(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path
) -> None:
    """Its requests there continue elsewhere; the path is used again once it is back."""
    head, other = hosts
    member = ["-dpa", other.address, "-dpp", RPC, "--mesh-key-file", str(key)]
    serve = [SHIPPED_MODEL, "-dp", "2", "-dpl", "1", *SMALL, *member]

    def is_attached() -> bool:
        instances = head.ask("http://127.0.0.1:8001/admin/world")["instances"]
        return [each["router"]["attached"] for each in instances] == [True, True]

    with (
        other.another_address() as lost,
        other.command(tmp_path / "first.log", "router.launcher.serve", *serve) as first,
        other.command(
            tmp_path / "second.log",
            "router.launcher.serve",
            *serve,
            "--headless",
            "-dpr",
            "1",
            "--instance-address",
            lost,
        ),
        head.command(tmp_path / "router.log", "router", *member, "--admin-port", "8001") as router,
    ):
        first.wait_for("2 instances ready")
        router.wait_for(f"instance 1 at tcp://{lost}:")
        wait_until(is_attached, 10, "the router knows both")
        expected = completion(head, 1)
        with head.dropping(lost):
            began = time.monotonic()
            assert completion(head, 1) == expected
            assert time.monotonic() - began > 5.0, "nobody else misses that instance"
            assert "1 requests of instance 1 go on elsewhere (connection_lost)" in router.log
        wait_until(is_attached, 20, "the router is there again")
        assert completion(head, 1) == expected


ONE_INSTANCE = [SHIPPED_MODEL, "-tp", "2", *SMALL, "--nnodes", "2", "--collective-timeout", "20"]


def test_one_instance_over_two_hosts(hosts: tuple[Host, Host], key: Path, tmp_path: Path) -> None:
    """Same text as one process; strangers are refused; a killed worker ends both hosts."""
    head, other = hosts
    with head.command(tmp_path / "alone.log", "router.launcher.serve", SHIPPED_MODEL, *SMALL) as alone:
        alone.wait_for("1 instance ready")
        expected = completion(head, 0)
        alone.stop()
    nodes = [*ONE_INSTANCE, "--master-addr", head.address]
    member = [*nodes, "--mesh-key-file", str(key)]
    with head.command(tmp_path / "head.log", "router.launcher.serve", *member) as first:
        first.wait_for("waiting for node rank 1 of 2")
        assert_wrong_hosts_are_refused(other, nodes, key, tmp_path)
        with other.command(
            tmp_path / "other.log", "router.launcher.serve", *member, "--node-rank", "1"
        ) as second:
            first.wait_for("1 instance ready")
            assert f"Worker_0_PP0_TP1 on {other.name}" in first.log
            assert head.listening() == {"127.0.0.1", head.address}
            assert other.listening() <= {other.address}
            assert completion(head, 0) == expected
            pids = [each.pid for each in (*first.family(), *second.family())]
            there = second.child("Worker_0_PP0_TP1")
            killed_at = time.monotonic()
            there.kill()
            first.wait_for("lost a worker: Worker_0_PP0_TP1", 20)
            assert time.monotonic() - killed_at < 5.0, "a second, on a host that is not busy"
            assert f"on {other.name} (node rank 1)) was killed by signal 9" in first.log
            assert (first.end(30), second.end(30)) == (EXIT_WORKER_LOST, EXIT_WORKER_LOST)
            assert "the instance ends: Worker_0_PP0_TP1" in second.log
            wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10, "no process is left on either host")


def assert_wrong_hosts_are_refused(other: Host, nodes: list[str], key: Path, tmp_path: Path) -> None:
    """Another key, setting, number of hosts or place is refused with the difference."""
    keys.write(keys.generate(), tmp_path / "their.key")
    for flags, reason in (
        (["--mesh-key-file", str(tmp_path / "their.key")], "it has another mesh key"),
        (["--mesh-key-file", str(key), "--dtype", "bfloat16"], "--dtype is bfloat16, the engine has float32"),
    ):
        with other.command(
            tmp_path / "wrong.log", "router.launcher.serve", *nodes, "--node-rank", "1", *flags
        ) as wrong:
            assert wrong.end(60) == EXIT_REFUSED, wrong.log
            assert reason in wrong.log


@pytest.mark.nightly
def test_a_host_ends_with_the_instance_and_one_that_never_comes_is_named(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path
) -> None:
    """A pipeline over both hosts, whose engine is killed; then one host alone."""
    head, other = hosts
    pipeline = [SHIPPED_MODEL, "-pp", "2", *SMALL, "--nnodes", "2", "--master-addr", head.address]
    member = [*pipeline, "--mesh-key-file", str(key)]
    with (
        head.command(tmp_path / "head.log", "router.launcher.serve", *member) as first,
        other.command(tmp_path / "other.log", "router.launcher.serve", *member, "--node-rank", "1") as second,
    ):
        first.wait_for("1 instance ready")
        assert completion(head, 0)
        workers = [first.child("Worker_0_PP0_TP0"), second.child("Worker_0_PP1_TP0")]
        first.child("Engine_0").kill()
        assert second.end(20) == EXIT_WORKER_LOST
        assert "the engine is gone: its connection broke" in second.log
        assert first.end(30) != 0
        wait_until(lambda: not any(each.is_running() for each in workers), 10, "no orphan")
    with head.command(
        tmp_path / "lonely.log", "router.launcher.serve", *member, "--startup-timeout", "5"
    ) as lonely:
        assert lonely.end(60) == 1
        assert "node rank 1" in lonely.log
        assert "did not come within 4 s: start `serve --nnodes 2 --node-rank 1" in lonely.log
    with other.command(
        tmp_path / "early.log", "router.launcher.serve", *member, "--node-rank", "1", "--startup-timeout", "2"
    ) as early:
        assert early.end(60) == 1
        assert (
            f"gave up after 2 s of waiting for the engine (node rank 0) at tcp://{head.address}" in early.log
        )


def assert_strangers_are_refused(head: Host, other: Host, mesh: list[str], tmp_path: Path) -> None:
    """Peers without a key, or with another, are refused at once with the reason."""
    keys.write(keys.generate(), tmp_path / "their.key")
    for flags, reason in (
        (["--insecure-mesh"], "it takes only peers with the key of its mesh"),
        (["--mesh-key-file", str(tmp_path / "their.key")], "it has another mesh key"),
    ):
        with other.command(
            tmp_path / "stranger.log", "router.launcher.serve", "--headless", *mesh, *flags
        ) as stranger:
            assert stranger.end(30) == 3
            assert reason in stranger.log
        status = other.lockstep("status", *mesh, *flags)
        assert (status.returncode, status.stdout) == (3, "")
        assert f"the coordinator at tcp://{head.address}:{RPC} refused us: {reason}" in status.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["-tp", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "{head}"],
            "so the mesh needs a key: make one with `lockstep keygen FILE`",
        ),
        (["-tp", "2", "--nnodes", "3"], "cannot be spread evenly. Numbers of hosts that can: 1, 2"),
        (["-dpa", "{head}"], "so the mesh needs a key: make one with `lockstep keygen FILE`"),
        (["-dpa", "0.0.0.0", "--insecure-mesh"], "choose one of this host's: {other} (eth0)"),
    ],
)
def test_what_cannot_be_reached_safely_is_refused_at_start(
    hosts: tuple[Host, Host], argv: list[str], message: str
) -> None:
    head, other = hosts
    names = {"head": head.address, "other": other.address}
    done = other.lockstep("serve", "--headless", *(each.format(**names) for each in argv))
    assert done.returncode == 2
    assert message.format(**names) in done.stderr


def test_addresses_of_others_and_no_way_there_are_named(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path
) -> None:
    head, other = hosts
    member = ["--mesh-key-file", str(key)]
    with other.command(tmp_path / "c.log", "coordinator", "-dpa", head.address, *member) as wrong:
        assert wrong.end(20) == 1
        assert f"{head.address} is no address of this host, which has {other.address} (eth0)" in wrong.log
    with head.command(tmp_path / "c2.log", "coordinator", "-dpa", head.address, *member) as right:
        right.wait_for(f"listening on tcp://{head.address}:29550")
        joins = ["-dpa", head.address, SHIPPED_MODEL, *SMALL, *member]
        with other.command(
            tmp_path / "e.log", "engine", "--instance-address", head.address, *joins
        ) as engine:
            assert engine.end(60) == 1
            assert f"--instance-address {head.address} is no address of this host" in engine.log
            assert "Traceback" not in engine.log


@pytest.mark.nightly
def test_doctor_on_both_hosts_measures_what_lies_between(hosts: tuple[Host, Host]) -> None:
    head, other = hosts
    group = ["doctor", "--json", "--nnodes", "2", "--master-addr", head.address, "--timeout", "60"]
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(host.lockstep, *group, "--node-rank", str(rank), timeout=200)
            for rank, host in enumerate(hosts)
        ]
        done = [each.result() for each in running]
    assert [each.returncode for each in done] == [0, 0], [each.stdout for each in done]
    reports = [msgspec.json.decode(each.stdout, type=DoctorReport) for each in done]
    links = reports[0].links
    assert links is not None
    assert links == reports[1].links
    assert [(each.host, each.address, each.interface) for each in links.hosts] == [
        (head.name, head.address, "eth0"),
        (other.name, other.address, "eth0"),
    ]
    assert {each.collective for each in links.timings} == {"all_reduce", "all_gather", "all_to_all"}
    assert any(each.check == "0 - 1" and "latency" in each.text for each in reports[1].findings)


@pytest.mark.nightly
def test_doctor_looks_at_a_mesh_from_another_host(
    hosts: tuple[Host, Host], key: Path, tmp_path: Path
) -> None:
    head, other = hosts
    member = ["-dpa", head.address, "-dpp", RPC, "--mesh-key-file", str(key)]
    with head.command(
        tmp_path / "head.log", "router.launcher.serve", SHIPPED_MODEL, *member, *SMALL
    ) as serve:
        serve.wait_for("1 instance ready")
        done = other.lockstep("doctor", "--json", *member)
        findings = {each.check: each for each in msgspec.json.decode(done.stdout, type=DoctorReport).findings}
        assert done.returncode == 0, done.stdout
        assert findings["coordinator"].level is Level.OK
        assert f"ready at tcp://{head.address}:" in findings["instance 0"].text
        here = head.lockstep("doctor", "--json", *member)
        findings = {each.check: each for each in msgspec.json.decode(here.stdout, type=DoctorReport).findings}
        assert "(lockstep: Coordinator :" in findings["coordinator"].text, "whose port it is"
        assert "(lockstep: Router :" in findings["HTTP"].text
        assert here.returncode == 0
        assert serve.stop() == 0
    gone = other.lockstep("doctor", "--json", "--timeout", "2", *member)
    assert gone.returncode == 1
    assert f"nothing answers at tcp://{head.address}:{RPC}" in gone.stdout
