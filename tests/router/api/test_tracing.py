"""Spans of requests that never run."""

from __future__ import annotations

import pytest

from coordinator.process import tracing
from router.app.app import make_app
from router.config import HttpConfig
from router.mesh import ServedModel
from tests.router.app.test_admin import ENDPOINT, ask
from tests.router.fake_mesh import FakeMesh, saying

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


def test_a_request_that_is_refused_ends_its_span(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT", 0.2)
    monkeypatch.setattr(tracing, "FLUSH_MS", 200)
    spans, ended = tracing.Tracing("http://127.0.0.1:9", "test"), InMemorySpanExporter()
    spans._provider.add_span_processor(SimpleSpanProcessor(ended))
    app = make_app(FakeMesh(served, saying([70])), HttpConfig(max_tokens_per_minute=100), tracing=spans)

    def status_of(**headers: str) -> int:
        body = {"prompt": "a " * 60, "max_tokens": 1}
        return ask(app, "POST", f"{ENDPOINT}/v1/completions", json=body, headers=headers).status_code

    assert [status_of(**{"x-request-timeout": "soon"}), status_of(), status_of()] == [400, 200, 429]
    spans.close()
    refused, answered, limited = ended.get_finished_spans()
    assert [each.status.is_ok for each in (refused, answered, limited)] == [False, True, False]
    assert "x-request-timeout" in str(refused.status.description).lower()
    assert "100 tokens per minute" in str(limited.status.description)
