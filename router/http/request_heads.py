"""Bounds on request heads, which precede any key check; offers of upgrades are ignored.

uvicorn's protocol reads whatever a client sends: a head that never ends, thousands of requests before the
first one is answered. Here a connection that exceeds the bounds is closed. uvicorn also takes a request that
offers another protocol (``Upgrade: h2c``, as curl and Java send it) for one of that protocol, without its
body. Here the offer is ignored, as HTTP permits.
"""

from __future__ import annotations

from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import ApiError, error_body

MOST_BYTES = 64 * 1024
"""Most bytes of a head, of a body's trailers, and of data between bodies."""
MOST_HEADERS = 256
"""Headers of one request, trailers included; more are refused with 431."""
MOST_WAITING = 32
"""Requests of one connection that wait for the answer of an earlier one."""

WHOLE_SERVER = b"*"
"""Request target ``*`` of OPTIONS for the whole server."""
BLANKS = b" \t"
"""Bytes that may surround a header's value without being part of it."""
OFFERS = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol, as named in the connection's options."""


class _Beyond(Exception):
    """Error that ends a connection whose head exceeds the bounds, raised inside the parser."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BoundedProtocol(HttpToolsProtocol):
    """HTTP protocol that bounds request heads and ignores offers of upgrades."""

    _num_unread = 0
    """Bytes received since a request part was complete or body data arrived."""
    _num_bytes = 0
    """Bytes of the current head, and of the trailers behind it."""
    _num_headers = 0
    _has_head = False
    _comes_again = False
    """The head that was read offers an upgrade: it is read once more without."""

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # TLS hands on what it has
        self._unset_keepalive_if_required()
        self._num_unread += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            why = error.__context__
            if isinstance(why, _Beyond):
                self._end(why.status, str(why))
            else:
                self._end(400, "Invalid HTTP request received.")
            return
        if self._num_unread > MOST_BYTES:
            self._end(431, f"The head of a request may have {MOST_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._num_bytes = self._num_headers = 0
        self._has_head = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        if not self._has_head:  # else it is a trailer, which nobody here reads
            super().on_header(name, value.rstrip(BLANKS))  # the parser takes off those before it alone

    def on_headers_complete(self) -> None:
        if self.url == WHOLE_SERVER and self.parser.get_method() == b"OPTIONS":
            self.url = b"/"
        self._num_unread = 0
        self._has_head = True
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._comes_again = True
            return
        if len(self.pipeline) >= MOST_WAITING:
            raise _Beyond(400, f"More than {MOST_WAITING} requests wait on this connection.")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread = 0
        if not self._comes_again:
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MOST_BYTES or self._num_headers > MOST_HEADERS:
            raise _Beyond(
                431, f"The head of a request may have {MOST_BYTES} bytes and {MOST_HEADERS} headers."
            )

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._comes_again:  # CONNECT, which is answered like any other method
                    return
                self._comes_again = False
                data = self._head_without_offer() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            else:
                return

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in OFFERS)
            if name not in OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _end(self, status: int, message: str) -> None:
        """Close the connection, with an error response where one can be sent.

        It cannot within an answer, or before an earlier one.
        """
        self.logger.warning("a connection is closed: %s", message)
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            body = error_body(ApiError(status, message))
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, HTTPStatus(status).phrase.encode(), len(body), body)
            )
        if cycle is not None:  # what it still has to say is for nobody
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()
