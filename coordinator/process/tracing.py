"""OpenTelemetry traces, sent over OTLP/HTTP; the library is loaded only when they are asked for.

A router begins a span per request, as a child of the client's if it sent a ``traceparent`` (W3C Trace
Context), and passes its own on to the instance, which tells of its part when the request ends there. An
instance that dies tells nothing; the one that goes on says how many tokens were there already.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coordinator.addresses import is_loopback
from coordinator.distribution import install_extra

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
TRACES_PATH = "/v1/traces"
"""Appended to an endpoint without a path, as OTLP has it."""
EXPORT_TIMEOUT = 5
"""Timeout of one export of spans, in seconds.

A collector that is away costs the mesh nothing but its spans.
"""
FLUSH_MS = 2000
"""Milliseconds for exporting the last spans at a process's end."""
MAX_QUEUED = 4096
"""Spans that wait for the exporter; more are dropped."""
EXPORTER_LOGGER = "opentelemetry.exporter.otlp"

Attributes = dict[str, str | int | float | bool]


class TracingMissing(Exception):
    """Error: the OpenTelemetry library is not installed."""

    def __init__(self) -> None:
        super().__init__(
            f"--otlp-traces-endpoint needs OpenTelemetry: {install_extra('otel')}, or leave the flag out"
        )


def usable(traceparent: str | None) -> str:
    """A client's ``traceparent`` header if it is valid, else empty.

    Empty otherwise, as the standard says.
    """
    return traceparent if traceparent and TRACEPARENT.fullmatch(traceparent) else ""


def check_installed() -> None:
    """
    Raises:
        TracingMissing: the extra is not installed.
    """
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise TracingMissing


class Away(logging.Filter):
    """Filter that logs once when the collector is away, and once when it is back.

    It replaces the exporter's several lines a second, and lets none of them through.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._since: float | None = None
        self._reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Filter a log record of the exporter; warnings and errors are suppressed."""
        if record.levelno < logging.WARNING:
            return True
        if record.levelno < logging.ERROR:
            self._reason = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        elif self._since is None:
            self._since = time.monotonic()
            reason = self._reason or record.getMessage()
            logger.warning(
                "traces are lost: the collector at %s takes none: %s. Is it running? see "
                "--otlp-traces-endpoint",
                self._url,
                reason,
            )
        return False

    def taken(self) -> None:
        """Note that the collector took spans; logs the end of an outage."""
        if self._since is not None:
            logger.info("the collector takes traces again, after %.0f s", time.monotonic() - self._since)
            self._since = None


def _session(url: str) -> Any:
    """HTTP session for exports to a collector.

    A collector on this host is reached without a proxy.
    """
    import requests  # as the exporter does

    session = requests.Session()
    session.trust_env = not is_loopback(urlsplit(url).hostname or "")
    return session


class Tracing:
    """Tracer of one process: begins, ends and records spans."""

    def __init__(self, endpoint: str, role: str) -> None:
        """
        Raises:
            TracingMissing: the extra is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingMissing from error
        scheme, _, rest = endpoint.rpartition("://")
        has_path = "/" in rest.rstrip("/")
        url = f"{scheme or 'http'}://{rest.rstrip('/')}{'' if has_path else TRACES_PATH}"
        away = Away(url)
        # A filter of a logger sees only its own records, so those of all that send.
        for name in (f"{EXPORTER_LOGGER}.proto.http.trace_exporter", f"{EXPORTER_LOGGER}.common.http"):
            logging.getLogger(name).addFilter(away)

        class Exporter(OTLPSpanExporter):
            """Tells when spans have arrived."""

            def export(self, spans: Any) -> Any:
                result = super().export(spans)
                if result is SpanExportResult.SUCCESS:
                    away.taken()
                return result

        self._trace = trace
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "lockstep", "service.instance.id": role}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                Exporter(endpoint=url, timeout=EXPORT_TIMEOUT, session=_session(url)),
                max_queue_size=MAX_QUEUED,
                schedule_delay_millis=1000,
            )
        )
        self._tracer = self._provider.get_tracer("lockstep")
        self._propagator = TraceContextTextMapPropagator()
        self._url = url

    def __repr__(self) -> str:
        return f"<Tracing to {self._url}>"

    def begin(self, name: str, traceparent: str, began: float) -> Span:
        """A server's span that began at ``began`` (``time.perf_counter``); :meth:`end` ends it."""
        return self._tracer.start_span(
            name, self._context(traceparent), self._trace.SpanKind.SERVER, start_time=_unix_ns(began)
        )

    def traceparent(self, span: Span) -> str:
        """The ``traceparent`` header for work on behalf of a span."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier["traceparent"]

    def end(self, span: Span, attributes: Attributes, error: str = "") -> None:
        span.set_attributes(attributes)
        if error:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end()

    def record(self, name: str, traceparent: str, began: float, ended: float, attributes: Attributes) -> None:
        """Record a finished span between two times of ``time.perf_counter``."""
        span = self._tracer.start_span(
            name, self._context(traceparent), attributes=attributes, start_time=_unix_ns(began)
        )
        span.end(_unix_ns(ended))

    def close(self) -> None:
        """Export the remaining spans, within a bounded time."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _context(self, traceparent: str) -> Any:
        return self._propagator.extract({"traceparent": traceparent} if traceparent else {})


def _unix_ns(moment: float) -> int:
    """Wall-clock nanoseconds of a ``time.perf_counter`` time."""
    return time.time_ns() - round((time.perf_counter() - moment) * 1e9)
