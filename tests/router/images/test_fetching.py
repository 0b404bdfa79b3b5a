"""Images at URLs: allowed hosts and addresses, redirects, bounds on size and time, files."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from router.images.fetching import MediaFetcher, urlsplit_of
from router.media_rules import MediaRules, Refusal

BODY = b"an image" * 100


class Handler(BaseHTTPRequestHandler):
    """Answers by the path."""

    paths: list[str] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        name, _, where = self.path[1:].partition("?")
        if name in ("to", "loop"):
            self.send_response(302)
            self.send_header("location", where or "/loop")
            self.end_headers()
        elif name == "lost":
            self.send_error(404)
        elif name == "claims":
            self.send_response(200)
            self.send_header("content-length", str(1 << 40))
            self.end_headers()
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_over:  # type: ignore[attr-defined]
                self.wfile.write(b"x" * 100_000)
        elif name == "drips":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.server.is_over:  # type: ignore[attr-defined]
                self.wfile.write(b"x")
                time.sleep(0.02)
        else:
            self.send_response(200)
            self.send_header("content-length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    Handler.paths = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.is_over = False  # type: ignore[attr-defined]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"localhost:{server.server_address[1]}"
    finally:
        server.is_over = True  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


def fetcher(*domains: str, directory: Path | None = None, seconds: float = 20.0) -> MediaFetcher:
    rules = MediaRules.of(domains, None if directory is None else str(directory))
    return MediaFetcher(rules, 10_000, seconds)


def problem(given: MediaFetcher, url: str) -> str:
    (found,) = given.fetch([url])
    assert isinstance(found, Refusal), found
    return str(found)


LOCAL = ("127.0.0.0/8", "::1/128")


def test_an_allowed_host_is_fetched_from(host: str) -> None:
    given = fetcher(host, *LOCAL)
    assert given.fetch([f"http://{host}/a", f"http://{host}/b?c=d"]) == [BODY, BODY]
    assert sorted(Handler.paths) == ["/a", "/b?c=d"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://{host}/lost", "its host answers 404"),
        ("http://{host}/claims", "has more than 10000 bytes"),
        ("http://{host}/endless", "has more than 10000 bytes"),
        (
            "http://{host}/to?http://169.254.169.254/latest/meta-data",
            "at a host that --allowed-media-domains",
        ),
        ("http://{host}/to?http://metadata.google.internal/", "at a host that --allowed-media-domains"),
        ("http://{host}/to?file:///etc/passwd", "redirects to a file|is a file URL"),
        ("http://{host}/to?gopher://{host}/", "has the scheme 'gopher'"),
        ("http://{host}/loop", "redirects more than 3 times"),
        ("http://me:secret@{host}/a", "has a user's name"),
        ("http://example.com/a.png", "at a host that --allowed-media-domains does not name"),
        ("http://{host}:99999/a", "is no valid URL"),
        ("http://localhost/a", "at a host that --allowed-media-domains does not name"),
        ("ftp://{host}/a", "has the scheme 'ftp'"),
        ("file:///etc/passwd", "need --allowed-local-media-path"),
        ("http://{host}/a b\r\nx: y", "cannot be fetched"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(host: str, url: str, expected: str) -> None:
    found = problem(fetcher(host, *LOCAL), url.format(host=host))
    assert any(each in found for each in expected.split("|")), found


def test_a_name_of_this_host_is_refused_when_it_is_connected_to(host: str) -> None:
    assert problem(fetcher(host), f"http://{host}/a") == "is at an address that is not public"
    assert not Handler.paths


def test_an_answer_of_dns_counts_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was checked is the one that is connected to."""
    answers = [[(0, 0, 0, "", ("93.184.216.34", 80))], [(0, 0, 0, "", ("127.0.0.1", 80))]]
    connected: list[Any] = []

    def connect(address: Any, _timeout: float) -> Any:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(socket, "create_connection", connect)
    assert "cannot be fetched: ConnectionRefusedError" in problem(
        fetcher("images.example"), "http://images.example/"
    )
    assert connected == [("93.184.216.34", 80)]
    assert (
        problem(fetcher("images.example"), "http://images.example/") == "is at an address that is not public"
    )
    assert len(connected) == 1


def test_a_head_that_never_ends_is_cut(host: str) -> None:
    began = time.monotonic()
    assert (
        problem(fetcher(host, *LOCAL, seconds=0.4), f"http://{host}/drips") == "was not fetched within 0.4 s"
    )
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "fe80::1%eth0", "fd00::1", "0.0.0.0", "224.0.0.1",
     "100.64.0.1", "::ffff:127.0.0.1", "::ffff:10.1.2.3"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    rules = MediaRules.of(["images.example"], None)
    with pytest.raises(Refusal, match="not public"):
        rules.check_addresses(["93.184.216.34", address])


def test_a_network_may_be_allowed() -> None:
    rules = MediaRules.of(["images.example", "10.1.0.0/16", "https.example:8443"], None)
    rules.check_addresses(["10.1.2.3", "93.184.216.34", "2606:2800:220:1::1"])
    with pytest.raises(Refusal):
        rules.check_addresses(["10.2.0.1"])
    rules.check(urlsplit_of("https://IMAGES.example./a"))
    rules.check(urlsplit_of("https://https.example:8443/a"))
    with pytest.raises(Refusal):
        rules.check(urlsplit_of("https://images.example:8443/a"))


@pytest.mark.parametrize("domain", ["https://a.example", "a.example/path", "", "me@a.example"])
def test_a_domain_is_a_name(domain: str) -> None:
    with pytest.raises(ValueError, match="give names of hosts"):
        MediaRules.of([domain], None)


def _outside(directory: Path) -> str:
    (directory.parent / "secret").write_bytes(b"s")
    return f"file://{directory}/../secret"


def _link(directory: Path) -> str:
    (directory.parent / "secret").write_bytes(b"s")
    (directory / "link").symlink_to(directory.parent / "secret")
    return f"file://{directory}/link"


@pytest.mark.parametrize(
    "url",
    [_outside, _link, lambda directory: f"file://{directory}/nothing", lambda directory: f"file://{directory}",
     lambda _: "file:///dev/zero", lambda directory: f"file://{directory}/a%00b"],
)  # fmt: skip
def test_files_beyond_the_directory_are_as_if_not_there(tmp_path: Path, url: Callable[[Path], str]) -> None:
    directory = tmp_path / "media"
    directory.mkdir()
    given = fetcher(directory=directory)
    assert problem(given, url(directory)) == "is no file below --allowed-local-media-path"


def test_files_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(BODY)
    (tmp_path / "large").write_bytes(b"x" * 10_001)
    given = fetcher(directory=tmp_path)
    assert given.fetch([f"file://{tmp_path}/a%20b.png"]) == [BODY]
    assert problem(given, f"file://{tmp_path}/large") == "has more than 10000 bytes"
    assert problem(given, "file://example.com/a.png") == "is a file URL of another host"
    assert "images are not fetched without --allowed-media-domains" in problem(given, "https://a.example/")
