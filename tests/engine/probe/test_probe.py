"""The children that look at torch and measure the network, as ``lockstep doctor`` starts them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from engine.probe.facts import LinkFacts, ProbeFailed, TorchFacts
from engine.probe.links import ProbeRequest
from parallel import measure
from parallel.links.infiniband import active_ports
from tests.mesh.harness import free_port

pytestmark = pytest.mark.mesh


def test_torch_tells_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.probe.torch_build"], capture_output=True, check=True, timeout=120
    )
    facts = msgspec.json.decode(done.stdout, type=TorchFacts)
    assert facts.version == str(torch.__version__)
    assert facts.gloo
    assert len(facts.devices) == torch.cuda.device_count()
    assert facts.cpu_capability == torch.backends.cpu.get_cpu_capability()


def child(rank: int, size: int, port: int, timeout: float, address: str = "127.0.0.1") -> bytes:
    ask = ProbeRequest(
        rank=rank, size=size, master_address=address, master_port=port, own_address=None, timeout=timeout
    )
    return subprocess.run(
        [sys.executable, "-P", "-m", "engine.probe.links", msgspec.json.encode(ask).decode()],
        capture_output=True,
        check=True,
        timeout=240,
    ).stdout


@pytest.mark.nightly
def test_three_hosts_measure_each_pair_and_all_together() -> None:
    port = free_port()
    said: dict[int, bytes] = {}

    def host(rank: int) -> None:
        said[rank] = child(rank, 3, port, 120.0)

    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == said[1] == said[2], said
    links = msgspec.json.decode(said[0], type=LinkFacts)
    assert [each.rank for each in links.hosts] == [0, 1, 2]
    assert {each.interface for each in links.hosts} == {"lo"}
    groups = [[0, 1], [0, 2], [1, 2], [0, 1, 2]]
    cells = [(each.ranks, each.collective, each.num_bytes) for each in links.timings]
    assert cells == [
        (ranks, collective, num_bytes) for ranks in groups for collective, num_bytes in measure.cells()
    ]
    assert all(each.seconds > 0 and each.bytes_per_second > 0 for each in links.timings)


@pytest.mark.parametrize(
    ("rank", "address", "error"),
    [
        (0, "127.0.0.1", "node rank 1 did not come within 1 s"),
        (1, "127.0.0.1", "no meeting place answers at 127.0.0.1:"),
        (0, "198.51.100.7", "--master-addr 198.51.100.7 is no address of this host"),
    ],
    ids=["the other", "the leader", "elsewhere"],
)
def test_who_does_not_come_is_named_in_bounded_time(rank: int, address: str, error: str) -> None:
    began = time.monotonic()
    failed = msgspec.json.decode(child(rank, 2, free_port(), 1.0, address), type=ProbeFailed)
    assert error in failed.error
    assert time.monotonic() - began < 60


def test_infiniband_ports_that_are_up(tmp_path: Path) -> None:
    assert active_ports(tmp_path) == []
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")
    assert active_ports(tmp_path) == ["mlx5_0:1 InfiniBand 200 Gb/sec (4X HDR)"]
