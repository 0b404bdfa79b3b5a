"""Names that mean an IPv6 address alone, for the endpoint and for the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from coordinator.addresses import interfaces
from tests.mesh.harness import Command, free_port

pytestmark = pytest.mark.mesh

NAME = "only-six"
"""A name of the loopback address that does not look like one."""
HOST = "host-six"
"""This host's own IPv6 address, if it has one that others reach."""
ADDRESS = next((each.address for each in interfaces() if ":" in each.address), None)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Runs a command where /etc/hosts has such a name."""
    hosts = tmp_path_factory.mktemp("names") / "hosts"
    more = f"{ADDRESS} {HOST}\n" if ADDRESS else ""
    hosts.write_text(f"127.0.0.1 localhost\n::1 {NAME} ip6-localhost ip6-loopback\n{more}")
    found = ["unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*found, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mount namespaces, as root")
    return found


@pytest.mark.parametrize("name", [NAME, pytest.param("ip6-localhost", marks=pytest.mark.nightly)])
def test_an_endpoint_of_such_a_name(prefix: list[str], name: str, tmp_path: Path) -> None:
    port = free_port()
    argv = ["--host", name, "--port", str(port), "-dpp", str(free_port())]
    with Command(tmp_path / "log", "router", *argv, prefix=prefix) as router:
        router.wait_for(f"listening on http://[::1]:{port}")
        with httpx2.Client(base_url=f"http://[::1]:{port}", trust_env=False) as client:
            assert client.get("/version", headers={"host": name}).status_code == 200
            foreign = client.get("/version", headers={"host": "site.example"}).status_code
        assert foreign == (421 if name == "ip6-localhost" else 200), (
            "the former is loopback, as it is written"
        )
        assert router.stop() == 0


@pytest.mark.parametrize(
    ("name", "address"), [("ip6-loopback", "::1"), pytest.param(HOST, ADDRESS, marks=pytest.mark.nightly)]
)
def test_a_coordinator_of_such_a_name(
    prefix: list[str], name: str, address: str | None, tmp_path: Path
) -> None:
    if address is None:
        pytest.skip("this host has no IPv6 address that others reach")
    port = str(free_port())
    join = ["-dpa", name, "-dpp", port]
    if name == HOST:
        subprocess.run([sys.executable, "-P", "-m", "router.tools.keygen", tmp_path / "key"], check=True)
        join += ["--mesh-key-file", str(tmp_path / "key")]
    with Command(tmp_path / "log", "coordinator", *join, prefix=prefix) as coordinator:
        coordinator.wait_for(f"listening on tcp://[{address}]:{port}")
        status = [*prefix, sys.executable, "-P", "-m", "router.tools.status", *join]
        shown = subprocess.run(status, check=False, capture_output=True, text=True, timeout=60)
        assert "epoch 0, 0 instances; waiting for" in shown.stdout, shown
        assert coordinator.stop() == 0
