"""The container's files: what is copied is there, and commands of the mesh are right."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from fnmatch import fnmatch

import yaml

from parallel.built_kernels import DIRECTORY_VARIABLE
from tests.deploy.files import DEPLOY, ROOT, serve_config

CONTAINER = DEPLOY / "container"
CONTAINERFILE = (CONTAINER / "Containerfile").read_text()
IGNORED = (CONTAINER / "Containerfile.containerignore").read_text()
COMPOSE = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]


def copied() -> list[str]:
    lines = re.findall(r"^COPY (?!--from)(.+)$", CONTAINERFILE, re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [line.removeprefix("!") for line in IGNORED.splitlines() if line.startswith("!")]
    assert [name for name in copied() if not (ROOT / name).exists()] == []
    assert [name for name in copied() if not any(fnmatch(name, pattern) for pattern in kept)] == []


def test_every_package_of_the_project_is_in_the_image() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert packages <= set(copied())


def test_both_tools_see_the_same_files() -> None:
    assert (CONTAINER / "Containerfile.dockerignore").read_text() == IGNORED


def test_image_is_not_root_and_finds_its_kernels() -> None:
    assert re.findall(r"^USER (.+)$", CONTAINERFILE, re.MULTILINE) == ["10001:10001"]
    assert f"{DIRECTORY_VARIABLE}=/opt/lockstep/kernels" in CONTAINERFILE
    assert "lockstep kernels /opt/lockstep/kernels" in CONTAINERFILE


def test_versions_of_libraries_installed_first_are_those_of_the_project() -> None:
    dependencies = (ROOT / "pyproject.toml").read_text()
    early = re.findall(r'"((?:torch|transformers)[^"]+)"', CONTAINERFILE)
    assert len(early) == 2
    assert [name for name in early if f'"{name}"' not in dependencies] == []


def filled_in(argument: str) -> str:
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", argument)


def test_containers_of_compose_join_one_mesh_and_have_time_to_drain() -> None:
    head = serve_config([filled_in(each) for each in COMPOSE["head"]["command"]])
    instance = serve_config([filled_in(each) for each in COMPOSE["instance"]["command"]])
    assert instance.mesh.headless
    assert not head.mesh.headless
    assert instance.mesh.coordinator_endpoint == head.mesh.coordinator_endpoint
    assert instance.mesh.mesh_key_file == head.mesh.mesh_key_file
    made = COMPOSE["key"]["entrypoint"][-1]
    assert f"lockstep keygen {head.mesh.mesh_key_file}" in made
    grace = int(COMPOSE["instance"]["stop_grace_period"].removesuffix("s"))
    assert grace >= instance.engine.drain_timeout + 20
    for service in COMPOSE.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_healthcheck_follows_the_answer_of_the_router() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        statuses = []
        for path in ("livez", "health"):
            url = f"http://127.0.0.1:{server.server_port}/{path}"
            check = [sys.executable, str(CONTAINER / "healthcheck.py")]
            found = subprocess.run(
                check, env={**os.environ, "LOCKSTEP_HEALTH_URL": url}, capture_output=True, check=False
            )
            statuses.append(found.returncode)
        server.shutdown()
    assert statuses == [0, 1]
