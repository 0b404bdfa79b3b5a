"""A log whose reader stalls blocks no process, and counts each line it drops."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

BEGIN = """
import logging, os, sys, time
from coordinator.process import patient_log, process
process.set_up("Test", "info")
log = logging.getLogger("test")
"""
SLOW_AFTER = 10.0
"""Seconds within which a process must end."""


class Logging:
    """A process whose log is a small pipe that is not read for now."""

    def __init__(self, script: str) -> None:
        self._end, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN + script],
            stderr=writing,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        os.close(writing)

    def says(self) -> bytes:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def log(self) -> str:
        """All of its log, up to its end."""
        with open(self._end, "rb", closefd=False) as file:
            return file.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self._end)


@pytest.fixture
def started() -> Iterator[list[Logging]]:
    running: list[Logging] = []
    yield running
    for each in running:
        each.close()


def start(started: list[Logging], script: str) -> Logging:
    started.append(Logging(script))
    return started[-1]


def numbers(log: str) -> list[int]:
    return [int(found) for found in re.findall(r"\] line (\d+)", log)]


def test_who_logs_does_not_wait_for_the_reader(started: list[Logging]) -> None:
    """30,000 lines are far more than the pipe and the queue hold."""
    logging = start(
        started,
        """
for number in range(30_000): log.info("line %d", number)
print("done", flush=True)
sys.stdin.read()
log.info("line 30000")
""",
    )
    assert logging.says() == b"done\n"
    logging.process.send_signal(signal.SIGTERM)
    assert logging.process.wait(SLOW_AFTER) == -signal.SIGTERM


def test_what_was_dropped_is_counted_in_its_place(started: list[Logging]) -> None:
    logging = start(
        started,
        """
patient_log.MOST_LINES = 1000
for number in range(5000): log.info("line %d", number)
print("done", flush=True)
while process._handler._written_lines < process._handler._put_lines: time.sleep(0.01)
log.info("line 5000")
""",
    )
    assert logging.says() == b"done\n"
    log = logging.log()
    assert logging.process.wait(SLOW_AFTER) == 0
    following = 0  # number of the next line, if none is dropped before it
    for number, dropped in re.findall(r"\] line (\d+)|(\d+) lines of this log were dropped", log):
        if number:
            assert int(number) == following
        following += int(dropped or 1)
    assert following == 5001
    assert log.splitlines()[-2].endswith("lines of this log were dropped: its reader did not keep up")
    assert log.splitlines()[-1].endswith("line 5000")


def test_the_bytes_that_wait_are_bounded(started: list[Logging]) -> None:
    logging = start(
        started,
        """
patient_log.MOST_BYTES = 100_000
for number in range(100): log.info("line %d %s", number, "x" * 10_000)
print(process._handler._put_bytes, flush=True)
""",
    )
    assert int(logging.says()) < 120_000
    log = logging.log()
    found = numbers(log)
    assert 5 < len(found) < 15
    assert f"{100 - len(found)} lines of this log were dropped" in log


@pytest.mark.parametrize(
    "end", ["", "process.finish(0)", "logging.shutdown(); os._exit(0)", "sys.exit(0)", "1 / 0"]
)
def test_the_last_lines_are_written_at_any_end(started: list[Logging], end: str) -> None:
    logging = start(started, f'for number in range(500): log.info("line %d", number)\n{end}\n')
    log = logging.log()
    assert numbers(log) == [*range(500)]
    assert ("ZeroDivisionError" in log) == (end == "1 / 0")
    assert logging.process.wait(SLOW_AFTER) == (1 if "/" in end else 0)


@pytest.mark.parametrize("end", ["", "process.finish(0)", "1 / 0"])
def test_an_end_does_not_wait_long_for_the_reader(started: list[Logging], end: str) -> None:
    logging = start(started, f'for number in range(500): log.info("line %d", number)\n{end}\n')
    assert logging.process.wait(SLOW_AFTER) == (1 if "/" in end else 0)


def test_forked_processes_write_their_own_lines_once(started: list[Logging]) -> None:
    logging = start(
        started,
        """
for number in range(200): log.info("line %d", number)
if os.fork() == 0:
    process.set_up("Child", "info")
    for number in range(1000, 1200): log.info("line %d", number)
    process.finish(0)
os.wait()
""",
    )
    log = logging.log()
    assert logging.process.wait(SLOW_AFTER) == 0
    assert sorted(numbers(log)) == [*range(200), *range(1000, 1200)]
    assert [n for n in numbers(log) if n >= 1000] == [*range(1000, 1200)]
    assert len(re.findall(r"^\(Child pid=", log, re.M)) == 200


def test_lines_stay_in_order_where_a_process_gets_another_name(started: list[Logging]) -> None:
    logging = start(
        started,
        """
for number in range(300):
    if number % 100 == 0: process.set_up(f"Name{number}", "info", "json")
    log.info("line %d", number)
""",
    )
    told = [json.loads(line) for line in logging.log().splitlines()]
    assert [entry["message"] for entry in told] == [f"line {number}" for number in range(300)]
    assert [entry["process"] for entry in told[::100]] == ["Name0", "Name100", "Name200"]


def test_a_reader_that_is_gone_stops_nobody(started: list[Logging]) -> None:
    logging = start(
        started,
        """
sys.stdout.flush()
for number in range(3000): log.info("line %d", number)
print("done", flush=True)
""",
    )
    fresh = os.open(os.devnull, os.O_RDONLY)
    os.dup2(fresh, logging._end)  # the pipe has no reader any more
    os.close(fresh)
    assert logging.says() == b"done\n"
    assert logging.process.wait(SLOW_AFTER) == 0


def test_a_descriptor_that_does_not_block_loses_nothing(started: list[Logging]) -> None:
    logging = start(
        started,
        """
os.set_blocking(2, False)
for number in range(1000): log.info("line %d", number)
print("done", flush=True)
""",
    )
    assert logging.says() == b"done\n"
    assert numbers(logging.log()) == [*range(1000)]
