"""Control groups as files: trees of both versions, from inside and outside containers."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from parallel import topology
from parallel.control_groups import MemoryLimit, cpu_quota, memory_limits


def group(directory: Path, **files: str) -> Path:
    """A group's files; two underscores stand for a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = group(
        tmp_path / "tree",
        memory__max="1000000\n",
        memory__current="900000\n",
        memory__stat="anon 700000\ninactive_file 150000\nactive_file 50000\n",
        cpu__max="150000 100000\n",
    )
    for text in ("0::/\n", "0::/../other\n", "0::/docker/abc\n", ""):
        assert memory_limits(root, own(tmp_path, text)) == [MemoryLimit(1_000_000, 900_000, 200_000)]
        assert cpu_quota(root, own(tmp_path, text)) == 1.5


def test_all_groups_from_a_unit_or_a_job_up_count(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    group(root / "slurm", memory__max="max\n", memory__current="9\n", cpu__max="max 100000\n")
    group(root / "slurm/job", memory__max="500\n", memory__current="100\n", cpu__max="400000 100000\n")
    group(root / "slurm/job/step", memory__max="300\n", memory__current="20\n", cpu__max="200000 100000\n")
    group(root / "other", memory__max="1\n", memory__current="1\n", cpu__max="1000 100000\n")
    here = own(tmp_path, "0::/slurm/job/step\n")
    assert memory_limits(root, here) == [MemoryLimit(300, 20, 0), MemoryLimit(500, 100, 0)]
    assert cpu_quota(root, here) == 2.0


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    group(
        root / "memory/box",
        memory__limit_in_bytes="700\n",
        memory__usage_in_bytes="650\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 12\n",
    )
    group(root / "memory", memory__limit_in_bytes=f"{2**63 - 4096}\n", memory__usage_in_bytes="5000\n")
    group(root / "cpu/box", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    group(root / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    here = own(tmp_path, "12:cpu,cpuacct:/box\n9:memory:/box\n0::/elsewhere\n")
    assert memory_limits(root, here)[0] == MemoryLimit(700, 650, 42)
    assert cpu_quota(root, here) == 0.5


def test_without_limits_there_are_none(tmp_path: Path) -> None:
    empty = group(tmp_path / "empty")
    odd = group(
        tmp_path / "odd", memory__max="max\n", memory__current="5\n", cpu__max="?\n", memory__stat="\n"
    )
    for root in (tmp_path / "nowhere", empty, odd):
        assert memory_limits(root, own(tmp_path, "0::/\n")) == []
        assert cpu_quota(root, own(tmp_path, "0::/\n")) is None
    assert all(limit.most > 0 for limit in memory_limits()), "those of this process, if any"
    assert psutil.virtual_memory().total > 0


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (0.5, 1), (2.5, 2), (4.0, 4), (64.0, 4)])
def test_no_more_threads_than_a_quota_grants(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))
    monkeypatch.setattr(topology, "_quota", lambda: quota)
    assert topology.usable_cores() == cores


def test_a_quota_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances ask for their cores between any two steps."""
    topology.usable_cores()
    monkeypatch.setattr(topology, "cpu_quota", lambda: pytest.fail("reads files"))
    topology.usable_cores()
