"""``serve`` with an unread log, as behind ``less`` or a stopped terminal (Ctrl-S)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import httpx2
import psutil
import pytest

from tests.mesh.harness import START_TIMEOUT, Ports, wait_until

pytestmark = pytest.mark.mesh

REQUESTS = 300
"""Each a line of about 100 bytes in a pipe of 4096."""


def test_a_log_that_nobody_reads_stops_neither_requests_nor_the_end() -> None:
    ports = Ports()
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-P", "-m", "router.launcher.serve", "-dp", "1", *ports.head()]
    with (
        subprocess.Popen(command, stdout=writing, stderr=writing, start_new_session=True) as serve,
        httpx2.Client(base_url=ports.url, timeout=30, trust_env=False) as client,
    ):
        os.close(writing)
        try:

            def is_healthy() -> bool:
                try:
                    return client.get("/health").status_code == 200
                except httpx2.TransportError:
                    return False

            wait_until(is_healthy, START_TIMEOUT)
            for _ in range(REQUESTS):
                assert client.get("/v1/models").status_code == 200
            body = {"prompt": "Hello", "max_tokens": 5}
            assert client.post("/v1/completions", json=body).status_code == 200
            family = psutil.Process(serve.pid).children(recursive=True)
            serve.send_signal(signal.SIGTERM)
            assert serve.wait(60) == 0
            assert not any(member.is_running() for member in family)
            with open(reading, "rb", closefd=False) as log:
                text = log.read()
            assert text.count(b"GET /v1/models") < REQUESTS / 2, "the pipe held all of it"
        finally:
            serve.kill()
            os.close(reading)
