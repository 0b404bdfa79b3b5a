"""Instances and workers on other hosts: the command line and the table of processes."""

from __future__ import annotations

import importlib.util

import pytest

from coordinator.settings.errors import FlagError
from coordinator.settings.flags import from_flat
from engine.config import NodesConfig
from router.config import ServeConfig
from router.launcher.launch import node_specs, process_table
from router.launcher.serve import main_serve


def config(**flags: object) -> ServeConfig:
    return from_flat(ServeConfig, dict(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nnodes": 2, "node_rank": 2}, "--node-rank 2 is out of range: with --nnodes 2 ranks are 0 to 1"),
        ({"nnodes": 3, "tensor_parallel_size": 4}, "Numbers of hosts that can: 1, 2, 4"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_port": 0}, "must be a port that all hosts know"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "0.0.0.0"}, "names no address that others"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "10.1.2.3"}, "so the mesh needs a key"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_backend": "ray"}, "drop --nnodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "drop --nnodes"),
        ({"distributed_executor_backend": "ray", "enable_expert_parallel": True}, "-ep needs all workers"),
        ({"data_parallel_backend": "ray", "instance_address": "127.0.0.1"}, "is of one host"),
    ],
)
def test_what_does_not_go_together_is_said(flags: dict[str, object], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        config(**flags)


def test_each_instance_waits_for_its_hosts_at_its_own_port() -> None:
    nodes = {"nnodes": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    head = [spec for spec in process_table(config(**nodes), None, 4) if spec.role == "engine"]
    other = node_specs(config(**nodes, node_rank=1), 4)
    ports = [NodesConfig().master_port, NodesConfig().master_port + 1]
    assert [spec.workers for spec in head] == [("PP0_TP0", "PP0_TP1")] * 2
    assert [spec.workers for spec in other] == [("PP1_TP0", "PP1_TP1")] * 2
    assert [spec.address for spec in other] == [f"for tcp://127.0.0.1:{port}" for port in ports]
    for spec in (head[1], other[1]):
        assert f"--master-port={ports[1]}" in spec.argv
    assert other[1].command()[1:4] == ["-P", "-m", "engine.executor.nodes"]


def test_without_ray_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flag in ("--data-parallel-backend", "--distributed-executor-backend"):
        assert main_serve([flag, "ray"]) == 2
        assert (
            f"{flag} ray: Ray is not installed here: pip install 'lockstep-mesh[ray]'"
            in capsys.readouterr().err
        )
