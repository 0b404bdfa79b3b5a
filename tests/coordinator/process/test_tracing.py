"""What is logged when the trace collector is away."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from coordinator.process import tracing
from coordinator.process.tracing import Tracing

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_a_collector_that_is_away_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT", 0.2)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # could not reach this loopback
    caplog.set_level("INFO")
    with HTTPServer(("127.0.0.1", 0), Collector, bind_and_activate=False) as server:
        server.server_bind()  # it does not listen yet
        port = server.server_address[1]
        spans = Tracing(f"http://127.0.0.1:{port}", "test")
        for _ in range(3):
            spans.record("lost", "", time.perf_counter(), time.perf_counter(), {})
            spans._provider.force_flush(5000)
        ours = [
            record for record in caplog.records if record.name == tracing.__name__
        ]  # servers may still end
        lost = [record.getMessage() for record in ours]
        assert len(lost) == 1, lost
        assert f"traces are lost: the collector at http://127.0.0.1:{port}/v1/traces takes none: " in lost[0]
        assert "see --otlp-traces-endpoint" in lost[0]
        server.server_activate()
        Thread(target=server.serve_forever, daemon=True).start()
        spans.record("taken", "", time.perf_counter(), time.perf_counter(), {})
        spans._provider.force_flush(5000)
        assert "the collector takes traces again" in caplog.records[-1].getMessage()
        spans.close()
        server.shutdown()
