"""Pictures in the page's chat, in a real browser: pasted, dropped, chosen, removed, sent, refused."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.mesh import ServedModel
from tests.coordinator.membership.test_registry import SETTINGS
from tests.mesh.clients.browser import chromium
from tests.router.app.test_dashboard import dashboard_served
from tests.waiting import until

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"

KEEP_BODIES = """
window.sent = [];
const real = window.fetch;
window.fetch = (path, options) => {
  if (path !== "v1/chat/completions") return real(path, options);
  window.sent.push(options.body);
  const refusal = JSON.stringify({ error: { message: "is no picture" } });
  if (window.refuses) return Promise.resolve(new Response(refusal, { status: 400 }));
  const event = JSON.stringify({ choices: [{ index: 0, delta: { content: "Seen." } }] });
  return Promise.resolve(new Response(`data: ${event}\\n\\ndata: [DONE]\\n\\n`));
};
"""
GIVE = """
const [how, name, kind, data, text] = arguments;
const given = new DataTransfer();
const bytes = typeof data === "number" ? new Uint8Array(data) : Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
given.items.add(new File([bytes], name, { type: kind }));
if (text) given.setData("text/plain", text);
const area = document.getElementById("chat-text"), more = { bubbles: true, cancelable: true };
const event = how === "paste" ? new ClipboardEvent("paste", { clipboardData: given, ...more })
  : new DragEvent("drop", { dataTransfer: given, ...more });
return !area.dispatchEvent(event);
"""


class Chat:
    """The chat of the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def give(self, how: str, name: str, kind: str, data: bytes | int, text: str = "") -> bool:
        """Paste or drop a file, or so many zeros; whether the page took the event."""
        sent = data if isinstance(data, int) else base64.b64encode(data).decode()
        return bool(self.run(GIVE, how, name, kind, sent, text))

    def shown(self) -> int:
        """Pictures that would go with the next message."""
        return int(self.run("return document.querySelectorAll('#chat-pictures img').length"))

    def problem(self) -> str:
        script = "const p = document.getElementById('chat-problem'); return p.hidden ? '' : p.textContent"
        return str(self.run(script))

    def say(self, text: str) -> Any:
        """Send a message; the body of the request."""
        before = self.run("return window.sent.length")
        self.run(
            "document.getElementById('chat-text').value = arguments[0];"
            "document.getElementById('chat-form').requestSubmit()",
            text,
        )
        until(lambda: self.run("return window.sent.length") == before + 1)
        until(lambda: self.run("return document.getElementById('chat-send').textContent") == "Send")
        return json.loads(self.run("return window.sent.at(-1)"))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as found:
        yield found


@contextlib.contextmanager
def page_of(driver: Any, url: str, sees: bool) -> Iterator[Chat]:
    """The page, once it knows its model; the browser leaves it in the end."""
    chat = Chat(driver)
    wanted = "send PNG, JPEG, WebP, GIF" if sees else "takes text only"

    def has_looked() -> bool:
        chat.give("paste", "a.txt", "text/plain", b"a")
        return wanted in chat.problem()

    try:
        driver.get(f"{url}/")
        chat.run(KEEP_BODIES)
        until(has_looked)
        assert chat.run("return document.getElementById('chat-picture').hidden") is not sees
        yield chat
    finally:
        driver.get("about:blank")


def model_of(directory: Path, **config: object) -> ServedModel:
    (directory / "config.json").write_text(json.dumps(config))
    return ServedModel(SETTINGS.served_model_name, str(directory), vocab_size=300, max_model_len=100)


def test_pictures_go_with_a_message(driver: Any, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with dashboard_served(model_of(tmp_path, model_type="llava", image_token_id=5)) as (client, _):
        assert client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
        with page_of(driver, str(client.base_url).rstrip("/"), sees=True) as chat:
            # Pasted, dropped and chosen; one is removed.
            assert chat.give("paste", "pasted.png", "image/png", PNG)
            assert chat.give("drop", "dropped.png", "image/png", PNG)
            file = tmp_path / "chosen.png"
            file.write_bytes(PNG)
            driver.find_element("id", "chat-files").send_keys(str(file))
            until(lambda: chat.shown() == 3)
            assert chat.problem() == ""
            chat.run("document.querySelector('#chat-pictures button').click()")
            assert chat.shown() == 2
            picture = {"type": "image_url", "image_url": {"url": URL}}
            first = {"role": "user", "content": [picture, picture, {"type": "text", "text": "What is this?"}]}
            assert chat.say("What is this?")["messages"] == [first]
            assert chat.shown() == 0
            assert chat.run("return document.querySelectorAll('.said.user img').length") == 2

            # The next message has none of its own; the conversation keeps those of the first.
            before = [first, {"role": "assistant", "content": "Seen."}]
            assert chat.say("And?")["messages"] == [*before, {"role": "user", "content": "And?"}]

            # What cannot be sent is named; text beside a picture is what was copied.
            for name, kind, data, problem in (
                ("a.bmp", "image/bmp", PNG, "a.bmp is image/bmp: send PNG, JPEG, WebP, GIF."),
                ("none.png", "image/png", b"", "none.png is empty."),
                (
                    "big.png",
                    "image/png",
                    6 << 20,
                    "big.png has 6.0 MiB, more than the 5 MiB that a conversation",
                ),
            ):
                assert chat.give("paste", name, kind, data)
                assert problem in chat.problem()
            assert chat.give("paste", "half.png", "image/png", 3 << 20)
            assert chat.give("paste", "half.png", "image/png", 3 << 20)
            assert "this conversation has more than 5 MiB of pictures" in chat.problem()
            assert not chat.give("paste", "cells.png", "image/png", PNG, text="1 2 3")
            chat.run("document.getElementById('chat-new').click()")
            assert (chat.shown(), chat.problem()) == (0, "")

            # A picture that the mesh refuses leaves the conversation; it may have no text.
            chat.run("window.refuses = true")
            assert chat.give("paste", "odd.png", "image/png", PNG)
            until(lambda: chat.shown() == 1)
            assert chat.say("")["messages"] == [{"role": "user", "content": [picture]}]
            assert "is no picture" in chat.run("return document.querySelector('.said.problem').textContent")
            chat.run("window.refuses = false")
            assert chat.say("Hello")["messages"] == [{"role": "user", "content": "Hello"}]
            wrong = [entry for entry in driver.get_log("browser") if "Content Security" in entry["message"]]
            assert wrong == []


def test_a_model_that_takes_text_only(driver: Any, tmp_path: Path) -> None:
    with dashboard_served(model_of(tmp_path, model_type="llama")) as (client, _):
        assert client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]
        with page_of(driver, str(client.base_url).rstrip("/"), sees=False) as chat:
            assert chat.give("paste", "a.png", "image/png", PNG)
            assert chat.problem() == f"{SETTINGS.served_model_name[0]} takes text only."
            assert chat.say("Hello")["messages"] == [{"role": "user", "content": "Hello"}]
