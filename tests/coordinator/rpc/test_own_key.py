"""The key that a one-host mesh makes: which processes find it, which are refused."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.config import MeshConfig
from coordinator.member_connection import fetch_view
from coordinator.process import process
from coordinator.rpc import keys, own_key
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import KeyFileError
from router.config import ServeConfig
from router.launcher.launch import process_table
from router.launcher.serve import with_key_for_children

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


def test_the_file_is_for_this_user_only_and_names_the_mesh_at_one_address(place: Path) -> None:
    mesh = mesh_at(4711)
    assert own_key.find(mesh) is None
    made = own_key.obtain(mesh)
    file = file_of(place, 4711)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert own_key.find(mesh) == own_key.obtain(mesh) == made
    assert own_key.find(mesh_at(4711, data_parallel_address="localhost")) == made
    assert own_key.find(mesh_at(4712)) is None
    assert own_key.obtain(mesh_at(4712)) != made
    assert len(os.listdir(file.parent)) == 2, "nothing else is left"


def test_of_several_that_start_at_once_all_have_the_key_of_the_first(place: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [
            future.result() for future in [pool.submit(own_key.obtain, mesh_at(4711)) for _ in range(32)]
        ]
    assert set(found) == {own_key.find(mesh_at(4711))}


def test_a_coordinator_that_was_killed_misleads_nobody_and_the_next_one_is_known(place: Path) -> None:
    """Instances that outlive their coordinator have the key of the next one at its address."""
    port = free_port()
    mesh = mesh_at(port)
    for _ in range(2):
        with running("coordinator", "-dpp", str(port)) as child:
            coordinator_listens(child)
            found = own_key.find(mesh)
            assert asyncio.run(fetch_view(mesh.coordinator_endpoint, 10, found)).members == []
            child.send_signal(signal.SIGKILL)
            child.wait(10)


def test_a_file_that_is_no_key_or_that_others_can_read_is_refused(place: Path) -> None:
    own_key.obtain(mesh_at(4711))
    file = file_of(place, 4711)
    file.chmod(0o644)
    with pytest.raises(KeyFileError, match=f"{file} has mode 0644"):
        own_key.obtain(mesh_at(4711))
    file.chmod(0o600)
    file.write_text("garbage")
    with pytest.raises(KeyFileError, match=f"{file} is no mesh key"):
        own_key.obtain(mesh_at(4711))


def test_the_file_is_found_where_another_session_of_this_user_made_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One terminal has a directory of the session, the other has not."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    made = own_key.obtain(mesh_at(4711))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    assert own_key.obtain(mesh_at(4711)) == made


def test_the_next_place_is_taken_where_one_has_no_room(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = keys.write

    def full(made: keys.MeshKeys, path: Path) -> None:
        if path.is_relative_to(place):
            raise KeyFileError(f"{path} cannot be written: No space left on device")
        write(made, path)

    monkeypatch.setattr(keys, "write", full)
    made = own_key.obtain(mesh_at(4711))
    assert own_key.find(mesh_at(4711)) == made
    assert os.listdir(place / "lockstep") == []


def test_a_directory_that_another_user_made_first_is_not_used(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    trap = tmp_path / "shared" / f"lockstep-{os.geteuid()}"
    trap.mkdir(mode=0o700)
    os.chown(trap, NOBODY, NOBODY)
    made = own_key.obtain(mesh_at(4711))
    assert os.listdir(trap) == []
    assert "no directory for the key of this mesh" in caplog.text
    assert own_key.find(mesh_at(4711)) is None
    assert own_key.obtain(mesh_at(4711)) != made, "only those who inherit it have it"
    os.chown(trap, os.geteuid(), os.getegid())
    trap.chmod(0o755)
    own_key.obtain(mesh_at(4711))
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
        reads = f"import sys; from coordinator.rpc import keys; from pathlib import Path; sys.exit(keys.load(Path('/proc/self/fd/{descriptor}')).server_public.decode() != sys.argv[1])"
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
    assert own_key.is_lasting(config.mesh)


def test_a_key_that_is_made_here_does_not_last() -> None:
    config = with_key_for_children(ServeConfig(), keys.generate())
    assert config.mesh.mesh_key_file is not None
    assert not own_key.is_lasting(config.mesh)
    assert not own_key.is_lasting(MeshConfig())
    os.close(own_key.descriptors(config.mesh)[0])


# ---- the others


def test_a_coordinator_without_a_key_is_joined_only_if_that_is_wanted(place: Path) -> None:
    """Another user of the host may listen at the port to get prompts."""
    port = free_port()
    mesh = mesh_at(port)
    with running("coordinator", "-dpp", str(port), "--insecure-mesh") as child:
        coordinator_listens(child)
        with pytest.raises(KeyRefused, match="it was started without a mesh key"):
            asyncio.run(fetch_view(mesh.coordinator_endpoint, 20, process.member_keys(mesh, "serve")))
        insecure = mesh_at(port, insecure_mesh=True)
        assert process.member_keys(insecure, "serve") is None
        assert asyncio.run(fetch_view(mesh.coordinator_endpoint, 20, None)).members == []


def test_a_bad_file_ends_a_process_at_its_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_key.obtain(mesh_at(4711))
    file_of(place, 4711).chmod(0o644)
    for keys_of in (process.member_keys, process.mesh_keys):
        with pytest.raises(SystemExit) as ended:
            keys_of(mesh_at(4711), "lockstep status")
        assert ended.value.code == process.EXIT_USAGE
        assert "chmod 600" in capsys.readouterr().err


def test_another_user_of_the_host_gets_neither_the_key_nor_in(place: Path, tmp_path: Path) -> None:
    """A process of another user connects to the address of the mesh."""
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
