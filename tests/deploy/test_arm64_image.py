"""Debian packages and wheels of the image exist for ARM64, at their constrained versions.

torch is left out: its wheels come from an index of their own. Nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.arm64.machine import PLATFORMS
from tests.deploy.files import ROOT
from tests.deploy.images import CONTAINERFILE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

PACKAGES = re.compile(r"apt-get install -y --no-install-recommends ([a-z0-9+. -]+)")
UNREACHED = re.compile(r"Could not resolve|Temporary failure|Failed to establish|Name or service not known")
"""What apt-get and pip print where there is no network."""


def run(*command: str) -> str:
    """What a command prints; without a network the test is skipped."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    if done.returncode and UNREACHED.search(printed):
        pytest.skip("no network")
    assert done.returncode == 0, printed[-2000:]
    return printed


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt-get here")
def test_debian_has_all_packages_for_arm64(tmp_path: Path) -> None:
    for folder in ("lists/partial", "cache/archives/partial"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "status").touch()
    named = {
        "Dir::State": "",
        "Dir::State::lists": "lists",
        "Dir::State::status": "status",
        "Dir::Cache": "cache",
    }
    options = [f"-o{key}={tmp_path / value}" for key, value in named.items()]
    options += ["-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64"]
    wanted = {name for found in PACKAGES.findall(CONTAINERFILE.read_text()) for name in found.split()}
    assert wanted >= {"g++", "python3", "python3-venv", "libgomp1"}
    run("apt-get", *options, "update", "-oAPT::Update::Error-Mode=any")
    printed = run("apt-get", *options, "install", "-s", "--no-install-recommends", *sorted(wanted))
    assert {name for name in wanted if f"\nInst {name} " not in printed} == set()


def test_all_libraries_have_wheels_for_arm64(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["tokenizers"]]
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_aarch64")]
    printed = run(
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--target", str(tmp_path),
        "--python-version", "3.11", "--only-binary", ":all:", *platforms, "-c", "constraints.txt",
        *(each for each in wanted if not each.startswith("torch")),
    )  # fmt: skip
    assert "Would install" in printed
    assert "tokenizers-" in printed
