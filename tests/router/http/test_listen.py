"""Unix sockets of the endpoint: taken, refused and given back."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from router.http.listen import at_path


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_path_is_taken_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with at_path(path) as listener:
        listener.listen()
        connect(path)
    assert not path.exists()
    assert listener.fileno() == -1


def test_what_a_dead_server_left_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    with at_path(path) as listener:
        listener.listen()
        connect(path)


def test_sockets_of_others_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as other:
        other.bind(bytes(tmp_path / "other") + b"\xff")
        dead.bind(str(path))
        dead.close()
        with at_path(path) as listener:
            listener.listen()
            connect(path)


@pytest.mark.parametrize("listens", [False, True])
def test_a_path_that_another_server_has_is_refused(tmp_path: Path, listens: bool) -> None:
    """Also before it listens: it will."""
    path = tmp_path / "http.sock"
    with at_path(path) as first:
        if listens:
            first.listen()
        with (
            pytest.raises(OSError, match=f"--uds {path} cannot be bound: another server is there"),
            at_path(path),
        ):
            pass
        first.listen()
        connect(path)


def test_only_sockets_are_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("Dear")
    with (
        pytest.raises(OSError, match="a file that is no socket is there: choose another path"),
        at_path(path),
    ):
        pass
    assert path.read_text() == "Dear"


def test_the_socket_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with at_path(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a" * 120, "AF_UNIX path too long"), ("none/http.sock", "No such file or directory")],
)
def test_paths_that_cannot_be_are_said(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(OSError, match=f"--uds .* cannot be bound: {reason}"), at_path(tmp_path / name):
        pass
