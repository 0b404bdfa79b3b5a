"""PostgreSQL server of the tests, with a fresh database for each."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

WHERE = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")
"""Directories of distributions, beside the PATH."""
QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=16MB")


def program(name: str) -> str | None:
    """Path of one of PostgreSQL's programs."""
    found = shutil.which(name)
    others = [each for pattern in WHERE for each in sorted(glob.glob(f"{pattern}/{name}"))]
    return found or (others[-1] if others else None)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """URL of a running server without its database; a test without PostgreSQL is skipped."""
    initdb, postgres = program("initdb"), program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("needs PostgreSQL's initdb and postgres (Debian's package postgresql)")
    pytest.importorskip("psycopg", reason="needs psycopg")
    user = None
    if os.getuid() == 0:  # which PostgreSQL refuses
        user = next((each for each in ("postgres", "nobody") if _exists(each)), None)
        if user is None:
            pytest.skip("needs a user for PostgreSQL other than root")
    directory = Path(tempfile.mkdtemp(prefix="lockstep-postgres-"))
    if user is not None:
        os.chown(directory, pwd.getpwnam(user).pw_uid, -1)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    data = directory / "data"
    make = [
        initdb,
        "-D",
        str(data),
        "-U",
        "lockstep",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--no-sync",
        "--no-locale",
    ]
    settings = [
        word
        for each in (*QUICK, f"port={port}", f"unix_socket_directories={directory}")
        for word in ("-c", each)
    ]
    try:
        subprocess.run(make, check=True, capture_output=True, user=user, timeout=120)
        with subprocess.Popen(
            [postgres, "-D", str(data), *settings],
            user=user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as running:
            try:
                yield f"postgresql://lockstep@127.0.0.1:{port}"
            finally:
                running.send_signal(signal.SIGINT)  # does not wait for clients
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def new_database(url: str) -> str:
    """URL of a fresh database."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    for attempt in range(100):
        try:
            with psycopg.connect(f"{url}/postgres", autocommit=True, connect_timeout=10) as connection:
                connection.execute(f"CREATE DATABASE {name}")
                return f"{url}/{name}"
        except psycopg.OperationalError:  # it starts
            if attempt == 99:
                raise
            time.sleep(0.1)
    raise AssertionError


def _exists(user: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(user))
    return False
