"""A process that follows a coordinator: one real router, or some mere watchers.

Answers each line of standard input by a line of JSON: what the views show now.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import uvloop
import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parents[3]))

from coordinator.member_connection import Watcher
from coordinator.messages import State, View
from coordinator.rpc.keys import load
from router.dispatch.client import MeshClient


def shown(view: View | None) -> dict[str, int]:
    states = [member.state for member in view.members] if view else []
    return {
        "members": len(states),
        "ready": states.count(State.READY),
        "complete": bool(view and view.complete),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description="Followers of a coordinator.")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--key")
    parser.add_argument("--watchers", type=int, default=0, help="0: a router")
    args = parser.parse_args()
    keys = load(Path(args.key)) if args.key else None
    news = [0]

    def count(_: object) -> None:
        news[0] += 1

    router = None if args.watchers else MeshClient(args.coordinator, keys=keys)
    watchers = [
        Watcher(args.coordinator, f"watcher-{number}", zmq.asyncio.Context(), keys)
        for number in range(args.watchers)
    ]
    running = [asyncio.create_task(watcher.run(count)) for watcher in watchers]
    if router is not None:
        running.append(asyncio.create_task(router.run()))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        views = [watcher.view for watcher in watchers] if router is None else [router.view]
        found = [shown(view) for view in views]
        if router is not None:
            found[0]["ready"] = router.num_ready
        least = {key: min(each[key] for each in found) for key in found[0]}
        series = sorted({view.series for view in views if view})
        print(json.dumps({**least, "news": news[0], "series": series}), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
