"""A mesh of two instances whose model takes images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai

from tests.mesh.harness import Command, Ports, serve


class ImageMesh(NamedTuple):
    """What serves, the directory of its model, and a client."""

    command: Command
    directory: Path
    url: str
    client: openai.OpenAI


@contextlib.contextmanager
def two_instances(tmp_path: Path) -> Iterator[ImageMesh]:
    """The model is called ``m``."""
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    ports, directory = Ports(), make_tiny_chat_model(tmp_path / "llava")
    flags = ["-dp", "2", "--served-model-name", "m", "--dtype", "float32", "--enable-prompt-tokens-details"]
    with (
        serve(tmp_path / "serve.log", str(directory), *flags, *ports.head()) as command,
        openai.OpenAI(base_url=f"{ports.url}/v1", api_key="x", max_retries=0) as client,
    ):
        command.wait_for("2 instances ready")
        yield ImageMesh(command, directory, ports.url, client)
