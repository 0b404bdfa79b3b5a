"""The mesh key: its file, which peers it lets in, and how others are refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from coordinator.member_connection import MemberConnection, RegistrationRefused, Watcher, fetch_view
from coordinator.membership.records import Rules
from coordinator.messages import FromCoordinator, Load, Register, ToCoordinator, Watch
from coordinator.rpc import keys
from coordinator.rpc.greeting import mechanism_at
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import KeyFileError, MeshKeys
from coordinator.rpc.rpc import AsyncConnection, AsyncListener, Listener, Sender
from coordinator.server import Coordinator
from engine.messages import ToInstance
from parallel.lockstep import Wake
from router.tools.keygen import main as keygen
from tests.waiting import until_async

OURS, THEIRS = keys.generate(), keys.generate()

# ---- the file


def test_keygen_writes_a_file_for_its_owner_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mesh.key"
    assert keygen([str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"--mesh-key-file {file}" in capsys.readouterr().out
    first = keys.load(file)
    assert keygen([str(file)]) == 2
    assert f"{file} exists" in capsys.readouterr().err
    assert keys.load(file) == first
    assert keygen([str(file), "--force"]) == 0
    assert keys.load(file) != first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["mesh.key"], "nothing else is left"


def test_a_key_comes_back_as_it_was_written_and_does_not_show_its_secrets(tmp_path: Path) -> None:
    keys.write(OURS, tmp_path / "key")
    assert keys.load(tmp_path / "key") == OURS
    for secret in (OURS.server_secret, OURS.client_secret):
        assert secret.decode() not in repr(OURS)
    assert len({OURS.server_public, OURS.server_secret, OURS.client_public, OURS.client_secret}) == 4


def test_links_have_a_key_that_follows_from_both_secrets_and_gives_none_away() -> None:
    one, other = keys.generate(), keys.generate()
    proofs = {
        keys.link_key(each).proof(b"label")
        for each in (one, other, _with(one, server=other), _with(one, client=other))
    }
    assert len(proofs) == 4
    assert keys.link_key(one).proof(b"label") == keys.link_key(keys._of_secrets(*_secrets(one))).proof(
        b"label"
    )


def test_files_have_another_key_than_links_and_each_mesh_its_own() -> None:
    one, other = keys.generate(), keys.generate()
    found = {keys.file_key(one).secret, keys.file_key(other).secret, keys.link_key(one).secret}
    assert len(found) == 3
    assert keys.file_key(one).secret == keys.file_key(keys._of_secrets(*_secrets(one))).secret


def _secrets(mesh: MeshKeys) -> tuple[bytes, bytes]:
    return mesh.server_secret, mesh.client_secret


def _with(mesh: MeshKeys, *, server: MeshKeys | None = None, client: MeshKeys | None = None) -> MeshKeys:
    """The same key with one secret of another."""
    return keys._of_secrets((server or mesh).server_secret, (client or mesh).client_secret)


def test_keygen_says_why_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keygen([str(tmp_path / "nowhere" / "key")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert keygen([str(tmp_path), "--force"]) == 2
    assert "is a directory: name a file" in capsys.readouterr().err
    assert keygen([str(tmp_path / ("n" * 300))]) == 2
    assert "cannot be written: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o602, 0o400, 0o600])
def test_a_key_that_others_can_get_at_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "key"
    keys.write(OURS, file)
    file.chmod(mode)
    if mode in (0o640, 0o400, 0o600):
        assert keys.load(file) == OURS
        return
    with pytest.raises(KeyFileError, match=rf"has mode {mode:04o}.*chmod 600 {file}"):
        keys.load(file)


LINE = f"{keys.FORMAT} {'ab' * 32} {'cd' * 32}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff" * 50,
        LINE.replace("ab" * 32, "ab" * 31).encode(),
        LINE.replace("ab", "xy").encode(),
        LINE.replace("-1 ", "-2 ").encode(),
        f"{LINE}\n{LINE}".encode(),
        LINE.encode() + b" " * 5000,
    ],
    ids=["empty", "binary", "short", "no hex", "other version", "two keys", "large"],
)
def test_garbage_is_no_key(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(KeyFileError, match="is no mesh key of this version"):
        keys.load(file)


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no file .*nowhere: make one with `lockstep keygen"):
        keys.load(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match="Is a directory"):
        keys.load(tmp_path)


@pytest.mark.parametrize(
    "module", ["coordinator", "engine", "router", "router.tools.status", "router.launcher.serve"]
)
def test_every_command_refuses_a_bad_key_file_at_start(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--mesh-key-file", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "error: --mesh-key-file: there is no file" in done.stderr
    assert "Traceback" not in done.stderr


# ---- who is let in


@contextlib.asynccontextmanager
async def coordinator(its_keys: MeshKeys | None) -> AsyncIterator[Coordinator]:
    server = Coordinator("tcp://127.0.0.1:0", Rules(name="m", size=1), its_keys)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


REFUSALS = {
    "no key, they have one": (OURS, None, "takes only peers with the key of its mesh"),
    "another key": (OURS, THEIRS, "it has another mesh key"),
    "the right key for it, another of our own": (
        OURS,
        MeshKeys(
            server_public=OURS.server_public,
            server_secret=b"",
            client_public=THEIRS.client_public,
            client_secret=THEIRS.client_secret,
        ),
        "it has another mesh key",
    ),
    "a key, they have none": (None, OURS, "started without a mesh key"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_peer_with_another_key_or_none_is_refused_and_counted(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, mine, reason = REFUSALS[case]

    async def knock() -> None:
        async with coordinator(theirs) as server:
            began = time.monotonic()
            with pytest.raises(KeyRefused, match=f"coordinator at {server.endpoint} refused us: .*{reason}"):
                await fetch_view(server.endpoint, 20, mine)
            assert time.monotonic() - began < 15
            if theirs is not None:
                while not (await fetch_view(server.endpoint, 10, theirs)).refused_peers:
                    assert time.monotonic() - began < 25, "it is not counted"
                    with pytest.raises(KeyRefused):  # it may have hung up by itself first; members try again
                        await fetch_view(server.endpoint, 20, mine)
                assert "coordinator: refused a connection without the key of this mesh" in caplog.text

    asyncio.run(knock())


@pytest.mark.parametrize("its_keys", [OURS, None], ids=["with a key", "without"])
def test_members_get_in(its_keys: MeshKeys | None) -> None:
    async def knock() -> None:
        async with coordinator(its_keys) as server:
            view = await fetch_view(server.endpoint, 10, its_keys)
            assert (view.mesh, view.refused_peers) == ("m", 0)
            assert await mechanism_at(server.endpoint, 5) == ("NULL" if its_keys is None else "CURVE")

    asyncio.run(knock())


def test_an_instance_without_the_key_is_refused_in_bounded_time() -> None:
    async def knock() -> None:
        async with coordinator(OURS) as server:
            for mine in (None, THEIRS):
                register = Register(
                    instance="i", rank=None, size=None, settings=None, host="h", pid=1
                )  # as an instance that joins
                membership = MemberConnection(server.endpoint, register, Load, mine)
                membership.start()
                with pytest.raises(RegistrationRefused, match=r"mesh key|key of its mesh"):
                    await asyncio.to_thread(membership.wait_for_welcome, 20)
                membership.leave()

    asyncio.run(knock())


def test_who_was_a_member_outlives_a_stranger_at_the_coordinators_address() -> None:
    """A coordinator restarted without the key counts as away; with it, it is back."""

    async def restart() -> None:
        views: list[object] = []
        ours, others = zmq.asyncio.Context(), zmq.asyncio.Context()
        async with coordinator(OURS) as first:
            endpoint = first.endpoint
            watcher = Watcher(endpoint, "w", ours, OURS)
            watching = asyncio.create_task(watcher.run(views.append))
            await until_async(lambda: views)
        stranger: AsyncListener[Any, Any] = AsyncListener(others, endpoint, ToCoordinator, name="stranger")
        await asyncio.sleep(2.0)  # time to be refused, and to try again
        assert not watching.done()
        stranger.close()
        others.term()
        seen = len(views)
        second = None
        async with asyncio.timeout(10):
            while second is None:
                with contextlib.suppress(OSError):  # the port is free in a moment
                    second = Coordinator(endpoint, Rules(name="m", size=1), OURS)
                await asyncio.sleep(0.05)
        running = asyncio.create_task(second.run())
        await until_async(lambda: len(views) > seen)
        for task in (watching, running):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        ours.term()

    asyncio.run(restart())


def test_a_step_loop_need_not_look_for_peers_to_be_let_in_or_refused() -> None:
    """While an instance computes, the guard lets in a peer's wake, not a stranger's."""
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(
        context, "tcp://127.0.0.1:0", ToInstance, name="instance", keys=OURS
    )
    others: zmq.Context[Any] = zmq.Context()
    senders = [Sender(others, listener.endpoint, each) for each in (None, THEIRS, OURS)]
    for step, sender in enumerate(senders):
        assert sender.send(Wake(epoch=1, step=step))
    deadline = time.monotonic() + 10
    while listener.refused_peers < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert listener.wait(5.0)
    received = listener.receive()
    assert received is not None
    assert received[1] == Wake(epoch=1, step=2)
    assert listener.receive() is None
    for sender in senders:
        sender.close()
    others.term()
    listener.close()
    context.term()


def test_without_its_guard_a_listener_lets_nobody_in() -> None:
    """Fails closed: when nothing answers for the mesh, the right key is no use either."""

    async def knock() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test", keys=OURS
        )
        assert listener._guard is not None
        listener._socket.disable_monitor()  # ends the guard
        await until_async(lambda: "guard-test" not in {thread.name for thread in threading.enumerate()})
        connection: AsyncConnection[Any, Any] = AsyncConnection(
            context, listener.endpoint, FromCoordinator, name="test", keys=OURS
        )
        await asyncio.sleep(0.5)
        assert not connection.send(Watch("w"))
        connection.close(linger_ms=0)
        listener.close()
        context.term()

    asyncio.run(knock())
