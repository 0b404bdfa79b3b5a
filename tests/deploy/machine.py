"""Machines for tests: Debian booted by systemd in namespaces, with Lockstep installed.

Lockstep is in ``/opt/lockstep``. Needs root, systemd-nspawn and debootstrap. The root directory is made once, below
``build/deployments`` (three minutes, 320 MB); each machine writes to memory only. It shares the network of this host.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from parallel import compiler
from parallel.built_kernels import target_for
from tests.deploy.files import ROOT
from tests.mesh.harness import wait_until

FOLDER = Path(os.environ.get("LOCKSTEP_DEPLOYMENTS", ROOT / "build" / "deployments"))
PACKAGES = "systemd,systemd-sysv,dbus,python3,procps,iproute2,hostname,munge,slurmd,slurmctld,slurm-client"
MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"
"""Debian whose Python has the version of this environment, whose packages it sees."""
BOOT = """
set -eu
name=$1; shift
umount -R -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/$name
echo $$ > /sys/fs/cgroup/$name/cgroup.procs
exec systemd-nspawn -q --boot --volatile=overlay --register=no --keep-unit --machine=$name "$@"
"""
"""Boots a machine in a mount namespace with control groups of version 2 only."""
REMOVE = """
umount -R -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || exit 1
test ! -e /sys/fs/cgroup/$1 || find /sys/fs/cgroup/$1 -depth -type d -exec rmdir {} +
"""
PROGRAM = """#!/opt/lockstep/bin/python3
import sys
from router.launcher.entry import lockstep
sys.exit(lockstep())
"""


def missing() -> str:
    """Why there can be no machine here; empty if there can be one."""
    if os.geteuid() != 0:
        return "machines need root"
    if sys.version_info[:2] != (3, 11):
        return f"the machine's Python is 3.11, and this is {sys.version.split()[0]}"
    for program in ("systemd-nspawn", "debootstrap", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", "umount -R -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup"],
        check=False,
        capture_output=True,
        text=True,
    )
    return f"no control groups of version 2: {tried.stderr.strip()}" if tried.returncode else ""


def root_directory() -> Path:
    """Debian's root directory with an empty environment for Lockstep, made when it is not there."""
    root = FOLDER / "root"
    if not (root / "usr" / "bin" / "systemctl").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), MIRROR]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            shutil.rmtree(root, ignore_errors=True)
            pytest.skip(f"debootstrap fails: {made.stdout[-300:]}")
    if not (root / "opt" / "lockstep").exists():
        venv = ["chroot", str(root), "python3", "-m", "venv", "--without-pip", "/opt/lockstep"]
        subprocess.run(venv, check=True)
        for name in ("source", "packages", "lockstep/kernels"):
            (root / "opt" / name).mkdir()
        (packages,) = (root / "opt" / "lockstep" / "lib").glob("python3*/site-packages")
        (packages / "lockstep.pth").write_text("/opt/source\n/opt/packages\n")
        program = root / "opt" / "lockstep" / "bin" / "lockstep"
        program.write_text(PROGRAM)
        program.chmod(0o755)
    return root


def kernels() -> Path:
    """The native kernels for this CPU, compiled ahead as in an image.

    That takes a minute, once for each version of their sources.
    """
    target = target_for(compiler.cpu_flags(), [])
    if target is None:
        pytest.skip("there are no kernels for this CPU")
    sources = [*(ROOT / "engine" / "kernels").glob("*.[ch]pp"), *(ROOT / "parallel").rglob("*.[ch]pp")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]
    folder = FOLDER / f"kernels-{digest}"
    if (folder / "complete").exists():
        return folder
    built = subprocess.run(
        [sys.executable, "-P", "-m", "router.tools.build_kernels", str(folder), "--target", target.name],
        check=False, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (folder / "complete").touch()
    return folder


class Machine:
    """A booted machine."""

    def __init__(self, name: str, init: int) -> None:
        self.name = name
        self._init = init

    def run(self, command: str, *, timeout: float = 120, check: bool = True) -> str:
        """Run a line of the shell as root there; its standard output."""
        enter = ["nsenter", "-t", str(self._init), "-a", "--root", "--wd=/", "env", "-i"]
        enter += ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "sh", "-c", f"cd /; {command}"]
        done = subprocess.run(enter, check=False, capture_output=True, text=True, timeout=timeout)
        if check:
            assert done.returncode == 0, f"{command}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        return done.stdout

    def write(self, path: str, text: str, mode: str = "644", group: str = "root") -> None:
        """Write a file there."""
        enter = ["nsenter", "-t", str(self._init), "-a", "--root", "--wd=/", "sh", "-c"]
        command = (
            f'mkdir -p "$(dirname {path})" && cat > {path} && chmod {mode} {path} && chgrp {group} {path}'
        )
        subprocess.run([*enter, command], input=text, text=True, check=True)


@contextlib.contextmanager
def booted(folder: Path, binds: Mapping[Path, str] | None = None) -> Iterator[Machine]:
    """A machine that is up; ``binds``: more directories of this host that it sees, read-only."""
    if reason := missing():
        pytest.skip(reason)
    name = f"lockstep-{uuid.uuid4().hex[:8]}"
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    packages = Path(torch.origin).parents[1]
    seen = {
        ROOT: "/opt/source",
        packages: "/opt/packages",
        kernels(): "/opt/lockstep/kernels",
        **(binds or {}),
    }
    arguments = ["-D", str(root_directory()), *(f"--bind-ro={here}:{there}" for here, there in seen.items())]
    with (folder / "console.log").open("w+b") as log:
        child = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", BOOT, "boot", name, *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield Machine(name, _init_of(child, Path(log.name)))
        finally:
            _end(child, name)


def _init_of(child: subprocess.Popen[bytes], log: Path) -> int:
    """The process number of the machine's systemd once it is up."""

    def find() -> int | None:
        assert child.poll() is None, log.read_text(errors="replace")
        for process in psutil.Process(child.pid).children():
            if process.name() == "systemd":
                return process.pid
        return None

    init: int = wait_until(find, 30, "systemd begins")
    up = ["nsenter", "-t", str(init), "-a", "--root", "--wd=/", "systemctl", "is-system-running"]

    def is_up() -> bool:
        said = subprocess.run(up, check=False, capture_output=True, text=True).stdout.strip()
        return said in ("running", "degraded")

    wait_until(is_up, 40, "the machine is up", every=0.5)
    return init


def _end(child: subprocess.Popen[bytes], name: str) -> None:
    """End a machine, and the group of its processes."""
    child.terminate()
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
        child.kill()
        child.wait(10)
    remove = ["unshare", "-m", "sh", "-c", REMOVE, "remove", name]
    for _ in range(10):
        if subprocess.run(remove, check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.2)
