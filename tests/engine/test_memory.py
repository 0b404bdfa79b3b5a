from __future__ import annotations

from pathlib import Path

import psutil

from engine.memory import available_memory


def cgroup(directory: Path, **files: str) -> Path:
    for name, content in files.items():
        (directory / f"memory.{name}").write_text(content)
    return directory


def test_a_container_leaves_what_its_limit_leaves(tmp_path: Path) -> None:
    limited = cgroup(
        tmp_path,
        max="1000000\n",
        current="900000\n",
        stat="anon 700000\ninactive_file 150000\nactive_file 1\n",
    )
    assert available_memory(limited) == 250_000
    assert available_memory(cgroup(tmp_path, current="2000000\n")) == 0


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    most = psutil.virtual_memory().total
    for directory in (tmp_path, cgroup(tmp_path, max="max\n", current="5\n"), cgroup(tmp_path, max="9" * 18)):
        assert 0 < available_memory(directory) <= most
