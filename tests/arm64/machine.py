"""Emulated ARM64 machine: Debian's Python and wheels for ARM64, run by QEMU.

``python -m tests.arm64.machine --prepare`` fills ``~/.cache/lockstep-arm64`` from Debian's and Python's registries. After
that ``python -m tests.arm64.machine ARGUMENTS`` runs its Python with these arguments on a copy of this project, as root in
a namespace of its own. Where the machine cannot be had, both print why and end with status 1.

QEMU on x86-64 keeps the order of memory of x86-64: what a weaker order breaks does not show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
HOME = Path.home() / ".cache" / "lockstep-arm64"
ROOT, SITE, QEMU, BUILT = (HOME / name for name in ("root", "site", "qemu", "built"))
COPY = HOME / "project"
NEEDED = ("debootstrap", "dpkg-deb", "apt-get", "unshare", "aarch64-linux-gnu-g++")
PACKAGES = "python3,python3-venv,libgomp1"
TORCH = "torch==2.9.1"
"""The newest release whose wheel for ARM64 is one for CPUs alone."""
WHEELS = [
    "blake3", "httptools", "huggingface-hub", "hypothesis", "jinja2", "jsonschema", "llguidance", "msgspec", "networkx", "numpy",
    "prometheus-client", "protobuf", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "pyzmq", "rich",
    "safetensors", "sentencepiece", "setproctitle", "starlette", "sympy", "tokenizers", "transformers", "uvicorn", "uvloop",
]  # fmt: skip
PLATFORMS = (
    "manylinux2014",
    "manylinux_2_17",
    "manylinux_2_26",
    "manylinux_2_28",
    "manylinux_2_31",
    "manylinux_2_34",
)
MAGIC = r"\x7fELF\x02\x01\x01\x00" + r"\x00" * 8 + r"\x02\x00\xb7\x00"
MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff"
"""First bytes of programs for ARM64, and which of them matter."""
ENTER = r"""
set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
for each in /proc /dev /sys "$1"; do mkdir -p "$2$each"; mount --rbind "$each" "$2$each"; done
echo -n ":arm64:M::$3:$4:$5:FP" > /proc/sys/fs/binfmt_misc/register
root=$2; shift 5
exec chroot "$root" "$@"
"""


def why_absent() -> str | None:
    """Reason why the machine cannot be run here now; None if it can."""
    return why_not() or (None if COPY.is_dir() else "it was not prepared (--prepare)")


def why_not() -> str | None:
    """Reason why this host cannot have the machine; None if it can."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here: apt-get install debootstrap g++-aarch64-linux-gnu"
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "binfmt_misc", "none", "/proc/sys/fs/binfmt_misc"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no binfmt_misc in a user namespace: {tried.stderr.strip()}" if tried.returncode else None


def prepare() -> None:
    """Fill the folder with what is not there yet.

    Raises:
        subprocess.CalledProcessError: a registry is not reached, or a command fails.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    if not QEMU.is_dir():
        subprocess.run(["apt-get", "download", "qemu-user-static"], cwd=HOME, check=True)
        (package,) = HOME.glob("qemu-user-static_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(QEMU)], check=True)
        package.unlink()
    if not (ROOT / "usr/bin/python3").exists():
        command = [
            "debootstrap",
            "--foreign",
            "--arch=arm64",
            "--variant=minbase",
            f"--include={PACKAGES}",
            "bookworm",
        ]
        subprocess.run([*command, str(ROOT)], check=True)
        for package in (ROOT / "var/cache/apt/archives").glob("*.deb"):  # no script of them is needed
            unpack = f"dpkg-deb --fsys-tarfile '{package}' | tar -x -C '{ROOT}' --keep-directory-symlink"
            subprocess.run(unpack, shell=True, check=True)
        if (ROOT / "proc").is_symlink():
            (ROOT / "proc").unlink()
    wanted = " ".join([*WHEELS, TORCH])
    installed = SITE / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted:
        options = [
            "--target",
            str(SITE),
            "--python-version",
            "3.11",
            "--only-binary",
            ":all:",
            "--upgrade",
            "--no-compile",
        ]
        options += [part for name in PLATFORMS for part in ("--platform", f"{name}_aarch64")]
        pip = [sys.executable, "-m", "pip", "install", *options]
        subprocess.run([*pip, *WHEELS], check=True)
        subprocess.run([*pip, "--no-deps", TORCH], check=True)
        installed.write_text(wanted)
    environment = {**os.environ, "CXX": "aarch64-linux-gnu-g++"}
    shutil.rmtree(BUILT, ignore_errors=True)
    command = [sys.executable, "-m", "router.tools.build_kernels", str(BUILT), "--target", "neon"]
    subprocess.run(command, cwd=PROJECT, env=environment, check=True)
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir()
    copied = f"git ls-files -z | tar -c --null -T - | tar -x -C '{COPY}'"
    subprocess.run(copied, cwd=PROJECT, shell=True, check=True)


def command(arguments: list[str]) -> list[str]:
    """Command that runs the machine's Python; it ends with that one's status."""
    enter = ["unshare", "--user", "--map-root-user", "--mount", "--fork", "bash", "-c", ENTER, "bash"]
    kind = [MAGIC, MASK, str(QEMU / "usr/bin/qemu-aarch64-static")]
    variables = [
        "PATH=/usr/bin:/bin", "HOME=/root", "QEMU_CPU=max", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1", "LOCKSTEP_TESTS_SLOWER=6",
        f"LOCKSTEP_BUILT_KERNELS={BUILT}", f"PYTHONPATH={SITE}:{COPY}",
    ]  # fmt: skip
    python = ["/usr/bin/env", "-C", str(COPY), "-i", *variables, "python3", *arguments]
    return [*enter, str(HOME), str(ROOT), *kind, *python]


def main(arguments: list[str]) -> int:
    prepares = arguments == ["--prepare"]
    if problem := why_not() if prepares else why_absent():
        print(f"no ARM64 machine: {problem}")
        return 1
    if prepares:
        prepare()
        return 0
    return subprocess.run(command(arguments), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
