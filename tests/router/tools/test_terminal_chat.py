"""What ``lockstep chat`` makes of the streams of other servers."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest

from coordinator.settings import flags
from router.launcher.endpoint_config import EndpointConfig
from router.tools.api_client import ServerError
from router.tools.bench.client import model_name, session
from router.tools.bench.settings import parse_args
from router.tools.terminal_chat import ChatConfig, Conversation


class Elsewhere(BaseHTTPRequestHandler):
    """Answers everything with the same lines."""

    lines: tuple[str, ...] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(f"data: {line}\n\n" for line in self.lines).encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Conversation(ChatConfig(url=f"http://127.0.0.1:{server.server_address[1]}/v1"))
        server.shutdown()
        thread.join()


def test_chunks_without_words_are_no_errors(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        '{"choices": [{"delta": null}]}',
        '{"choices": null, "error": null}',
        '{"choices": [{"delta": {"content": "Hi"}}]}',
        "[DONE]",
    )
    monkeypatch.setattr(Elsewhere, "lines", lines)
    assert list(conversation.ask("Hello")) == ["Hi"]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_loopback_is_not_asked_through_a_proxy(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A proxy could not reach it, as the proxy's loopback is another one."""
    monkeypatch.setattr(Elsewhere, "lines", ('{"choices": [{"delta": {"content": "Hi"}}]}', "[DONE]"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert list(conversation.ask("Hello")) == ["Hi"]


def test_other_hosts_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        monkeypatch.setattr(Elsewhere, "lines", ('{"choices": [{"delta": {"content": "Hi"}}]}', "[DONE]"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        assert list(Conversation(ChatConfig(url="http://mesh.example/v1")).ask("Hello")) == ["Hi"]
        proxy.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"error": "out of memory"}', "out of memory"),
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"error": {"code": 500}}', "the server reports an error"),
        ("[1]", "does not answer as OpenAI's API does"),
    ],
)
def test_errors_are_told_in_whatever_form(
    line: str, said: str, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "lines", (line,))
    with pytest.raises(ServerError, match=said):
        list(conversation.ask("Hello"))


def test_the_model_of_a_meshs_file_is_no_name_that_clients_use(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("model-name: emma\nmodel: /models/austen\nserved-model-name: emma\napi-key: 0123\n")
    config = flags.parse(
        ChatConfig, ["--config", str(file)], prog="lockstep chat", description="", shares_file=True
    )
    assert (config.model_name, config.endpoint.api_key) == ("emma", ("0123",))


class Models(BaseHTTPRequestHandler):
    """Server that lists one model to clients with the key."""

    def do_GET(self) -> None:
        ours = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if ours else 401)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}' if ours else b"{}")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def settings(certificate: tuple[str, str], tmp_path: Path) -> Iterator[str]:
    """Settings file of a server with HTTPS, on all addresses, that wants a key."""
    key, chain = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        file = tmp_path / "mesh.yaml"
        file.write_text(
            f"model: m\nhost: 0.0.0.0\nport: {server.server_address[1]}\nssl-keyfile: {key}\n"
            f"ssl-certfile: {chain}\nroot-path: /behind\napi-key: [secret, other]\n"
        )
        yield str(file)
        server.shutdown()
        thread.join()


def test_the_settings_file_of_serve_says_where_and_with_what_key(settings: str) -> None:
    config = flags.parse(ChatConfig, ["--config", settings], prog="chat", description="", shares_file=True)
    conversation = Conversation(config)
    conversation.connect()
    assert conversation.model == "m"
    assert conversation.url.startswith("https://127.0.0.1:")


def test_bench_takes_the_same_file(settings: str) -> None:
    async def model() -> str:
        args = parse_args(["--config", settings])
        async with session(args.header, key=args.key, trust=args.endpoint_config.trust()) as http:
            return await model_name(http, args.base_url, 0)

    assert asyncio.run(model()) == "m"


def test_flags_win_over_the_file(settings: str) -> None:
    argv = ["--config", settings, "--host", "10.0.0.1", "--port", "7"]
    config = flags.parse(ChatConfig, argv, prog="chat", description="", shares_file=True)
    assert Conversation(config).url == "https://10.0.0.1:7/v1"
    assert parse_args(argv).base_url == "https://10.0.0.1:7"
    argv = ["--config", settings, "--url", "http://x"]
    config = flags.parse(ChatConfig, argv, prog="chat", description="", shares_file=True)
    assert Conversation(config).url == "http://x"


def test_a_certificate_that_is_none_is_said(tmp_path: Path) -> None:
    config = ChatConfig(endpoint=EndpointConfig(ssl_certfile=str(tmp_path / "none.pem")))
    with pytest.raises(ServerError, match="--ssl-certfile cannot be used: No such file"):
        Conversation(config).connect()
