"""``.ci/install.py`` installs with uv what pip would, and with pip where uv cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

LISTED = """\
:env:.find-links='/wheels'
:env:.default-timeout='180'
download.no-index='true'
global.cert='/etc/ca.crt'
global.extra-index-url='file:///one file:///two'
global.find-links='/elsewhere'
global.disable-pip-version-check='1'
install.index-url='https://index.example/simple'
""".splitlines()


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_what_pip_is_configured_with(install: ModuleType) -> None:
    """An environment variable wins over a file; other commands' settings do not matter."""
    given = install.for_uv(install.settings_of(LISTED))
    assert given is not None
    flags, variables = given
    assert " ".join(flags) == (
        "--index file:///one --index file:///two --find-links /wheels --default-index https://index.example/simple"
    )
    assert variables == install.LIKE_PIP | {"SSL_CERT_FILE": "/etc/ca.crt", "UV_HTTP_TIMEOUT": "180"}


@pytest.mark.parametrize(("said", "flags"), [("true", ["--no-index"]), ("0", [])])
def test_no_index_is_a_switch(install: ModuleType, said: str, flags: list[str]) -> None:
    assert install.for_uv({"no-index": said}) == (flags, install.LIKE_PIP)


def test_pip_installs_where_it_has_a_setting_that_uv_is_not_given(install: ModuleType) -> None:
    assert install.for_uv(install.settings_of(["global.proxy='http://proxy.example'"])) is None


WHEEL = {
    "tiny_one.py": "",
    "tiny_one-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-one\nVersion: 1.0\n",
    "tiny_one-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_one-1.0.dist-info/RECORD": "".join(
        f"tiny_one{name},,\n"
        for name in (".py", *(f"-1.0.dist-info/{each}" for each in ("METADATA", "WHEEL", "RECORD")))
    ),
}

RUN = """
import runpy, sys
main = runpy.run_path(sys.argv[1])["main"]
main.__globals__.update(WANTED=["tiny-one"], BY_TURNS=[["tiny-one"]], LOADED="import tiny_one")
main()
"""


@pytest.mark.parametrize("more", ["", "proxy = http://127.0.0.1:9\n"], ids=["uv", "pip"])
def test_a_wheel_of_a_folder_that_pip_knows_is_installed(tmp_path: Path, more: str) -> None:
    """Nothing is fetched from elsewhere: pip's configuration forbids it, and uv must heed that, too."""
    if not more and importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed here")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_one-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in WHEEL.items():
            wheel.writestr(name, text)
    (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n{more}")
    (tmp_path / "constraints.txt").write_text("")
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = Path(pytest.__file__).parents[1]  # pip and uv of this environment
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    (home / "bin" / "uv").symlink_to(Path(sys.executable).parent / "uv")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    done = subprocess.run(
        [home / "bin" / "python", "-c", RUN, ROOT / ".ci" / "install.py"],
        cwd=tmp_path,
        env={**kept, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "UV_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (site / "tiny_one.py").is_file()
    assert ("pip installs" in done.stdout) == bool(more), done.stderr


def test_serve_is_ours_also_where_ray_is_installed() -> None:
    """Ray has a script of that name, too."""
    script = Path(sys.executable).with_name("serve")
    if not script.exists():
        pytest.skip("this environment has no scripts")
    assert "router.launcher.entry" in script.read_text()
