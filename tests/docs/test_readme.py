"""Commands of README run as shown, in order, and print what it promises."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import SHIPPED_MODEL
from tests.mesh.harness import Ports, wait_until

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = "--num-gpu-blocks-override 400"
"""Added to each ``serve``: several meshes share the memory of this machine."""
STATUS = ".venv/bin/lockstep status"


def blocks() -> tuple[list[str], list[str]]:
    """The blocks that are marked as shell, and the lines of the one with placeholders."""
    found = BLOCK.findall((ROOT / "README.md").read_text())
    forms = [text for kind, text in found if not kind and text.startswith("serve MODEL")]
    assert len(forms) == 1
    return [text.strip() for kind, text in found if kind], forms[0].splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of the project, with the environment of this test as ``.venv``."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in {line.split("/")[0] for line in tracked.splitlines()}:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


class Terminal:
    """One command line of a shell that stays open, with all that it prints."""

    def __init__(self, clone: Path, line: str) -> None:
        self.log = clone / f"{len(list(clone.glob('*.log')))}.log"
        path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"  # source .venv/bin/activate
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                ["bash", "-c", line], cwd=clone, env={**os.environ, "PATH": path}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def wait_for(self, text: str) -> None:
        def printed() -> bool:
            assert text in self.log.read_text() or self.process.poll() is None, self.log.read_text()
            return text in self.log.read_text()

        wait_until(printed, 120, f"{text!r} in {self.log}")

    def interrupt(self) -> None:
        """Ctrl-C: all processes of the terminal get it, and end."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(30)


def printed(clone: Path, line: str) -> str:
    with Terminal(clone, line) as terminal:
        assert terminal.process.wait(180) == 0, terminal.log.read_text()
        return terminal.log.read_text()


def test_the_mesh_answers_and_takes_one_more_instance(clone: Path) -> None:
    """What is replaced, and why.

    - ``make serve`` does not install (``-o``): the environment of this test is there already.
    - Ports are free ones instead of 8000 and 29550, for other meshes may run.
    - HEAD and PORT are where this mesh is.
    """
    (start, ask, _), forms = blocks()
    ports = Ports()
    assert start == "make serve"
    make = f"make -o .venv/.installed serve ARGS='{' '.join(ports.head())} {SMALL}'"
    with Terminal(clone, make) as mesh:
        mesh.wait_for("2 instances ready")
        curl, status = ask.rsplit("\n", 1)
        assert status == STATUS
        assert "127.0.0.1:8000" in curl
        answer = printed(clone, curl.replace("127.0.0.1:8000", f"127.0.0.1:{ports.http}"))
        body = json.loads(answer[answer.index('{"object"') :])
        assert body["usage"]["completion_tokens"] == 60
        here = f"{STATUS} {' '.join(ports.join())}"
        assert "2 instances" in printed(clone, here)
        join = forms[2].replace("HEAD", "127.0.0.1").replace("PORT", str(ports.rpc))
        with Terminal(clone, join.replace("#", f"{SMALL} #")) as third:
            third.wait_for("ready on")
            wait_until(lambda: "3 instances" in printed(clone, here), 20, "three instances")
            third.interrupt()
        wait_until(lambda: "2 instances" in printed(clone, here), 20, "two instances again")
        mesh.interrupt()


@pytest.mark.parametrize(("index", "ready"), [(0, "2 instances ready"), (1, "1 instance ready")])
def test_a_model_of_ones_own_is_served(index: int, ready: str, clone: Path) -> None:
    """MODEL is the shipped one, and ports are free ones."""
    _, forms = blocks()
    form = forms[index]
    assert form.startswith("serve MODEL")
    line = form.replace("MODEL", SHIPPED_MODEL).replace("#", f"{' '.join(Ports().head())} {SMALL} #")
    with Terminal(clone, line) as mesh:
        mesh.wait_for(ready)
        mesh.interrupt()


def test_an_instance_is_killed_and_no_token_is_lost(clone: Path) -> None:
    (_, _, kill), _ = blocks()
    assert "token ids are those of the undisturbed run" in printed(clone, kill)


def test_no_command_is_left_out() -> None:
    shell, forms = blocks()
    assert len(shell) == 3
    assert len(forms) == 3
