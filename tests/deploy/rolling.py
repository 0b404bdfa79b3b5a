"""A rolling update under load: every answer is compared with that of the undisturbed mesh.

    python -m tests.deploy.rolling --url http://127.0.0.1:8000 -- COMMAND...

COMMAND updates the mesh, for example by restarting its units one after another. It runs while clients ask; the
exit status is 0 if it succeeds and every answer is right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from tests.mesh.faults.load import Load, Verdict, body_of, undisturbed

SETTLE = 3.0
"""Seconds of load before and after the update."""


def roll(url: str, update: Callable[[], bool], *, streams: int, requests: int, tokens: int) -> dict[str, int]:
    """Counts of verdicts, and ``update``: 1 if the update succeeded."""
    bodies = [body_of(number, longest=300, most_tokens=tokens) for number in range(requests)]
    truth = undisturbed(url, bodies, streams)
    broken = [answer.number for answer in truth if answer.error is not None]
    if broken:
        raise SystemExit(f"requests {broken} fail before the update: {truth[broken[0]].error}")
    with Load(url, truth, bodies, streams=streams, keeps=False) as load:
        time.sleep(SETTLE)
        updated = update()
        time.sleep(SETTLE)
    for problem in load.problems:
        print(problem, file=sys.stderr)
    return {**{verdict.value: load.verdicts[verdict] for verdict in Verdict}, "update": int(updated)}


def is_right(counts: dict[str, int]) -> bool:
    """Whether the update succeeded, and there were answers, all of them right."""
    wrong = sum(count for name, count in counts.items() if name not in (Verdict.RIGHT.value, "update"))
    return bool(counts["update"] and counts[Verdict.RIGHT.value]) and wrong == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare every answer while a command updates a mesh.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args(argv)

    def update() -> bool:
        return subprocess.run(asked.command, check=False).returncode == 0

    counts = roll(asked.url, update, streams=asked.streams, requests=asked.requests, tokens=asked.tokens)
    print(counts)
    return 0 if is_right(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
