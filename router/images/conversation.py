"""Prompt of a conversation with images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.model.errors import CheckpointError
from engine.model.model_files import read_json
from engine.prompt_images import PromptImage, image_token
from router.config import HttpConfig
from router.errors import refuse
from router.http.large_bodies import elsewhere
from router.images.fetching import MediaFetcher
from router.images.messages import Prepared
from router.images.parts import SentImage, has_images, take_images
from router.images.placing import check_size, for_request, images_in, with_images
from router.images.preparation import ImagePreparation
from router.media_rules import Refusal


@dataclass(frozen=True)
class ModelImages:
    """Images of a model that takes some."""

    preparation: ImagePreparation
    placeholder: int
    """Token that stands for a row of an image."""
    most: int
    """Images of a request."""
    fetcher: MediaFetcher
    most_pixels: int
    """Pixels of an image."""

    def take(self, messages: Sequence[Any]) -> tuple[list[Any], list[Prepared]]:
        """The messages with places for images, and these, prepared; blocks until they are.

        Raises:
            ApiError: one cannot be taken.
        """
        taken, sent = take_images(messages, self.most)
        with elsewhere():
            prepared = for_request([self.preparation.prepare(each) for each in self._fetched(sent)])
        check_size(prepared)
        return taken, prepared

    def _fetched(self, sent: Sequence[SentImage]) -> list[SentImage]:
        """The same images with those at URLs fetched."""
        wanted = list(dict.fromkeys(each.url for each in sent if each.url))
        found = dict(zip(wanted, self.fetcher.fetch(wanted), strict=True))
        for each in sent:
            if isinstance(refusal := found.get(each.url), Refusal):
                refuse(f"{each.path} {refusal}.", each.path)
        return [replace(each, data=data) if (data := found.get(each.url)) else each for each in sent]  # type: ignore[arg-type]

    def place(self, text: str, prepared: Sequence[Prepared]) -> str:
        """The prompt's text with what stands for each image.

        It never waits for the process: the mark is known once an image is prepared.
        """
        return with_images(text, self.preparation.mark, prepared)

    def find(self, ids: Sequence[int], prepared: Sequence[Prepared]) -> tuple[PromptImage, ...]:
        """The images by their places in the prompt's tokens."""
        return images_in(ids, self.placeholder, self.preparation.placeholder, prepared)


def takes_images(directory: Path, config: HttpConfig) -> bool:
    """Whether images are prepared for a model here."""
    try:
        placeholder = image_token(read_json(directory / "config.json"))
    except CheckpointError:  # logged when its tokenizer is read
        return False
    return placeholder is not None and config.most_images > 0 and find_spec("PIL") is not None


def images_of(directory: Path, config: HttpConfig) -> ModelImages | None:
    """What prepares images for a model; None: it takes none, or they are switched off."""
    placeholder = image_token(read_json(directory / "config.json"))
    if placeholder is None or not config.most_images:
        return None
    preparation = ImagePreparation(directory, config.max_image_pixels)
    fetcher = MediaFetcher(config.media_rules, config.max_request_bytes)
    return ModelImages(preparation, placeholder, config.most_images, fetcher, config.max_image_pixels)


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
