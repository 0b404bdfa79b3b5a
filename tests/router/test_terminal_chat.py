"""What ``lockstep chat`` makes of the streams of other servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from coordinator import flags
from router.terminal_chat import ChatConfig, ChatError, Conversation


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
    with pytest.raises(ChatError, match=said):
        list(conversation.ask("Hello"))


def test_the_model_of_a_meshs_file_is_no_name_that_clients_use(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("model-name: emma\nmodel: /models/austen\nserved-model-name: emma\napi-key: 0123\n")
    config = flags.parse(
        ChatConfig, ["--config", str(file)], prog="lockstep chat", description="", shares_file=True
    )
    assert (config.model_name, config.api_key) == ("emma", ("0123",))
