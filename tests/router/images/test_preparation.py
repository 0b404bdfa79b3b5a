"""The process that prepares images, with a tiny model's processor."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from router.errors import ApiError
from router.images.parts import SentImage
from router.images.preparation import ImagePreparation
from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

Image = pytest.importorskip("PIL.Image")


def png(colour: str) -> SentImage:
    into = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(into, "PNG")
    return SentImage(into.getvalue(), "messages[0].content[0]")


@pytest.mark.each_push
def test_a_killed_process_costs_no_image(tmp_path: Path) -> None:
    preparation = ImagePreparation(make_tiny_chat_model(tmp_path / "model"), 1 << 20)
    try:
        first = preparation.prepare(png("red"))
        assert preparation.prepare(png("red")) is first, "it was kept"
        assert preparation._child is not None
        preparation._child.kill()  # at once: nobody has noticed
        assert preparation.prepare(png("blue")).digest != first.digest
        with pytest.raises(ApiError, match="in none of the formats"):
            preparation.prepare(SentImage(b"text", "messages[0].content[0]"))
    finally:
        preparation.close()
