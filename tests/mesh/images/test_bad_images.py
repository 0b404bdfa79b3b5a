"""Images that a model's encoder cannot take, in a mesh of worker processes."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.mesh.harness import Ports, serve

Image = pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def question(width: int) -> Any:
    """A picture of 60 rows of pixels."""
    into = io.BytesIO()
    Image.linear_gradient("L").resize((width, 60)).convert("RGB").save(into, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(into.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_an_image_that_the_encoder_refuses_costs_its_request_only(tmp_path: Path) -> None:
    """The processor of this checkpoint cuts nothing off, and its encoder takes squares only."""
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    ports, directory = Ports(), make_tiny_chat_model(tmp_path / "llava")
    path = directory / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"]["do_center_crop"] = False
    path.write_text(json.dumps(settings))
    flags = ["-tp", "2", "--served-model-name", "m", "--dtype", "float32"]
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(serve(tmp_path / "serve.log", str(directory), *flags, *ports.head()))
        command.wait_for("1 instance ready")
        command.wait_for("images are prepared by process")  # before any request
        client = stack.enter_context(openai.OpenAI(base_url=f"{ports.url}/v1", api_key="x", max_retries=0))

        def ask(width: int) -> str:
            answer = client.chat.completions.create(
                model="m", messages=question(width), temperature=0, max_tokens=8,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.choices[0].message.content or ""

        before = ask(60)
        for _ in range(2):  # nothing of it is kept
            with pytest.raises(openai.BadRequestError, match="an image cannot be encoded by this model"):
                ask(120)
        assert ask(60) == before
        assert command.stop() == 0
        assert "has ended" not in command.log
