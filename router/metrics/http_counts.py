"""Answers to HTTP requests, counted for /metrics under the names of prometheus-fastapi-instrumentator.

vLLM counts with it, so its users have boards and alerts for these names. As there, what only watches the
server (health, metrics and the like) is left out. Labels are bounded: paths are those of routes, or ``none``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.request_path import without_slash
from router.metrics.histograms import Series
from router.metrics.report_metrics import buckets
from router.metrics.shared_counts import HttpTotals

BOUNDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Bounds in seconds. The first three are all that vLLM has; generated answers take longer."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD = "OTHER"
NO_HANDLER = "none"
"""Handler label of paths without a route."""
WATCHING = frozenset(
    {"/metrics", "/health", "/health_generate", "/livez", "/load", "/ping", "/version", "/server_info"}
)
"""Paths of monitoring requests, which are not counted."""


class _Answers:
    """Counts of HTTP answers of one method and handler."""

    __slots__ = ("seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.seconds = Series(BOUNDS)

    def add(self, other: HttpTotals) -> None:
        for status, count in other.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + count
        self.seconds.add(other.seconds)


class HttpCounts:
    """Counts of HTTP answers of one router."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], _Answers] = {}

    def __repr__(self) -> str:
        return f"<HttpCounts of {sorted(self._answers)}>"

    def observe(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        answers = self._of(method if method in METHODS else OTHER_METHOD, handler)
        group = f"{status // 100}xx"
        answers.statuses[group] = answers.statuses.get(group, 0) + 1
        answers.seconds.observe(seconds)

    def totals(self) -> list[HttpTotals]:
        """Totals for the shared counts."""
        return [
            HttpTotals(method, handler, answers.statuses, answers.seconds.totals())
            for (method, handler), answers in self._answers.items()
        ]

    def add(self, totals: Iterable[HttpTotals]) -> None:
        for each in totals:
            self._of(each.method, each.handler).add(each)

    def families(self, others: Iterable[Sequence[HttpTotals]]) -> list[Metric]:
        """The metrics, with the counts of other routers."""
        whole = HttpCounts()
        for part in (self.totals(), *others):
            whole.add(part)
        requests = CounterMetricFamily(
            "http_requests", "Answers to HTTP requests.", labels=("handler", "method", "status")
        )
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From an HTTP request to the end of its answer.",
            labels=("handler", "method"),
        )
        for (method, handler), answers in sorted(whole._answers.items()):
            for status, count in sorted(answers.statuses.items()):
                requests.add_metric((handler, method, status), count)
            series = answers.seconds
            seconds.add_metric((handler, method), buckets(series.bounds, series.counts), series.total)
        return [requests, seconds]

    def _of(self, method: str, handler: str) -> _Answers:
        return self._answers.setdefault((method, handler), _Answers())


class Handlers:
    """The route that each path leads to."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        found = [route for route in routes if isinstance(route, Route)]
        self._plain = {route.path for route in found if "{" not in route.path}
        self._patterns = [
            (route.path_regex, re.sub(r":\w+}", "}", route.path)) for route in found if "{" in route.path
        ]

    def __repr__(self) -> str:
        return f"<Handlers of {len(self._plain)} paths and {len(self._patterns)} patterns>"

    def of(self, path: str) -> str:
        """The route's own path, which names its parameters."""
        if (path := without_slash(path)) in self._plain:
            return path
        return next((name for regex, name in self._patterns if regex.match(path)), NO_HANDLER)


class Counting:
    """Middleware that counts answers.

    A client that hangs up before an answer begins gets none, and is not counted.
    """

    def __init__(self, app: ASGIApp, counts: HttpCounts, handlers: Handlers) -> None:
        self._app = app
        self._counts = counts
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (handler := self._handlers.of(scope["path"])) in WATCHING:
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        status: int | None = None

        def watched(message: Message) -> Awaitable[None]:  # without a coroutine of its own, for streams
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # is answered further out
            raise
        finally:
            if status is not None:
                self._counts.observe(scope["method"], handler, status, time.perf_counter() - begin)
