"""The text side of the served model: its tokenizer, its chat template, its sampling defaults."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from coordinator.process.process import shortage_of
from router.config import HttpConfig
from router.images.conversation import ModelImages, images_of
from router.mesh import ServedModel
from router.text.chat_template import ChatTemplateError, ChatTemplates, load_chat_templates
from router.text.sampling_defaults import most_tokens, sampling_defaults
from router.text.tokens import Tokenizer, TokenizerError, load_tokenizer, short_digest

logger = logging.getLogger(__name__)


class TextModel:
    """Tokenizer, template and defaults that turn requests into token ids and back."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        defaults: dict[str, Any],
        template_kwargs: dict[str, Any] | None = None,
        most_tokens: int | None = None,
        images: ModelImages | None = None,
    ) -> None:
        self.served = served
        self.name = served.names[0]
        self.tokenizer = tokenizer
        self.templates = templates
        self.defaults = defaults
        """Sampling parameters for requests that do not set them."""
        self.template_kwargs = template_kwargs or {}
        """Variables of the chat template for requests that do not set them."""
        self.most_tokens = most_tokens
        """Most tokens of an answer, whatever the request asks for; None without such a limit."""
        self.images = images
        """What prepares images; None: the model takes none."""

    def __repr__(self) -> str:
        return f"<TextModel {self.name} {self.tokenizer!r} {self.templates!r}>"

    def follow(self, served: ServedModel) -> bool:
        """Take over other adapters of the same model; returns False for another model."""
        if served is self.served:
            return True
        if msgspec.structs.replace(served, adapters=self.served.adapters) != self.served:
            return False
        self.served = served
        return True

    @property
    def chat_template_digest(self) -> str:
        """Digest of the chat template and of its variables' defaults; empty without one."""
        if not self.templates.sources:
            return ""
        return short_digest(
            msgspec.json.encode((self.templates.sources, self.template_kwargs), order="sorted")
        )


def load_text_model(served: ServedModel, config: HttpConfig) -> TextModel:
    """Tokenizer, chat templates and defaults, read from a model's files.

    Takes up to a second for large vocabularies.

    Raises:
        TokenizerError, CheckpointError: files are missing or broken.
    """
    directory = Path(config.tokenizer or served.directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer.size > served.vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model only %d: some texts cannot be served",
            tokenizer.size,
            served.vocab_size,
        )
    try:
        templates = load_chat_templates(directory, tokenizer, config.chat_template)
    except ChatTemplateError as error:
        if config.chat_template is not None or shortage_of(error) is not None:
            raise TokenizerError(f"--chat-template cannot be used: {error}") from error
        logger.error("chat requests will be refused: %s", error)
        templates = ChatTemplates({}, str(error))
    defaults = sampling_defaults(config, served.directory)
    if defaults:
        logger.info("sampling defaults: %s", defaults)
    most = most_tokens(config, defaults)
    images = images_of(Path(served.directory), config)
    return TextModel(served, tokenizer, templates, defaults, config.template_kwargs, most, images)
