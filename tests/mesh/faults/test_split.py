"""Two hosts that reach the coordinator lose each other.

The mesh goes on without one, and takes it back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.messages import State, View
from coordinator.rpc import keys
from engine.config import SHIPPED_MODEL
from tests.mesh.harness import wait_until
from tests.mesh.hosts import Host, two_hosts, why_not
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.mesh

RPC = "62310"
URL = "http://127.0.0.1:8000"
SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "32", "--dtype", "float32"]
COLLECTIVE_TIMEOUT = 4
"""Seconds until a member notices that another one's data does not come."""
BOUND = 60.0
"""Seconds from the split to the first answer: deadline, tries, choice, a group of one."""
LOOKS = 12 if NIGHTLY else 6
"""Seconds of one look or two whether the way is there again."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


def view_of(head: Host, *argv: str) -> View:
    done = head.lockstep("status", "--json", "-dpa", head.address, "-dpp", RPC, *argv)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=View)


def completion(head: Host) -> str:
    body = {
        "model": SHIPPED_MODEL,
        "prompt": "It was",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    text: str = head.ask(f"{URL}/v1/completions", body)["choices"][0]["text"]
    return text


@pytest.mark.nightly
def test_a_firewall_between_two_hosts_is_named_with_ranks_and_addresses(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Data ports alone are dropped, from the start; the coordinator is reached.

    With the default deadlines: --collective-timeout bounds no connection that was never made.
    """
    head, other = hosts
    key = tmp_path / "mesh.key"
    keys.write(keys.generate(), key)
    mesh = ["-dpa", head.address, "-dpp", RPC, "--mesh-key-file", str(key)]
    serve = [SHIPPED_MODEL, "-dp", "2", "-dpl", "1", "-ep", *SMALL, *mesh]
    with head.another_address() as here, other.another_address() as there, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(head.firewall(there))
            stack.enter_context(other.firewall(here))
        except OSError as error:
            pytest.skip(str(error))
        first = stack.enter_context(
            head.command(tmp_path / "head.log", "router.launcher.serve", *serve, "--instance-address", here)
        )
        there_too = ["--headless", "-dpr", "1", "--instance-address", there]
        second = stack.enter_context(
            other.command(tmp_path / "other.log", "router.launcher.serve", *serve, *there_too)
        )
        second.wait_for(f"no answer at all from {here}:")
        assert "a firewall drops what goes to that port" in second.log
        first.wait_for(f"instance 1 is left out: no connection to instance 0 ({there} to {here})")
        view = view_of(head, "--mesh-key-file", str(key))
        assert f"({there} to {here})" in view.waiting_for


@pytest.mark.nightly
def test_a_mesh_whose_hosts_lose_each_other_goes_on_without_one_and_takes_it_back(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Instances have addresses of their own, so their path to the coordinator stays."""
    head, other = hosts
    key = tmp_path / "mesh.key"
    keys.write(keys.generate(), key)
    mesh = ["-dpa", head.address, "-dpp", RPC, "--mesh-key-file", str(key)]
    serve = [SHIPPED_MODEL, "-dp", "2", "-dpl", "1", "-ep", *SMALL, *mesh]
    serve += ["--collective-timeout", str(COLLECTIVE_TIMEOUT)]
    with (
        head.another_address() as here,
        other.another_address() as there,
        head.command(
            tmp_path / "head.log", "router.launcher.serve", *serve, "--instance-address", here
        ) as first,
        other.command(
            tmp_path / "other.log",
            "router.launcher.serve",
            *serve,
            "--headless",
            "-dpr",
            "1",
            "--instance-address",
            there,
        ) as second,
    ):
        first.wait_for("2 instances ready")
        expected = completion(head)
        with head.dropping(there), other.dropping(here):
            began = time.monotonic()
            assert completion(head) == expected, "no client sees an error"
            took = time.monotonic() - began
            assert took < BOUND, first.log
            assert f"instance 1 is left out: no connection to instance 0 ({there} to {here})" in first.log
            wait_until(  # it registers again with a heartbeat
                lambda: (
                    [each.state for each in view_of(head, "--mesh-key-file", str(key)).members]
                    == [State.READY, State.LOADED]
                ),
                10,
                "instance 1 did not register again",
            )
            view = view_of(head, "--mesh-key-file", str(key))
            assert "no connection" in view.waiting_for
            epoch = view.epoch
            assert completion(head) == expected
            time.sleep(LOOKS)
            assert view_of(head, "--mesh-key-file", str(key)).epoch == epoch, "no group is tried meanwhile"
        wait_until(
            lambda: view_of(head, "--mesh-key-file", str(key)).waiting_for == "",
            40,
            "both serve again",
            every=1.0,
        )
        assert completion(head) == expected
        assert (second.stop(), first.stop()) == (0, 0)
