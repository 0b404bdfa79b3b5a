"""Hostile images and URLs sent to a mesh: each a 400 that names its part."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.mesh.harness import Ports, serve
from tests.mesh.images.test_images import png

pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

NIGHTLY = os.environ.get("LOCKSTEP_NIGHTLY") == "1"
NUM_BOMBS = 200 if NIGHTLY else 7
MOST_GROWTH = 200 << 20
QUESTION = {"type": "text", "text": "What is this?"}
NUM_TOKENS = 400


class Host(BaseHTTPRequestHandler):
    """A host of images: one is there, one is elsewhere, one never ends."""

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):  # the router has hung up
            if self.path == "/good.png":
                self._send(200, base64.b64decode(png(1)))
            elif self.path == "/metadata":
                self._send(302, b"", location="http://169.254.169.254/latest/meta-data/")
            elif self.path == "/endless":
                self.send_response(200)
                self.end_headers()
                while True:
                    self.wfile.write(b"\0")
                    time.sleep(0.2)

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def image_host() -> Iterator[str]:
    """Address of a host of images."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "model": "m",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [QUESTION, *parts]}],
        **more,
    }


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def resident(router: psutil.Process) -> int:
    """Bytes of the router and of what it started."""
    return sum(each.memory_info().rss for each in [router, *router.children(recursive=True)])


def slow_url(ask: Callable[[dict[str, Any]], httpx2.Response], url: str, threads: ThreadPoolExecutor) -> None:
    """A large body waits for a URL, and another one is answered meanwhile."""
    large, began = " " * (2 << 20), time.monotonic()
    slow = threads.submit(ask, chat(url, user=large))
    time.sleep(0.5)  # it has begun to wait
    other = ask(chat(data_url(base64.b64decode(png(2))), user=large))
    assert other.status_code == 200, other.text
    assert not slow.done(), "the large body waited for the slow one"
    assert (slow.result().status_code, "messages[0].content[1]" in slow.result().text) == (400, True)
    assert 9 < time.monotonic() - began < 30


def test_bombs_and_urls_over_http(tmp_path: Path) -> None:
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model
    from tests.router.images.test_hostile import REFUSED, TAKEN

    ports, directory = Ports(), make_tiny_chat_model(tmp_path / "llava")
    flags = ["-dp", "1", "--served-model-name", "m", "--dtype", "float32", "--seed", "0"]
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(image_host())
        flags += ["--allowed-media-domains", host, "127.0.0.1"]
        command = stack.enter_context(serve(tmp_path / "serve.log", str(directory), *flags, *ports.head()))
        command.wait_for("1 instance ready")
        command.wait_for("images are prepared by process")
        http = stack.enter_context(httpx2.Client(base_url=ports.url, timeout=120))
        threads = stack.enter_context(ThreadPoolExecutor(4))

        def ask(body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx2.Response:
            return http.post(path, json=body)

        def refused(body: dict[str, Any], words: str, path: str = "/v1/chat/completions") -> None:
            answer = ask(body, path)
            assert answer.status_code == 400, answer.text
            assert words in answer.text, (words, answer.text)

        text: dict[str, Any] = {"model": "m", "prompt": "Once", "max_tokens": NUM_TOKENS, "temperature": 0}
        text["ignore_eos"] = True

        def stream() -> str:
            with http.stream("POST", "/v1/completions", json={**text, "stream": True}) as answer:
                return "".join(answer.iter_text()).replace(" ", "")

        def tokens_of(events: str) -> list[str]:
            return [
                line.partition('"text":')[2].split(",")[0]
                for line in events.splitlines()
                if '"text":' in line
            ]

        undisturbed = tokens_of(stream())
        bombs = {name: make() for name, make in REFUSED.items()}
        for data in [
            *bombs.values(),
            *(make() for make in TAKEN.values() if NIGHTLY),
        ]:  # caches are full, too
            ask(chat(data_url(data)))
        router = psutil.Process(command.child("Router").pid)
        before = resident(router)

        # ---- bombs, and a stream beside them
        beside = threads.submit(stream)
        names = [*bombs]

        def send(number: int) -> None:
            data = bombs[names[number % len(names)]] + number.to_bytes(4, "little")
            refused(chat(data_url(base64.b64decode(png(1))), data_url(data)), "messages[0].content[2]")

        for each in [threads.submit(send, number) for number in range(NUM_BOMBS)]:
            each.result()
        assert tokens_of(beside.result()) == undisturbed
        assert len(undisturbed) >= NUM_TOKENS // 2
        assert resident(router) - before < MOST_GROWTH

        # ---- paths of parts as each API's clients know them
        bad, block = data_url(bombs["text"]), base64.b64encode(bombs["text"]).decode()
        image = {"type": "input_image", "image_url": bad}
        items = [{"role": "user", "content": [image]}]
        refused(
            {"model": "m", "instructions": "Look.", "input": items}, "input[0].content[0]", "/v1/responses"
        )
        call = {"type": "function_call", "call_id": "1", "name": "see", "arguments": "{}"}
        output = {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "a"}, image],
        }
        refused({"model": "m", "input": [call, output]}, "input[1].output[1]", "/v1/responses")
        source = {"type": "base64", "media_type": "image/png", "data": block}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
        turn = {
            "model": "m",
            "max_tokens": 4,
            "system": "Look.",
            "messages": [{"role": "user", "content": [result]}],
        }
        refused(turn, "messages[0].content[0].content[0]", "/v1/messages")
        seen = {"model": "m", "messages": [{"role": "user", "content": "a", "images": [png(1), block]}]}
        refused(seen, "messages[0].images[1]", "/api/chat")
        refused({"model": "m", "prompt": "a", "images": [block]}, "images[0]", "/api/generate")
        low = [
            {"type": "image_url", "image_url": {"url": data_url(base64.b64decode(png(1))), "detail": "low"}}
        ]
        refused({"model": "m", "messages": [{"role": "user", "content": low}]}, "messages[0].content[0]")
        refused(chat(mm_processor_kwargs={"do_resize": False}), "mm_processor_kwargs")
        refused(chat(*[data_url(base64.b64decode(png(1)))] * 17), "messages[0].content[17] is one image more")

        # ---- Ollama's images are those of a chat
        ours = ask(chat(max_tokens=8, temperature=0) | {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data_url(base64.b64decode(png(1)))}}, QUESTION]}]})  # fmt: skip
        options = {"temperature": 0, "num_predict": 8}
        asked = {"model": "m", "stream": False, "options": options}
        found = ask(
            asked | {"messages": [{"role": "user", "content": QUESTION["text"], "images": [png(1)]}]},
            "/api/chat",
        )
        assert found.json()["message"]["content"] == ours.json()["choices"][0]["message"]["content"]
        found = ask(asked | {"prompt": QUESTION["text"], "images": [png(1)]}, "/api/generate")
        assert found.json()["response"] == ours.json()["choices"][0]["message"]["content"]
        assert "vision" in ask({"model": "m"}, "/api/show").json()["capabilities"]

        # ---- URLs: what is at a slow one holds no other large body
        assert ask(chat(f"http://{host}/good.png")).status_code == 200
        refused(chat(f"http://{host}/metadata"), "messages[0].content[1]")
        if NIGHTLY:
            slow_url(ask, f"http://{host}/endless", threads)
        assert command.stop() == 0
        assert "Traceback" not in command.log
