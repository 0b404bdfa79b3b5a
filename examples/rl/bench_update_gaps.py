#!/usr/bin/env python3
"""Pauses that streams of a mesh see while its weights change.

    python -m examples.rl.bench_update_gaps
    python -m examples.rl.bench_update_gaps --streams 4 --updates 5 --seconds 5

Two instances serve streams without a break: first nothing else happens, then the weights are updated again
and again. Lines of the instances' log about the switch itself are printed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY, find_model
from examples.rl.mesh import TIMEOUT, Mesh

TOKENS = 1500
"""Tokens of each stream."""


LONGEST = 8
"""Gaps that are printed one by one."""


class Streams:
    """Streams without a break, and when each of their events came."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._ends = threading.Event()
        self._came: list[list[list[float]]] = [[] for _ in range(count)]
        """By thread and stream, the times of its events."""
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._ends.is_set():
            body = {
                "prompt": [10 + number] * 32, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                "seed": number,
            }  # fmt: skip
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer, came = connection.getresponse(), list[float]()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read()!r}")
            self._came[number].append(came)
            while (line := answer.readline()) and not self._ends.is_set():
                if line.startswith(b"data: {"):
                    came.append(time.perf_counter())
            connection.close()

    def gaps(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Seconds between an event of a stream and the next, and when it came, ascending.

        Of the events that came in this time.
        """
        found = []
        for came in (stream for streams in self._came for stream in streams):
            found += [(b - a, b) for a, b in pairwise(came) if begin <= b <= end]
        return sorted(found)

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODELS_DIRECTORY / SHIPPED_MODEL))
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="without updates")
    options = parser.parse_args()
    model = Path(find_model(options.model, None))
    with tempfile.TemporaryDirectory() as directory:
        mesh = Mesh(model, log := Path(directory) / "log")
        try:
            mesh.wait()
            streams = Streams(mesh.port, options.streams)
            time.sleep(1.0)
            begin = time.perf_counter()
            time.sleep(options.seconds)
            middle = time.perf_counter()
            ends = [middle]
            for number in range(options.updates):
                mesh.update(model, f"update {number}")
                ends.append(time.perf_counter())
            end = ends[-1]
            streams.stop()
        finally:
            mesh.stop()
        for what, first, last in (("alone", begin, middle), ("updates", middle, end)):
            gaps = streams.gaps(first, last)
            at = [1000 * gaps[int((len(gaps) - 1) * share)][0] for share in (0.5, 0.999, 1.0)]
            print(
                f"{what:>8}: {last - first:5.1f} s, {len(gaps) / (last - first):7.1f} events/s, "
                f"gaps in ms: median {at[0]:.1f}, 99.9 % {at[1]:.1f}, longest {at[2]:.1f}"
            )
        print("seconds of updates:", *(f"{after - before:.1f}" for before, after in pairwise(ends)))
        for seconds, came in streams.gaps(middle, end)[-LONGEST:]:
            since = min((came - done for done in ends), key=abs)
            print(f"gap of {1000 * seconds:.0f} ms, {since:+.2f} s from the answer to an update")
        print(*(line for line in log.read_text().splitlines() if "switched in" in line), sep="\n")


if __name__ == "__main__":
    main()
