"""A server between a client and the mesh that makes the model write given answers.

The shipped model was never trained to call tools, and clients like Codex have no field to force a call. So
for each POST the server fixes the answer: a text that ends soon, or a certain call. Everything else passes
through as it is.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import checks

TIMEOUT = 240.0
"""Longest time of an answer in seconds."""
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
"""Headers that belong to one connection, not to the request."""

TEXT = r"[A-Z][a-z]{2,8}( [a-z]{2,8}){2,5}\."
"""An answer that ends soon."""


class Call(NamedTuple):
    """A call of a tool of /v1/responses."""

    name: str
    arguments: dict[str, Any]
    """Schemas by name; all of them are required."""
    namespace: str | None = None

    def forced(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request whose tool must be called, with arguments of this form."""
        chosen = {"type": "function", "name": self.name}
        chosen |= {"namespace": self.namespace} if self.namespace else {}
        return body | {"tools": list(map(self._narrowed, body["tools"])), "tool_choice": chosen}

    def _narrowed(self, tool: dict[str, Any]) -> dict[str, Any]:
        if tool["type"] == "namespace" and tool["name"] == self.namespace:
            return tool | {"tools": [self._narrowed(inner) for inner in tool["tools"]]}
        if tool.get("name") != self.name:
            return tool
        schema = {"type": "object", "properties": self.arguments, "required": list(self.arguments)}
        return tool | {"parameters": schema | {"additionalProperties": False}}


class Exchange:
    """One request and the mesh's answer to it."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path = path
        self.body = body
        self.status = 0
        self.headers: dict[str, str] = {}


class Forcing(http.server.ThreadingHTTPServer):
    """A server at ``url`` whose next answers are forced to ``calls``, then to texts."""

    daemon_threads = True

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.exchanges: list[Exchange] = []
        self._calls = list(calls)

    def force(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._calls:
            return self._calls.pop(0).forced(body) | {"seed": 1}
        return body | {"tool_choice": "none", "structured_outputs": {"regex": TEXT}, "seed": 1}


@contextlib.contextmanager
def forcing(*calls: Call) -> Iterator[Forcing]:
    """A forcing server that runs within the block."""
    server = Forcing(calls)
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
        """Log nothing: the checks report what went wrong."""
