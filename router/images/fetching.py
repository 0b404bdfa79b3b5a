"""Images at URLs: fetched in a few threads, from allowed hosts and directories only."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from router.errors import ApiError
from router.media_rules import MediaRules, Refusal

MOST_SECONDS = 10.0
"""For one image, redirects included."""
MOST_REDIRECTS = 3
AT_ONCE = 8
"""Images that are fetched at once."""
MOST_WAITING = 64
"""Images that wait for those; more are refused with 503."""
REDIRECTS = (301, 302, 303, 307, 308)
PART = 1 << 16


@dataclass
class MediaFetcher:
    """Fetches what the rules of an endpoint allow."""

    rules: MediaRules
    most_bytes: int
    """Bytes of an image, at most."""
    most_seconds: float = MOST_SECONDS
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(AT_ONCE, thread_name_prefix="media")
    )
    _room: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(AT_ONCE + MOST_WAITING)
    )

    def fetch(self, urls: Sequence[str]) -> list[bytes | Refusal]:
        """Bytes behind each URL, or why not in words for the client.

        Blocks until all are here.

        Raises:
            ApiError: too many others wait (503).
        """
        begun = [self._begin(url) for url in urls]
        deadline = time.monotonic() + self.most_seconds
        return [self._result(future, deadline) for future in begun]

    def _begin(self, url: str) -> Future[bytes] | Refusal:
        try:
            self.rules.check(urlsplit_of(url))  # before it takes a thread
        except Refusal as refusal:
            return refusal
        if not self._room.acquire(blocking=False):
            raise ApiError(503, "Too many images are being fetched; try again.", headers={"retry-after": "5"})
        future = self._threads.submit(self._fetch, url, time.monotonic() + self.most_seconds)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _result(self, future: Future[bytes] | Refusal, deadline: float) -> bytes | Refusal:
        if isinstance(future, Refusal):
            return future
        try:
            return future.result(max(0.0, deadline - time.monotonic()) + 0.5)
        except Refusal as refusal:
            return refusal
        except (FutureTimeoutError, TimeoutError):
            future.cancel()
            return Refusal(f"was not fetched within {self.most_seconds:g} s")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Refusal(f"cannot be fetched: {type(error).__name__}")

    # ---- the threads

    def _fetch(self, url: str, deadline: float) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            parts = urlsplit_of(url)
            self.rules.check(parts)
            if parts.scheme == "file":
                return self._read_file(Path(unquote(parts.path)))
            found = self._get(parts, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
            if urlsplit_of(url).scheme == "file":
                raise Refusal("redirects to a file")
        raise Refusal(f"redirects more than {MOST_REDIRECTS} times")

    def _get(self, parts: SplitResult, deadline: float) -> bytes | str:
        """The body, or where it redirects to."""
        connection = _AtAddress(parts, self.rules, deadline)
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), connection.cut)
        watch.daemon = True
        watch.start()
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"accept": "image/*", "accept-encoding": "identity"})
            with contextlib.closing(connection.getresponse()) as answer:
                found = self._read(answer)
            if connection.is_cut:
                raise TimeoutError
            return found
        except (OSError, http.client.HTTPException) as error:
            if connection.is_cut:
                raise TimeoutError from error
            raise
        finally:
            watch.cancel()
            connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> bytes | str:
        where = answer.getheader("location")
        if answer.status in REDIRECTS and where:
            return where
        if answer.status != http.HTTPStatus.OK:
            raise Refusal(f"cannot be fetched: its host answers {answer.status}")
        if (answer.length or 0) > self.most_bytes:
            raise self._too_large()
        body = bytearray()
        while part := answer.read1(PART):
            body += part
            if len(body) > self.most_bytes:
                raise self._too_large()
        return bytes(body)

    def _read_file(self, path: Path) -> bytes:
        """A regular file below the allowed directory, also behind links."""
        unusable = Refusal("is no file below --allowed-local-media-path")
        try:
            if not self.rules.allows_file(path.resolve()):  # before a device or a pipe is opened
                raise unusable
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, RuntimeError, ValueError):
            raise unusable from None
        try:
            found = os.fstat(descriptor)
            really = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # the path may lead elsewhere by now
            if not stat.S_ISREG(found.st_mode) or not self.rules.allows_file(really):
                raise unusable
            if found.st_size > self.most_bytes:
                raise self._too_large()
            return os.read(descriptor, self.most_bytes)
        finally:
            os.close(descriptor)

    def _too_large(self) -> Refusal:
        return Refusal(f"has more than {self.most_bytes} bytes")


def urlsplit_of(url: str) -> SplitResult:
    """The parts of a URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise Refusal("is no valid URL") from None
    return parts


class _AtAddress(http.client.HTTPConnection):
    """A connection to an address that was checked: another answer of DNS changes nothing."""

    def __init__(self, parts: SplitResult, rules: MediaRules, deadline: float) -> None:
        self._is_secure = parts.scheme == "https"
        port = parts.port or (443 if self._is_secure else 80)
        super().__init__(parts.hostname or "", port)
        self._rules = rules
        self._deadline = deadline
        self.is_cut = False
        self._opened: socket.socket | None = None
        """Also while an answer is read that keeps it from the base class."""

    def cut(self) -> None:
        """End the connection from another thread: its time is up."""
        self.is_cut = True
        if self._opened is not None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self._opened.shutdown(socket.SHUT_RDWR)

    def connect(self) -> None:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        self._rules.check_addresses(addresses)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        problem: OSError | None = None
        for address in addresses:
            try:
                self.sock = self._opened = socket.create_connection(
                    (address, self.port), left / len(addresses)
                )
                break
            except OSError as error:
                problem = error
        else:
            raise problem or OSError("no address")
        self.sock.settimeout(left)
        if self._is_secure:
            self.sock = self._opened = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self.host
            )
