"""The image of deploy/container, run by podman: by itself, and as the mesh of compose.yaml."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.deploy.files import DEPLOY, ROOT
from tests.deploy.gateways import metric, program, status
from tests.deploy.images import IMAGE, Podman, build, podman
from tests.deploy.rolling import is_right, roll
from tests.mesh.harness import free_port, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(2400)]

COMPOSE = DEPLOY / "container" / "compose.yaml"
DRAINS = "draining for at most 120 s"
USER = "10001"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    with podman(tmp_path_factory.mktemp("podman")) as found:
        build(tmp_path_factory.mktemp("image"))
        yield found


def test_a_container_serves_and_ends(engine: Podman) -> None:
    """The command of docs/run/deploy-container.md, with another port."""
    port, name = free_port(), f"lockstep-{uuid.uuid4().hex[:8]}"
    flags = ["--detach", "--name", name, "--read-only", "--tmpfs", "/tmp", "-p", f"127.0.0.1:{port}:8000"]
    engine.run("network", "create", name)  # with addresses that no other network has
    try:
        engine.run("run", *flags, "--network", name, IMAGE, "lockstep-moe", "-dp", "2", "--host", "0.0.0.0")
        url = engine.url(name, port)
        wait_until(lambda: status(f"{url}/health") == 200, 60, "the container serves", every=0.5)
        engine.run("healthcheck", "run", name)  # fails unless healthy
        assert engine.run("exec", name, "id", "-u").strip() == USER
        refused = engine.run("exec", name, "sh", "-c", "touch /opt/x 2>&1 || echo refused")
        assert "Read-only file system" in refused
        counts = roll(url, lambda: True, streams=4, requests=12, tokens=60)
        print(counts)
        assert is_right(counts)
        engine.run("stop", "--time", "60", name)
        assert engine.state(name)["ExitCode"] == 0
        log = engine.log(name)
        assert "Traceback" not in log
        assert "compil" not in log, "kernels are in the image"
    finally:
        engine.run("rm", "--force", "--time", "1", name, check=False)
        engine.run("network", "rm", name)


class Compose:
    """The mesh of compose.yaml, by podman-compose."""

    def __init__(self, engine: Podman, command: str) -> None:
        self.engine = engine
        self.project, self._port = f"lockstep{uuid.uuid4().hex[:8]}", free_port()
        self.url = ""
        self._command = [*engine.prefix, command, "-p", self.project, "-f", str(COMPOSE)]
        self._environment = {**engine.environment, "LOCKSTEP_IMAGE": IMAGE, "LOCKSTEP_PORT": str(self._port)}

    def run(self, *arguments: str) -> None:
        done = subprocess.run(
            [*self._command, *arguments], check=False, capture_output=True, text=True, timeout=400,
            env=self._environment, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def start(self, count: int) -> None:
        """Start the mesh, as docs/run/deploy-container.md has it."""
        self.run("up", "--detach", "--scale", f"instance={count}")
        (head,) = (name for name in self.containers() if "head" in name)
        self.url = self.engine.url(head, self._port)
        wait_until(lambda: status(f"{self.url}/health") == 200, 60, "the mesh serves", every=0.5)
        self.wait(1 + count)

    def scale(self, count: int) -> None:
        """Have so many containers of instances beside the head, and wait until all are ready."""
        self.run("up", "--detach", "--no-recreate", "--scale", f"instance={count}")
        self.wait(1 + count)

    def containers(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return self.engine.run("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()

    def instances(self) -> list[str]:
        """Names of the containers with instances beside the head."""
        return sorted(name for name in self.containers() if "instance" in name)

    def num_ready(self) -> int:
        found = metric(self.url, "lockstep:instances")
        return round(sum(value for labels, value in found.items() if 'state="ready"' in labels))

    def wait(self, count: int) -> None:
        wait_until(lambda: self.num_ready() == count, 60, f"{count} instances", every=0.5)


@pytest.fixture
def compose(engine: Podman) -> Iterator[Compose]:
    command = program("podman-compose")
    if command is None:
        pytest.skip("not installed: examples/benchmarks/install_peers.sh podman-compose")
    found = Compose(engine, command)
    try:
        yield found
    finally:
        found.run("down", "--volumes")
        engine.run(
            "rm", "--force", "--time", "1", *found.containers(), check=False
        )  # podman-compose leaves some
        engine.run("network", "rm", "--force", f"{found.project}_default", check=False)


def test_a_mesh_of_containers_grows_loses_one_and_is_updated_under_load(compose: Compose) -> None:
    """No client notices that one container comes, one is killed, and all are restarted."""
    engine, logs = compose.engine, []
    compose.start(1)

    def update() -> bool:
        compose.scale(2)
        first, second = compose.instances()
        engine.run("kill", "--signal", "KILL", first)
        compose.wait(2)
        engine.run("start", first)
        compose.wait(3)
        for name in (first, second):
            engine.run("stop", "--time", "180", name, timeout=200)
            logs.append(engine.log(name))
            assert engine.state(name)["ExitCode"] == 0
            engine.run("start", name)
            compose.wait(3)
        return True

    counts = roll(compose.url, update, streams=4, requests=24, tokens=120)
    print(counts)
    assert is_right(counts)
    assert all(DRAINS in log for log in logs)
    compose.run("stop")
    assert "Traceback" not in "".join(map(engine.log, compose.instances()))
