"""The key that a mesh on one host makes itself: who finds it, who does not, and what is said to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import keys, own_key, process
from coordinator.client import fetch_view
from coordinator.config import MeshConfig
from coordinator.handshakes import KeyRefused
from coordinator.keys import KeyFileError
from router.config import ServeConfig
from router.launch import process_table
from router.serve import with_key_for_children

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The session's directory of this user, and no other."""
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(own_key, "PLACES", (str(tmp_path / "shared"),))
    (tmp_path / "shared").mkdir(mode=0o1777)
    return session


def mesh_at(port: int, **fields: object) -> MeshConfig:
    return MeshConfig(data_parallel_rpc_port=port, **fields)  # type: ignore[arg-type]


def file_of(place: Path, port: int) -> Path:
    return place / "lockstep" / f"mesh-127.0.0.1-{port}-{os.stat('/proc/self/ns/net').st_ino}.key"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    module: str, *argv: str, user: int | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        user=user,
        env={**os.environ, **environment},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def coordinator_listens(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if "listening on" in line:
            return
    pytest.fail("the coordinator has ended")


# ---- the file


def test_the_file_is_for_this_user_only_and_found_while_its_mesh_lives(place: Path) -> None:
    mesh = mesh_at(4711)
    assert own_key.find(mesh) is None
    with own_key.publish(mesh) as made:
        file = file_of(place, 4711)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert own_key.find(mesh) == made
        assert own_key.find(mesh_at(4711, data_parallel_address="localhost")) == made
        assert own_key.find(mesh_at(4712)) is None
        assert os.listdir(file.parent) == [file.name], "nothing else is left"
    assert own_key.find(mesh) is None, "its mesh has ended"


def test_another_process_finds_it_until_the_head_is_killed_and_the_next_head_takes_it_over(
    place: Path,
) -> None:
    """So instances that outlive their head know the next one, and nobody is misled meanwhile."""
    port = free_port()
    mesh = mesh_at(port)
    with running("coordinator", "-dpp", str(port)) as child:
        coordinator_listens(child)
        first = own_key.find(mesh)
        assert first is not None
        assert asyncio.run(fetch_view(mesh.coordinator_endpoint, 10, first)).members == []
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert own_key.find(mesh) is None
    with running("coordinator", "-dpp", str(port)) as child:
        coordinator_listens(child)
        assert own_key.find(mesh) == first


def test_a_file_that_is_no_key_any_more_is_replaced(place: Path) -> None:
    file = file_of(place, 4711)
    file.parent.mkdir(mode=0o700)
    for content, mode in (("garbage", 0o600), (keys.text_of(keys.generate()), 0o644)):
        file.write_text(content)
        file.chmod(mode)
        with own_key.publish(mesh_at(4711)) as made:
            assert keys.load(file) == made
            assert keys.text_of(made) != content, "others may have read it"


def test_a_mesh_whose_port_nobody_can_know_leaves_no_file(place: Path) -> None:
    with own_key.publish(mesh_at(4711), remove=True):
        assert os.listdir(place / "lockstep")
    assert os.listdir(place / "lockstep") == []


def test_a_second_head_at_the_port_does_not_replace_the_key_of_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator will find the port taken, and the members of the first one must not notice."""
    monkeypatch.setattr(own_key, "TURN_TIMEOUT", 0.3)
    port = free_port()
    with running("coordinator", "-dpp", str(port)) as child:
        coordinator_listens(child)
        first = own_key.find(mesh_at(port))
        with own_key.publish(mesh_at(port)):
            pass
        assert own_key.find(mesh_at(port)) == first


def test_a_directory_that_another_user_made_first_is_not_used(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    trap = tmp_path / "shared" / f"lockstep-{os.geteuid()}"
    trap.mkdir(mode=0o700)
    os.chown(trap, NOBODY, NOBODY)
    with own_key.publish(mesh_at(4711)) as made:
        assert os.listdir(trap) == []
        assert "no directory for the key of this mesh" in caplog.text
        assert own_key.find(mesh_at(4711)) is None
        assert made is not None, "the processes of this head have it"
    os.chown(trap, os.geteuid(), os.getegid())
    trap.chmod(0o755)
    with own_key.publish(mesh_at(4711)):
        assert os.listdir(trap) == [], "nor one that others can enter"


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, True),
        ({"data_parallel_address": "::1"}, True),
        ({"insecure_mesh": True}, False),
        ({"mesh_key_file": "mesh.key"}, False),
        ({"data_parallel_address": "10.0.0.1", "insecure_mesh": True}, False),
    ],
)
def test_a_key_is_made_where_nothing_was_said_of_keys_and_only_this_host_can_come(
    fields: dict[str, object], own: bool
) -> None:
    assert own_key.is_own(MeshConfig(**fields)) == own  # type: ignore[arg-type]


# ---- children


def test_children_inherit_the_key_and_no_command_line_shows_it() -> None:
    found = keys.generate()
    config = with_key_for_children(ServeConfig(mesh=MeshConfig(data_parallel_size=2)), found)
    (descriptor,) = own_key.descriptors(config.mesh)
    try:
        table = process_table(config, None, cores=2)
        assert [spec.role for spec in table] == ["coordinator", "engine", "engine", "router"]
        for spec in table:
            assert descriptor in spec.descriptors
            assert f"/proc/self/fd/{descriptor}" in " ".join(spec.argv)
            shown = " ".join([*spec.argv, *spec.environment().values()])
            for secret in (*keys.text_of(found).split()[-2:], found.client_secret.decode()):
                assert secret not in shown
        reads = f"import sys; from coordinator import keys; from pathlib import Path; sys.exit(keys.load(Path('/proc/self/fd/{descriptor}')).server_public.decode() != sys.argv[1])"
        argv = [sys.executable, "-P", "-c", reads, found.server_public.decode()]
        assert subprocess.run(argv, pass_fds=[descriptor], check=False, timeout=60).returncode == 0
    finally:
        os.close(descriptor)


def test_an_actor_of_ray_inherits_nothing_and_looks_for_the_file() -> None:
    config = with_key_for_children(ServeConfig(data_parallel_backend="ray"), keys.generate())
    try:
        engine = next(spec for spec in process_table(config, None, cores=2) if spec.role == "engine")
        assert engine.descriptors == ()
        assert "--mesh-key-file" not in " ".join(engine.argv)
    finally:
        os.close(own_key.descriptors(config.mesh)[0])


def test_a_key_that_was_given_is_handed_on_by_its_name() -> None:
    config = ServeConfig(mesh=MeshConfig(mesh_key_file="mesh.key"))
    assert with_key_for_children(config, keys.generate()) is config
    assert own_key.descriptors(config.mesh) == ()


# ---- the others


def test_who_is_early_waits_for_the_head(place: Path) -> None:
    mesh = mesh_at(free_port())
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(own_key.wait(mesh, 30.0)), daemon=True)
    waiting.start()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "coordinator", "-dpp", str(mesh.data_parallel_rpc_port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        waiting.join(30)
        assert found == [own_key.find(mesh)]
    finally:
        child.kill()
        child.wait(10)


def test_who_waits_in_vain_gives_up_and_says_for_whom(place: Path) -> None:
    mesh = mesh_at(free_port())
    began = time.monotonic()
    with pytest.raises(own_key.TooLate, match=rf"waiting for the coordinator at {mesh.coordinator_endpoint}"):
        own_key.wait(mesh, 0.3)
    assert time.monotonic() - began < 5.0


def test_a_coordinator_without_a_key_is_joined_only_if_that_is_wanted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any user of the host can listen at a port: prompts must not go to whoever does."""
    port = free_port()
    with running("coordinator", "-dpp", str(port), "--insecure-mesh") as child:
        coordinator_listens(child)
        with pytest.raises(SystemExit) as ended:
            process.member_keys(mesh_at(port), "serve")
        assert ended.value.code == process.EXIT_REFUSED
        assert "was started without a mesh key" in capsys.readouterr().err
        assert process.member_keys(mesh_at(port, insecure_mesh=True), "serve") is None
        assert process.mesh_keys(mesh_at(port), "lockstep status") is None


def test_a_key_file_that_others_can_read_is_refused(place: Path) -> None:
    port = free_port()
    with running("coordinator", "-dpp", str(port)) as child:
        coordinator_listens(child)
        file_of(place, port).chmod(0o644)
        with pytest.raises(KeyFileError, match="mode 0644"):
            own_key.find(mesh_at(port))


def test_another_user_of_the_host_gets_neither_the_key_nor_in(place: Path, tmp_path: Path) -> None:
    """The attack: a process of somebody else on this host, at the address of the mesh."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    assert pwd.getpwuid(NOBODY)
    port = free_port()
    mesh = mesh_at(port)
    with running("coordinator", "-dpp", str(port)) as child:
        coordinator_listens(child)
        found = own_key.find(mesh)
        with pytest.raises(KeyRefused, match="takes only peers with the key of its mesh"):
            asyncio.run(fetch_view(mesh.coordinator_endpoint, 20, None))
        with pytest.raises(KeyRefused, match="it has another mesh key"):
            asyncio.run(fetch_view(mesh.coordinator_endpoint, 20, keys.generate()))
        file = file_of(place, port)
        reading = subprocess.run(
            ["cat", file, f"/proc/{child.pid}/environ"],
            user=NOBODY, capture_output=True, check=False, timeout=20,
        )  # fmt: skip
        assert (reading.returncode, reading.stdout) == (1, b"")
        assert found is not None
        shown = (
            Path(f"/proc/{child.pid}/cmdline").read_bytes() + Path(f"/proc/{child.pid}/environ").read_bytes()
        )
        for secret in keys.text_of(found).split()[-2:]:
            assert secret.encode() not in shown
        asyncio.run(fetch_view(mesh.coordinator_endpoint, 20, found))


def test_the_error_for_another_user_says_what_to_do(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with running("coordinator", "-dpp", str(port)) as child:
        coordinator_listens(child)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "of another user"))
        with pytest.raises(own_key.NoKey, match=r"start this as the user that started it.*--mesh-key-file"):
            own_key.wait(mesh_at(port), 20.0)
