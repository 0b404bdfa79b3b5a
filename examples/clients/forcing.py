"""A server between a client and the mesh that makes the model write what a trained one would.

The shipped model was never trained to call tools, and clients like Codex have no field to force a call. So
each POST gets a regular expression that its answer is to follow; everything else passes through as it is.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import checks

TIMEOUT = 240.0
"""Seconds that an answer may take."""
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
"""Headers that belong to one connection, not to the request."""

TEXT = r"[A-Z][a-z]{2,8}( [a-z]{2,8}){2,5}\."
"""An answer that ends soon."""


def call(name: str, arguments: str) -> str:
    """A regular expression of a call, as models write it for the parser ``hermes``."""
    return rf'<tool_call>\n\{{"name": "{name}", "arguments": {arguments}\}}\n</tool_call>'


class Exchange:
    """One request and what the mesh said to it."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path = path
        self.body = body
        self.status = 0
        self.headers: dict[str, str] = {}


class Forcing(http.server.ThreadingHTTPServer):
    """``url`` is where clients go; ``answers`` are the expressions of the next answers, then :data:`TEXT`."""

    daemon_threads = True

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.exchanges: list[Exchange] = []
        self._answers = list(answers)

    def force(self, body: dict[str, Any]) -> dict[str, Any]:
        expression = self._answers.pop(0) if self._answers else TEXT
        return body | {"structured_outputs": {"regex": expression}, "seed": 1}


@contextlib.contextmanager
def forcing(*answers: str) -> Iterator[Forcing]:
    """A server that runs meanwhile."""
    server = Forcing(answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Forcing

    def do_GET(self) -> None:
        self._pass_on(None, None)

    def do_HEAD(self) -> None:
        self._pass_on(None, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        exchange = Exchange(urlsplit(self.path).path, body)
        self.server.exchanges.append(exchange)
        self._pass_on(json.dumps(self.server.force(body)).encode(), exchange)

    def _pass_on(self, body: bytes | None, exchange: Exchange | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        request = urllib.request.Request(checks.URL + self.path, body, headers, method=self.command)
        try:
            answer = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            if exchange is not None:
                exchange.status = answer.status
                exchange.headers = {name.lower(): value for name, value in answer.headers.items()}
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while part := answer.read1(65536):
                self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the checks say what went wrong."""
