"""Scripts of ``examples/clients/`` for installed packages: the others need environments of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mesh.conftest import Mesh

pytestmark = pytest.mark.mesh

FOLDER = Path(__file__).parents[3] / "examples" / "clients"


def run_script(mesh: Mesh, *command: str, cwd: Path) -> None:
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=surroundings | {"LOCKSTEP_URL": mesh.url},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "script", [pytest.param("use_openai.py", marks=pytest.mark.nightly), "use_anthropic.py"]
)
def test_a_package_works_unchanged(mesh: Mesh, tmp_path: Path, script: str) -> None:
    run_script(mesh, sys.executable, str(FOLDER / script), cwd=tmp_path)


@pytest.mark.parametrize(
    ("script", "packages"),
    [
        ("use_openai.mjs", ["openai@6"]),
        pytest.param("use_anthropic.mjs", ["@anthropic-ai/sdk@1"], marks=pytest.mark.nightly),
        pytest.param("use_ai_sdk.mjs", ["ai@6", "@ai-sdk/anthropic@3"], marks=pytest.mark.nightly),
    ],
)
def test_npm_packages_work_unchanged(mesh: Mesh, tmp_path: Path, script: str, packages: list[str]) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *packages]
    try:
        done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm has no registry at hand")
    if done.returncode:
        pytest.skip(f"npm could not install {packages}: {done.stderr.strip()[-200:]}")
    run_script(mesh, node, str(FOLDER / script), cwd=tmp_path)
