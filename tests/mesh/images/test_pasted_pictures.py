"""A picture pasted into the page of a mesh, in a real browser."""

from __future__ import annotations

import base64
from pathlib import Path

import openai
import pytest

from tests.mesh.clients.browser import chromium
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.images.test_images import messages, png
from tests.router.app.test_chat_pictures import Chat

pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(300)]

NUM_TOKENS = 24
SAY = """
document.getElementById("chat-temperature").value = 0;
document.getElementById("chat-tokens").value = arguments[1];
document.getElementById("chat-text").value = arguments[0];
document.getElementById("chat-form").requestSubmit();
"""
ANSWER = """
const box = [...document.querySelectorAll(".said.assistant")].at(-1);
return box?.dataset.done ? box.querySelector("span").textContent : null;
"""


def test_a_pasted_picture_is_answered_by_the_mesh(tmp_path: Path) -> None:
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    ports, directory = Ports(), make_tiny_chat_model(tmp_path / "llava")
    flags = ["-dp", "2", "--served-model-name", "m", "--dtype", "float32"]
    with (
        chromium() as driver,
        serve(tmp_path / "serve.log", str(directory), *flags, *ports.head()) as command,
        openai.OpenAI(base_url=f"{ports.url}/v1", api_key="x", max_retries=0) as client,
    ):
        command.wait_for("2 instances ready")
        chat = Chat(driver)
        driver.get(f"{ports.url}/")

        def knows_the_model() -> bool:
            chat.give("paste", "a.txt", "text/plain", b"a")
            return "send PNG" in chat.problem()

        def answer(*content: str | int) -> str:
            """What the mesh says to such a message without the page."""
            found = client.chat.completions.create(
                model="m", messages=messages(*content), temperature=0, max_tokens=NUM_TOKENS
            )
            return found.choices[0].message.content or ""

        wait_until(knows_the_model, 20, "the page knows that the model sees")
        said = []
        for number in (1, 2):
            chat.run("document.getElementById('chat-new').click()")
            assert chat.give("paste", "pasted.png", "image/png", base64.b64decode(png(number)))
            wait_until(lambda: chat.shown() == 1, 10, "the picture is shown")
            chat.run(SAY, "What is this?", NUM_TOKENS)
            said.append(wait_until(lambda: chat.run(ANSWER), 30, "the mesh has answered"))
            assert said[-1] == answer(number, "What is this?")
        assert said[0] != said[1]
        assert command.stop() == 0
