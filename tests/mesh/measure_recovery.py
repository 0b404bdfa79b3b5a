"""``python -m tests.mesh.measure_recovery --kills 20``: how long a mesh with spread experts needs after a death.

Streams run all the time; again and again an instance is killed (SIGKILL), and another one joins in its place.
Told of each kill: when the survivors noticed it (their log line, read as it is written), when both had done
their first step without the dead one, and the longest time that any client waited for a token around the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path

import openai

from engine.config import SHIPPED_MODEL
from tests.mesh.harness import Command, wait_until
from tests.mesh.spread_mesh import SpreadMesh

RECOVERED = re.compile(
    r"recovered in epoch \d+ after (\d+) ms .*form (\d+) ms, \d+ experts read (\d+) ms, "
    r"group (\d+) ms, first step (\d+) ms"
)


class LogTimes(threading.Thread):
    """When lines were written to the logs, read every millisecond."""

    def __init__(self, mesh: SpreadMesh) -> None:
        super().__init__(daemon=True)
        self._mesh = mesh
        self._stopped = threading.Event()
        self._read: dict[Command, int] = {}
        self.lines: list[tuple[float, str]] = []

    def __enter__(self) -> LogTimes:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.is_set():
            now = time.monotonic()
            for command in list(self._mesh.commands):
                with command.log_file.open("rb") as file:
                    file.seek(self._read.get(command, 0))
                    new = file.read()
                complete = new.rpartition(b"\n")[0]
                if complete:
                    self._read[command] = self._read.get(command, 0) + len(complete) + 1
                    self.lines += [(now, line) for line in complete.decode(errors="replace").split("\n")]
            time.sleep(0.001)

    def since(self, moment: float, text: str) -> list[tuple[float, str]]:
        return [(at, line) for at, line in list(self.lines) if at >= moment and text in line]


class Streams:
    """Clients that stream one completion after another, and when each got its tokens."""

    def __init__(self, mesh: SpreadMesh, count: int) -> None:
        self._mesh = mesh
        self._count = count
        self.gaps: list[tuple[float, float]] = []
        """(end, seconds) of each wait for a chunk within a stream."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    def longest(self, begin: float, end: float) -> float:
        """The longest gap that overlaps this time."""
        return max((gap for at, gap in self.gaps if at >= begin and at - gap <= end), default=0.0)

    async def _run(self) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{self._mesh.url}/v1", api_key="none", max_retries=0
        ) as client:
            await asyncio.gather(*(self._stream(client, index) for index in range(self._count)))

    async def _stream(self, client: openai.AsyncOpenAI, index: int) -> None:
        rng = random.Random(index)
        while not self._stopped.is_set():
            chunks = await client.completions.create(
                model=SHIPPED_MODEL, prompt=[rng.randrange(5, 4000) for _ in range(rng.randrange(3, 60))],
                max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            last = None
            async with chunks:
                async for _ in chunks:
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append((now, now - last))
                    last = now
                    if self._stopped.is_set():
                        return


def kill_once(mesh: SpreadMesh, logs: LogTimes, streams: Streams, rank: int) -> dict[str, float]:
    """One death; milliseconds."""
    victim = mesh.engine(rank)
    usual = streams.longest(time.monotonic() - 1.0, time.monotonic())
    killed_at = time.monotonic()
    victim.kill()
    survivors = mesh.size - 1
    wait_until(lambda: len(logs.since(killed_at, "recovered in epoch")) == survivors, 30, "recovery")
    time.sleep(1.0)
    noticed = logs.since(killed_at, "is broken")
    recovered = logs.since(killed_at, "recovered in epoch")
    parts = [match for _, line in recovered if (match := RECOVERED.search(line))]
    found = {
        "noticed": 1000 * (max(at for at, _ in noticed) - killed_at),
        "stepping": 1000 * (max(at for at, _ in recovered) - killed_at),
        "client_gap": 1000 * streams.longest(killed_at, killed_at + 1.0),
        "usual_gap": 1000 * usual,
    }
    for number, part in enumerate(("form", "experts", "group", "step"), start=2):
        found[part] = max(float(match[number]) for match in parts)
    return found


def table(found: list[dict[str, float]]) -> str:
    """A line per quantity: median, 90th percentile, most; milliseconds."""
    lines = ["| ms | median | 90 % | most |", "|---|---|---|---|"]
    for name in found[0]:
        values = sorted(each[name] for each in found)
        high = values[min(len(values) - 1, round(0.9 * (len(values) - 1)))]
        lines.append(f"| {name} | {statistics.median(values):.0f} | {high:.0f} | {values[-1]:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--backend", default="auto", help="--all2all-backend of the mesh")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        directory = asked.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        mesh = SpreadMesh(directory, stack, asked.instances, backend=asked.backend)
        with LogTimes(mesh) as logs, Streams(mesh, asked.streams) as streams:
            time.sleep(2.0)
            for number in range(asked.kills):
                found.append(kill_once(mesh, logs, streams, rank=1 + number % (mesh.size - 1)))
                print({name: round(value) for name, value in found[-1].items()}, flush=True)
                if number + 1 < asked.kills:
                    mesh.make_whole()
                    time.sleep(1.0)
    print(table(found))
    if asked.output_json is not None:
        asked.output_json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
