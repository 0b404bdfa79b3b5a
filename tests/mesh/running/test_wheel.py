"""The wheel alone, in an environment of its own, outside the checkout: does it serve?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.mesh.harness import Ports, wait_until

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel; dependencies are borrowed from this one."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"  # alone: a build leaves things in its directory, and takes what lies there
    left_out = shutil.ignore_patterns(".*", "build", "docs", "tests", "examples", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left_out)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation",
            "--quiet", "--wheel-dir", str(place),
        ],
        check=True,
        timeout=120,
    )  # fmt: skip
    (wheel,) = place.glob("lockstep_mesh-*.whl")
    home = place / "environment"
    venv.create(home, with_pip=False)
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    site = Path(paths["purelib"])
    subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install",
            "--no-deps", "--no-index", "--quiet", str(wheel),
        ],
        check=True,
        timeout=120,
    )  # fmt: skip
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home


def test_the_wheel_holds_what_it_needs_and_nothing_else(environment: Path) -> None:
    (site,) = (environment / "lib").glob("python*/site-packages")
    names = {path.name for path in site.iterdir()}
    packages = {"coordinator", "engine", "lockstep", "router", "parallel"}
    assert packages <= names
    assert not names & {"tests", "examples", "docs"}
    assert all((site / package / "py.typed").is_file() for package in packages)
    model = site / "engine" / "models" / "lockstep-moe"
    assert sum(path.stat().st_size for path in model.iterdir()) < 20 * 1024**2
    assert (model / "model.safetensors").is_file()
    page = site / "router" / "app" / "dashboard" / "static"
    assert {"index.html", "main.js", "style.css"} <= {path.name for path in page.iterdir()}
    assert {path.name for path in (page / "uplot").iterdir()} == {
        "LICENSE",
        "uPlot.iife.min.js",
        "uPlot.min.css",
    }


def test_the_wheel_names_the_licences_of_all_that_it_holds(environment: Path) -> None:
    (described,) = environment.glob("lib/python*/site-packages/lockstep_mesh-*.dist-info")
    assert "License-Expression: Apache-2.0 AND MIT\n" in (described / "METADATA").read_text()
    texts = [path.read_text() for path in (described / "licenses").rglob("LICENSE")]
    assert sorted(text.strip().splitlines()[0].strip() for text in texts) == [
        "Apache License",
        "The MIT License (MIT)",
    ]


def test_it_serves_from_another_directory(environment: Path, tmp_path: Path) -> None:
    ports = Ports()
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for decoy in ("engine", "router"):  # names of ours in the user's directory must not get in the way
        (tmp_path / decoy).mkdir()
        (tmp_path / decoy / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(environment / "bin" / "serve"), *ports.head(), "--num-gpu-blocks-override", "200"],
            cwd=tmp_path,
            env=clean,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "1 instance ready" in log.read_text() or process.poll() is not None, 120)
        assert process.poll() is None, log.read_text()
        status = subprocess.run(
            [str(environment / "bin" / "lockstep"), "status", *ports.join()],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert "lockstep-moe: epoch 1, 1 instance" in status
        assert "ready" in status
    finally:
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
