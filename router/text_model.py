"""The text side of the served model: its tokenizer, its chat template, its sampling defaults."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine.checkpoint import CheckpointError, default_sampling
from router.chat_template import ChatTemplateError, ChatTemplates, load_chat_templates
from router.config import HttpConfig
from router.mesh import ServedModel
from router.tokens import Tokenizer, TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)


class TextModel:
    """All that is needed to turn requests into token ids and back."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        defaults: dict[str, Any],
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.served = served
        self.tokenizer = tokenizer
        self.templates = templates
        self.defaults = defaults
        """Sampling parameters for requests that do not set them."""
        self.template_kwargs = template_kwargs or {}
        """Variables of the chat template, likewise."""

    def __repr__(self) -> str:
        return f"<TextModel {self.name} {self.tokenizer!r} {self.templates!r}>"

    @property
    def name(self) -> str:
        return self.served.names[0]


def load_text_model(served: ServedModel, config: HttpConfig) -> TextModel:
    """Read the files of a model that concern text; takes up to a second for large vocabularies.

    Raises:
        TokenizerError, CheckpointError: files are missing or broken.
    """
    directory = Path(config.tokenizer or served.directory).expanduser()
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
        if config.chat_template is not None:
            raise TokenizerError(f"--chat-template cannot be used: {error}") from error
        logger.error("chat requests will be refused: %s", error)
        templates = ChatTemplates({})
    return TextModel(served, tokenizer, templates, _defaults(served, config), config.template_kwargs)


def _defaults(served: ServedModel, config: HttpConfig) -> dict[str, Any]:
    """``auto`` reads the model's generation_config.json, ``vllm`` none; else the directory named has it."""
    if config.generation_config == "vllm":
        return {}
    directory = served.directory if config.generation_config == "auto" else config.generation_config
    defaults = default_sampling(Path(directory).expanduser())
    for key, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"generation_config.json has {key} = {value!r}, which is no number")
    if defaults:
        logger.info("sampling defaults from the model: %s", defaults)
    return defaults
