"""Files that routers map, where the disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.process.runtime import runtime_directory
from router.config import HttpConfig
from router.http.accept import Tally
from router.http.quotas import Quotas
from router.http.shared_files import CONNECTIONS, QUOTAS, shared_files

ON_A_FULL_DISK = """
mount -t tmpfs -o size=64k,mode=700 tmpfs "$1" && dd if=/dev/zero of="$1/all" bs=4k 2>/dev/null
shift; exec "$@"
"""
MAPS = """
import sys
from pathlib import Path
from router.http.accept import Tally
from router.http.quotas import Quotas
from router.key_limits import KeyLimits
full = Path(sys.argv[1])
for make in (
    lambda: Tally(full / "connections", 0, 2).tell(1),
    lambda: Quotas([KeyLimits(requests_per_minute=1)], file=full / "quotas"),
):
    try:
        make()
    except OSError as error:
        print(error)
"""
LEAVES = """
import os, sys
from coordinator.process.runtime import runtime_directory
with runtime_directory({"connections": 8}) as path:
    print(path.parent, (path / "connections").stat().st_size)
print(os.listdir(sys.argv[1]))
"""


def on_a_full_disk(directory: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Output of a Python script in whose mounts ``directory`` has no room."""
    prefix = ["unshare", "-rm", "sh", "-c", ON_A_FULL_DISK, "sh", str(directory)]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs mount namespaces")
    return subprocess.run(
        [*prefix, sys.executable, "-c", script, str(directory)],
        capture_output=True, text=True, check=False, timeout=60, env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip


def test_a_disk_without_room_is_an_error_and_no_signal(tmp_path: Path) -> None:
    found = on_a_full_disk(tmp_path, MAPS)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [
        f"[Errno 28] No space left on device: '{tmp_path}/{name}'" for name in ("connections", "quotas")
    ]


def test_the_next_place_is_taken_where_one_has_no_room(tmp_path: Path) -> None:
    full, session = tmp_path / "full", tmp_path / "session"
    full.mkdir()
    session.mkdir()
    places = {"TMPDIR": str(full), "XDG_RUNTIME_DIR": str(session)}
    script = f"from coordinator.process import runtime\nruntime.PLACES = ('/proc',) * 3\n{LEAVES}"
    found = on_a_full_disk(full, script, **places)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [f"{session} 8", "['all']"]


def test_the_launcher_takes_the_space_that_routers_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = HttpConfig(api_key=("a", "b"))
    with runtime_directory(shared_files(config, 3)) as path:
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.stat().st_size}
        Tally(path / CONNECTIONS, 2, 3)
        Quotas(config.key_limits, file=path / QUOTAS, front_end=2, front_ends=3)
        assert sizes == {CONNECTIONS: 3 * 4, QUOTAS: 2 * (3 + 3) * 8}
        assert all((path / name).stat().st_size == num_bytes for name, num_bytes in sizes.items())
