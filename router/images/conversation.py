"""Prompt of a conversation with images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.model.model_files import read_json
from engine.prompt_images import PromptImage, image_token
from router.config import HttpConfig
from router.errors import refuse
from router.images.messages import Prepared
from router.images.parts import has_images, take_images
from router.images.placing import images_in, with_images
from router.images.preparation import ImagePreparation


@dataclass(frozen=True)
class ModelImages:
    """Images of a model that takes some."""

    preparation: ImagePreparation
    placeholder: int
    """Token that stands for a row of an image."""
    most: int
    """Images of a request."""

    def take(self, messages: Sequence[Any]) -> tuple[list[Any], list[Prepared]]:
        """The messages with places for images, and these, prepared; blocks until they are.

        Raises:
            ApiError: one cannot be taken.
        """
        taken, sent = take_images(messages, self.most)
        return taken, [self.preparation.prepare(each) for each in sent]

    @property
    def mark(self) -> str:
        """Text that stands for an image in a prompt."""
        self.preparation.open()
        return self.preparation.mark

    def place(self, text: str, prepared: Sequence[Prepared]) -> str:
        """The prompt's text with what stands for each image."""
        return with_images(text, self.mark, prepared)

    def find(self, ids: Sequence[int], prepared: Sequence[Prepared]) -> tuple[PromptImage, ...]:
        """The images by their places in the prompt's tokens."""
        return images_in(ids, self.placeholder, self.preparation.placeholder, prepared)


def images_of(directory: Path, config: HttpConfig) -> ModelImages | None:
    """What prepares images for a model; None: it takes none, or they are switched off."""
    placeholder = image_token(read_json(directory / "config.json"))
    if placeholder is None or not config.most_images:
        return None
    preparation = ImagePreparation(directory, config.max_image_pixels)
    return ModelImages(preparation, placeholder, config.most_images)


def taken_by(
    images: ModelImages | None, messages: Sequence[Any], render: Callable[[Sequence[Any]], str]
) -> tuple[str, list[Prepared]]:
    """The text of a conversation's prompt, and its images.

    ``render``: writes messages by the chat template.

    Raises:
        ApiError: one cannot be taken.
    """
    if images is None or not has_images(messages):
        return render(messages), []  # which refuses what is no text
    if find_spec("PIL") is None:
        refuse("Images need Pillow here: pip install 'lockstep-mesh[images]' on the router.", "messages")
    taken, prepared = images.take(messages)
    return images.place(render(taken), prepared), prepared
