"""Mesh for the runs of a command, started and ended with them."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator.process.process import PARENT_VARIABLE
from coordinator.process.runtime import runtime_directory

STOP_TIMEOUT = 20.0
"""Seconds that the mesh may take to end."""


@contextlib.contextmanager
def mesh(
    arguments: str,
    serve: Sequence[str] = ("-m", "router.launcher.serve"),
    log_file: Path | None = None,
    **variables: str,
) -> Iterator[str]:
    """Run a child ``serve`` with these arguments; yields its base URL once ready.

    It listens on free ports. Another program may take its place, and have more environment variables.
    ``log_file`` is kept; without one its log goes with it.
    """
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, rpc_port = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-P", *serve, "--disable-access-log", *shlex.split(arguments)]
    command += [f"--port={port}", f"--data-parallel-rpc-port={rpc_port}"]
    # It ends with us, however we end.
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **variables}
    with runtime_directory() as directory, (log_file or directory / "serve.log").open("w+") as log:
        print(f"Starting serve {arguments} (log: {log.name}) ...", file=sys.stderr)
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while "ready at" not in (said := Path(log.name).read_text(errors="replace")):
                if child.poll() is not None:
                    raise SystemExit(f"serve ended with status {child.returncode}:\n{said[-3000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                print(f"serve did not end within {STOP_TIMEOUT:g} s and is killed", file=sys.stderr)
                child.kill()
