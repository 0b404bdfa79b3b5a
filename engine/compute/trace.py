"""Spans of time in which workers computed, as a Chrome trace (no torch).

Shares of idle time come with it. Times are those of the monotonic clock, which all processes of a host share.
Open the file in chrome://tracing or https://ui.perfetto.dev: a line per worker, a box per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.step import Span

MOST_SPANS = 100_000
"""Spans kept of a worker, the newest ones."""


def idle_share(spans: Sequence[Span], since: float, until: float) -> float:
    """Fraction of a time span in which a worker computed nothing."""
    busy = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans)
    return 1.0 - busy / (until - since) if until > since else 0.0


def write_chrome_trace(path: Path, spans: Mapping[str, Sequence[Span]]) -> str:
    """Write the spans of each worker; returns a line about their idle time.

    Idle time counts between the first and the last span of all workers.
    """
    times = [time for each in spans.values() for span in each for time in span]
    since, until = min(times, default=0.0), max(times, default=0.0)
    events: list[dict[str, object]] = []
    for number, (name, each) in enumerate(spans.items()):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}})
        events += [
            {
                "ph": "X",
                "name": "step",
                "pid": 0,
                "tid": number,
                "ts": begin * 1e6,
                "dur": (end - begin) * 1e6,
            }
            for begin, end in each
        ]
    path.write_bytes(msgspec.json.encode({"traceEvents": events}))
    shares = ", ".join(f"{name} {idle_share(each, since, until):.0%}" for name, each in spans.items())
    return f"idle within {until - since:.1f} s: {shares}"
