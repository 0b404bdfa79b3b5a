"""Requests to the API of a server, for ``lockstep chat`` and ``lockstep replay``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from coordinator.addresses import is_loopback
from router.launcher.endpoint_config import EndpointConfig
from router.launcher.environment import key_of_client


class ServerError(Exception):
    """Failed request to a server: no answer, or an error; the message is for users."""

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        """``status``: of the HTTP answer, 0 without one; ``retry_after``: seconds that it asks to wait."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NoApi(ServerError):
    """Answer of a server that has no such API at this path."""


class _PathConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, tls: ssl.SSLContext | None, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname="localhost")


class _AtPath(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens all URLs at one Unix socket."""

    def __init__(self, path: str, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._path = path
        self._tls = tls

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)

    def _connection(self, _host: str, /, *, timeout: float = 0.0, **_: Any) -> http.client.HTTPConnection:
        return _PathConnection(self._path, self._tls, timeout)


class Api:
    """Client of one server's API."""

    def __init__(self, url: str | None, endpoint: EndpointConfig, timeout: float) -> None:
        """``url``: unset for the endpoint; ``timeout``: seconds without any output."""
        self.url = (url or f"{endpoint.base_url}/v1").rstrip("/")
        self._path = endpoint.uds if url is None else None
        self._trusts = endpoint if url is None else EndpointConfig()
        self._tls: ssl.SSLContext | None = None
        self._timeout = timeout
        self._key = endpoint.api_key[0] if endpoint.api_key else key_of_client(os.environ)

    def __repr__(self) -> str:
        return f"<Api at {self._path or self.url}>"

    def trust(self) -> None:
        """Read the certificate of the endpoint, if it has one.

        Raises:
            ServerError: it cannot be read.
        """
        try:
            self._tls = self._trusts.trust()
        except OSError as error:
            raise ServerError(f"--ssl-certfile cannot be used: {error.strerror or error}") from error

    def _opener(self, request: urllib.request.Request) -> urllib.request.OpenerDirector:
        """URL opener without proxies for loopback, where a proxy would find another host."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=self._tls)]
        if is_loopback(urlsplit(request.full_url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        if self._path is not None:
            handlers = [urllib.request.ProxyHandler({}), _AtPath(self._path, self._tls)]
        return urllib.request.build_opener(*handlers)

    @contextlib.contextmanager
    def open(self, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """Open a response for reading; ``body`` is JSON to post.

        Raises:
            NoApi: the path is unknown there, or the answer is no JSON of this API.
            ServerError: there is no answer, or an error.
        """
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        try:
            request = urllib.request.Request(self.url + path, body, headers)
            with self._opener(request).open(request, timeout=self._timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise _error_of(error) from error
        except urllib.error.URLError as error:
            where = self._path or self.url
            raise ServerError(f"no server answers at {where}: {error.reason}; see --url") from error
        except http.client.InvalidURL as error:
            raise ServerError(f"{self.url!r} is no URL: {error}; see --url") from error
        except TimeoutError as error:
            raise ServerError(f"the server said nothing for {self._timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection broke: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise NoApi(f"{self.url} does not answer as OpenAI's API does: {error}") from error


def message_of(error: Any) -> str:
    """Message in a server's error body: an object as OpenAI's, or plain text."""
    return str((error.get("message") if isinstance(error, dict) else error) or "")


def _error_of(error: urllib.error.HTTPError) -> ServerError:
    try:
        message = message_of(json.loads(error.read())["error"]) or error.reason
    except (ValueError, LookupError, TypeError, OSError):
        message = error.reason
    hint = " (--api-key, LOCKSTEP_API_KEY or OPENAI_API_KEY)" if error.code == 401 else ""
    pause = error.headers.get("retry-after", "")
    kind = NoApi if error.code == 404 else ServerError
    return kind(f"{message} [HTTP {error.code}]{hint}", error.code, int(pause) if pause.isdecimal() else None)
