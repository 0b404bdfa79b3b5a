"""Traces of router and instance at our own collector, JSON logs, access log without polling."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.harness import Ports, free_port, serve, wait_until

pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.mesh

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP/HTTP endpoint, and the spans that came."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", spans
    finally:
        server.shutdown()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_traces_and_logs(tmp_path: Path) -> None:
    ports = Ports()
    with collector() as (endpoint, spans):
        flags = [
            "--otlp-traces-endpoint",
            endpoint,
            "--log-format",
            "json",
            "--num-gpu-blocks-override",
            "200",
        ]
        with serve(tmp_path / "log", *ports.head(), *flags) as command:
            command.wait_for("1 instance ready")
            body = {"model": "lockstep-moe", "prompt": [20] * 40, "max_tokens": 9, "ignore_eos": True}
            request = urllib.request.Request(
                f"{ports.url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json", "traceparent": f"00-{TRACE}-{CALLER}-01"},
            )
            answer = json.load(urllib.request.urlopen(request, timeout=60))
            for path in ("/health", "/metrics", "/v1/models"):
                urllib.request.urlopen(ports.url + path, timeout=20).read()
            wait_until(lambda: len(spans) >= 2, 30, "spans of router and instance")
            assert command.stop() == 0
        log = command.log

    by_name = {span.name: span for span in spans}
    outer, inner = by_name["POST /v1/completions"], by_name["lockstep.instance"]
    assert len(spans) == 2
    assert outer.trace_id.hex() == inner.trace_id.hex() == TRACE
    assert outer.parent_span_id.hex() == CALLER
    assert inner.parent_span_id == outer.span_id
    assert outer.start_time_unix_nano <= inner.start_time_unix_nano < inner.end_time_unix_nano
    told = attributes(outer)
    assert told["gen_ai.request.id"] == answer["id"]
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (40, 9)
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"] < 60
    assert attributes(inner)["gen_ai.usage.completion_tokens"] == 9
    assert attributes(inner)["lockstep.finish_reason"] == "length"

    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {"Coordinator", "Engine_0", "Router"} <= {entry["process"] for entry in entries}
    assert all(entry.keys() >= {"time", "level", "message", "source", "pid"} for entry in entries)
    said = [entry["message"] for entry in entries if entry["logger"] == "uvicorn.access"]
    assert any("/v1/models" in message for message in said)
    assert not any("/health" in message or "/metrics" in message for message in said)


def test_a_missing_library_is_said_before_anything_starts(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from router.launcher.serve import main_serve\n"
        f"sys.exit(main_serve(['--otlp-traces-endpoint', 'http://127.0.0.1:{free_port()}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'lockstep-mesh[otel]'" in done.stderr
