"""Text side of the mesh's model, loaded by name at its first use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.process.process import shortage_of
from engine.model.checkpoint import CheckpointError
from router.config import HttpConfig
from router.errors import ApiError, short_of
from router.images.conversation import takes_images
from router.mesh import Mesh, ServedModel
from router.text.sampling_defaults import sampling_defaults
from router.text.text_model import TextModel, load_text_model
from router.text.tokens import TokenizerError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""Seconds between two looks for the mesh's model."""


class TextModels:
    """The text side of the mesh's only model, loaded when it is first asked for."""

    def __init__(self, mesh: Mesh, config: HttpConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._loaded: TextModel | None = None
        self._loading = asyncio.Lock()
        self._takes_images: tuple[str, bool] | None = None
        """Directory that was looked at, and whether images of its model are taken."""

    def __repr__(self) -> str:
        return f"<TextModels {self._loaded!r}>"

    def served(self, name: str | None = None) -> ServedModel:
        """Facts about the model that the mesh serves, checked against a requested name.

        Raises:
            ApiError: there is none yet (503), or it does not go by this name (404).
        """
        served = self._mesh.model
        if served is None:
            raise ApiError(503, "No instance has joined the mesh yet.", headers={"retry-after": "1"})
        if name and not served.knows(name):
            raise no_such_model(name)
        return served

    async def get(self, name: str | None) -> TextModel:
        """The text side of the mesh's model.

        Raises:
            ApiError: as :meth:`served`, or its tokenizer cannot be used (500), or not now (503).
        """
        served = self.served(name)
        if self._loaded is None or not self._loaded.follow(served):
            async with self._loading:
                if self._loaded is None or not self._loaded.follow(served):
                    self._loaded = await self._load(served)
        return self._loaded

    async def defaults(self) -> tuple[str, Mapping[str, Any]]:
        """Name and sampling defaults of the mesh's model, for which its tokenizer is not loaded.

        Raises:
            ApiError: there is none yet (503).
            CheckpointError, OSError: the defaults cannot be read.
        """
        served = self.served()
        if self._loaded is not None and self._loaded.follow(served):
            return served.names[0], self._loaded.defaults
        return served.names[0], await asyncio.to_thread(sampling_defaults, self._config, served.directory)

    def take_images(self, served: ServedModel) -> bool:
        """Whether requests may have images; reads the model's config.json at the first call."""
        if self._takes_images is None or self._takes_images[0] != served.directory:
            takes = served.pooling is None and takes_images(Path(served.directory), self._config)
            self._takes_images = served.directory, takes
        return self._takes_images[1]

    async def open_images(self) -> None:
        """Start what prepares images as soon as the mesh has a model that takes some."""
        while (served := self._mesh.model) is None:  # noqa: ASYNC110 (a model is no event)
            await asyncio.sleep(LOOK_SECONDS)
        if not self.take_images(served):
            return
        try:
            if (images := (await self.get(None)).images) is not None:
                await asyncio.to_thread(images.preparation.open)
        except ApiError as error:
            logger.warning("images are not prepared yet: %s", error)

    async def _load(self, served: ServedModel) -> TextModel:
        try:
            return await asyncio.to_thread(load_text_model, served, self._config)
        except (TokenizerError, CheckpointError, OSError) as error:
            if (shortage := shortage_of(error)) is not None:
                logger.error("the text files of %s cannot be read now: %s", served.names[0], shortage)
                raise short_of(error) from error
            logger.error("the text files of %s cannot be used: %s", served.names[0], error)
            raise ApiError(
                500,
                "The tokenizer, the chat template or the sampling defaults of the model cannot be used; "
                "the router's log says why.",
                headers={"x-should-retry": "false"},
            ) from error


def no_such_model(name: str) -> ApiError:
    return ApiError(404, f"The model `{name[:100]}` does not exist.", param="model")
