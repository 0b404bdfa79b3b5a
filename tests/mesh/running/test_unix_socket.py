"""A mesh at a Unix socket, with a read-only /tmp, and leftovers of a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from coordinator.process.runtime import PREFIX
from tests.mesh.harness import Command, free_port

pytestmark = pytest.mark.mesh

LOCKSTEP = "import sys; from router.launcher.serve import main; sys.exit(main())"
READ_ONLY = "for each in /tmp /var/tmp; do mount --bind $each $each && mount -o remount,ro,bind $each; done"


@pytest.fixture(scope="module")
def prefix() -> list[str]:
    """Runs a command where nothing can be written to the usual directories for temporary files."""
    found = ["unshare", "-m", "sh", "-c", f'{READ_ONLY} && unset TMPDIR && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*found, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mount namespaces, as root")
    return found


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that can be written on that host."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def left() -> set[Path]:
    return set(Path("/dev/shm").glob(f"{PREFIX}*"))


@pytest.mark.nightly
def test_a_mesh_at_a_path(prefix: list[str], directory: Path, tmp_path: Path) -> None:
    path, before = directory / "http.sock", left()
    argv = ["--uds", str(path), "--port", "9", "-dpp", str(free_port()), "-asc", "2"]
    environment = {"XDG_RUNTIME_DIR": "", "LOCKSTEP_FORK_SERVER": "0"}
    with Command(tmp_path / "one.log", "router.launcher.serve", *argv, env=environment, prefix=prefix) as one:
        one.wait_for(f"1 instance ready at unix:{path}")
        assert "--port ignored: the endpoint listens at --uds alone" in one.log
        assert f"curl --unix-socket {path} http://localhost/v1/completions" in one.log
        ask(path)
        assert len(left() - before) == 1
        second = subprocess.run(
            [sys.executable, "-P", "-m", "router.launcher.serve", *argv, "-dpp", str(free_port())],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert second.returncode == 1
        assert f"--uds {path} cannot be bound: another server is there" in second.stderr
        ask(path)
        one.stop(signal.SIGKILL)
    assert path.is_socket(), "nobody was left to take it away"
    assert len(left() - before) == 1
    with Command(tmp_path / "two.log", "router.launcher.serve", *argv, env=environment, prefix=prefix) as two:
        two.wait_for(f"1 instance ready at unix:{path}")
        assert len(left() - before) == 1, "that of the new one"
        ask(path)
        assert two.stop() == 0
    assert not path.exists()
    assert left() <= before


def ask(path: Path) -> None:
    """Ask the mesh as a client, with ``chat`` and with ``bench``."""
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://mesh") as client:
        body = {"prompt": "It is", "max_tokens": 4, "stream": True}
        answer = client.post("/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    for argv in (
        ["chat", "--uds", str(path), "-q", "Hello", "--max-tokens", "4"],
        ["bench", "serve", "--uds", str(path), "--num-prompts=2", "--random-output-len=2"],
    ):
        said = subprocess.run(
            [sys.executable, "-P", "-c", LOCKSTEP, *argv],
            capture_output=True, text=True, check=False, timeout=120, cwd=path.parent,
            env={**os.environ, "http_proxy": "http://127.0.0.1:9"},
        )  # fmt: skip
        assert said.returncode == 0, said
