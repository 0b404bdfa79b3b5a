"""The image of ``deploy/container`` for tests: built on a base of debootstrap, without a registry.

Needs root, podman, buildah, debootstrap and the network back end netavark with aardvark-dns (names of compose.yaml). The
base is made once, below ``build/deployments`` (200 MB), and imported as :data:`BASE`. The image is built again when its
files have changed (1.6 GB). Libraries come from where pip's configuration on this host says, its directories included.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deploy.files import DEPLOY, ROOT
from tests.deploy.machine import FOLDER, MIRROR, SUITE

BASE = "localhost/lockstep-base"
IMAGE = "localhost/lockstep-test"
PROGRAMS = {
    "podman": "podman",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
"""Programs that are needed, and their packages in Debian."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CONTAINERFILE = DEPLOY / "container" / "Containerfile"

# ---- podman in a sandbox: in containers of their own, control groups of version 2 and limits of processes may be refused

CONTROL_GROUPS = """
umount -R -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
echo ready
exec cat
"""
"""Makes a mount namespace with control groups of version 2 only.

It lasts as long as standard input.
"""
SETTINGS = """
[containers]
cgroups = "disabled"
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "file"
[engine.runtimes]
crun = ["{runtime}"]
[network]
network_backend = "netavark"
"""
RUNTIME = """#!{python}
import json, os, pathlib, sys
for name, value in zip(sys.argv, sys.argv[1:]):
    path = pathlib.Path(value) / "config.json" if name in ("--bundle", "-b") else pathlib.Path(value)
    if name in ("--bundle", "-b", "--process", "-p") and path.exists():
        config = json.loads(path.read_text())
        config.get("process", config).pop("rlimits", None)
        path.write_text(json.dumps(config))
os.execv("{crun}", ["crun", *sys.argv[1:]])
"""
"""crun, without limits of processes of its own: those of this process hold."""


def missing() -> str:
    """Why there can be no image here; empty if there can be one."""
    if os.geteuid() != 0:
        return "images are built by root here"
    lacking = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    return f"not installed: apt-get install {' '.join(lacking)} netavark aardvark-dns" if lacking else ""


class Podman:
    """podman, where processes may be run as they are, or with what a sandbox needs."""

    def __init__(self, folder: Path, namespace: int | None = None) -> None:
        """``namespace``: a process in whose mount namespace it runs, without limits; None: as it is."""
        self.environment = dict(os.environ)
        self.prefix: list[str] = []
        if namespace is None:
            return
        self.prefix = ["nsenter", "-t", str(namespace), "-m", f"--wdns={ROOT}"]
        runtime, settings = folder / "crun", folder / "containers.conf"
        runtime.write_text(RUNTIME.format(python=sys.executable, crun=shutil.which("crun")))
        runtime.chmod(0o755)
        settings.write_text(SETTINGS.format(runtime=runtime))
        self.environment["CONTAINERS_CONF"] = str(settings)

    def run(self, *arguments: str, timeout: float = 120, check: bool = True) -> str:
        """Run a command of podman; its standard output."""
        return run(
            *self.prefix, "podman", *arguments, timeout=timeout, check=check, environment=self.environment
        )

    def log(self, name: str) -> str:
        """What a container has written to standard output and error."""
        done = subprocess.run(
            [*self.prefix, "podman", "logs", name], check=True, capture_output=True, text=True, timeout=60,
            env=self.environment,
        )  # fmt: skip
        return done.stderr + done.stdout

    def url(self, name: str, port: int) -> str:
        """Where a container with a published port answers; in a sandbox that is its address.

        The kernel's setting that leads from loopback to containers (``route_localnet``) is not writable there.
        """
        if not self.prefix:
            return f"http://127.0.0.1:{port}"
        addresses = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return f"http://{self.run('inspect', name, '--format', addresses).strip()}:8000"

    def state(self, name: str) -> dict[str, Any]:
        """What podman knows of a container."""
        (found,) = json.loads(self.run("inspect", name))
        return dict(found["State"])


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """podman that can run containers; the test is skipped if none can."""
    if reason := missing():
        pytest.skip(reason)
    make_base()
    tried = ("run", "--rm", "--network", "host", BASE, "true")
    plain = Podman(folder)
    command = ["podman", *tried]
    if subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0:
        yield plain
        return
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-ec", CONTROL_GROUPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"ready\n":
            pytest.skip("no control groups of version 2")
        inside = Podman(folder, keeper.pid)
        command = [*inside.prefix, "podman", *tried]
        found = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=60, env=inside.environment
        )
        if found.returncode != 0:
            pytest.skip(f"podman runs no container here: {found.stderr[-300:]}")
        yield inside
        keeper.stdin.close()


def run(
    *command: str, timeout: float = 120, check: bool = True, environment: dict[str, str] | None = None
) -> str:
    """Run a command; its standard output."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip
    if check:
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


def make_base() -> None:
    """Import Debian's root directory as the base, if there is none."""
    if run("buildah", "images", "-q", "--filter", f"reference={BASE}").strip():
        return
    root, archive = FOLDER / "base", FOLDER / "base.tar"
    if not (root / "usr" / "bin" / "apt-get").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", SUITE, str(root), MIRROR]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            shutil.rmtree(root, ignore_errors=True)
            pytest.skip(f"debootstrap fails: {made.stdout[-300:]}")
    run("tar", "-C", str(root), "-cf", str(archive), ".", timeout=300)
    try:
        container = run("buildah", "from", "scratch").strip()
        run("buildah", "add", "--quiet", container, str(archive), "/", timeout=300)
        run("buildah", "commit", "--quiet", "--rm", container, BASE, timeout=300)
    finally:
        archive.unlink()


def _local_paths(values: str) -> list[Path]:
    """The directories of this host among the indexes and directories that pip looks into."""
    found = [Path(urlsplit(each).path if each.startswith("file:") else each) for each in values.split()]
    return [each.parent if each.name == "simple" else each for each in found if each.is_dir()]


def _revision() -> str:
    """Digest of the files that the image is made of."""
    kept = DEPLOY / "container" / "Containerfile.containerignore"
    names = [line[1:] for line in kept.read_text().splitlines() if line.startswith("!")]
    found = [
        path
        for name in names
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    digest = hashlib.sha256(CONTAINERFILE.read_bytes())
    for path in sorted(found):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(folder: Path) -> str:
    """Build the image, unless it is there, and return its name; five minutes."""
    revision = _revision()
    found = run("buildah", "inspect", "--type", "image", IMAGE, check=False)
    if (
        found
        and json.loads(found)["Docker"]["config"]["Labels"]["org.opencontainers.image.revision"] == revision
    ):
        return IMAGE
    if found:
        run("buildah", "rmi", IMAGE, check=False)  # else it stays without a name
    listed = run(sys.executable, "-m", "pip", "config", "list", check=False) or run("pip", "config", "list")
    settings = {
        name.split(".")[1]: value.strip("'\"")
        for name, _, value in (line.partition("=") for line in listed.splitlines())
    }
    indexes, wheels = settings.get("extra-index-url", ""), settings.get("find-links", "")
    mounts = {str(path): path for path in {*_local_paths(indexes), *_local_paths(wheels)}}
    (folder / "pip.conf").write_text("[global]\ncert = /etc/pip-certificates.pem\n")
    shutil.copy(CERTIFICATES, folder / "certificates.pem")
    mounts |= {"/etc/pip.conf": folder / "pip.conf", "/etc/pip-certificates.pem": folder / "certificates.pem"}
    arguments = {"BASE": BASE, "REVISION": revision, "TORCH_INDEX": indexes, "WHEELS": wheels}
    run(
        "buildah", "build", "--format", "docker", "--isolation", "chroot", "--network", "host", "--pull-never",
        *(f"--volume={here}:{there}:ro" for there, here in mounts.items()),
        *(f"--build-arg={name}={value}" for name, value in arguments.items() if value),
        "-f", str(CONTAINERFILE), "-t", IMAGE, str(ROOT),
        timeout=1500,
    )  # fmt: skip
    return IMAGE
