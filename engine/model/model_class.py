"""The transformers class that a checkpoint is loaded into, and its configuration.

What cannot be served is refused here, by the name of what is missing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.config import ModelConfig
from engine.model.checkpoint import CheckpointError, ModelInfo, format_of_weights
from engine.model.errors import first_line
from engine.model.model_sources import (
    ENCODER,
    LAYER_TYPES,
    is_known,
    why_another_head,
    why_layers_unsupported,
    why_no_language_model,
)
from engine.model.quantization.formats import online_format
from engine.model.quantization.view import log_format
from engine.model.text_parts import class_with_head, read_as_whole

logger = logging.getLogger(__name__)


def class_of(info: ModelInfo, settings: ModelConfig) -> tuple[Any, Any, bool]:
    """The class to load, its config, and whether it is a larger model's language part.

    The config asks for no quantisation: codes are widened while they are read.

    Raises:
        CheckpointError: the model cannot be served.
    """
    config = _read_config(info, settings)
    model_class, config, is_part = _model_class(info, config, settings.trust_remote_code)
    _check_supported(info, config)
    _take_quantization_out(info, settings, config)
    return model_class, config, is_part


def _read_config(info: ModelInfo, settings: ModelConfig) -> Any:
    own_code = settings.trust_remote_code and not is_known(info.model_type)
    try:
        return AutoConfig.from_pretrained(info.directory, trust_remote_code=own_code, local_files_only=True)
    except Exception as error:  # whatever its config.json may do to transformers' code
        raise CheckpointError(
            f"{info.architecture}: this version of transformers has no model type {info.model_type!r} "
            f"(or cannot read its config.json). Upgrade transformers, or pass --trust-remote-code if the "
            f"checkpoint brings its own code. transformers says: {first_line(error)}"
        ) from error


def _model_class(info: ModelInfo, config: Any, trust_remote_code: bool) -> tuple[Any, Any, bool]:
    """The class to load, its config, and whether it is a larger model's language part.

    The code of a checkpoint is run only where transformers has none for its family.
    """
    text_config = config.get_text_config(decoder=True)
    is_part = text_config is not config
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if found is None and is_part:
        found = class_with_head(text_config, config.model_type)
    brings_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if found is None and brings_code and trust_remote_code:
        return AutoModelForCausalLM, config, False
    if found is None:
        raise CheckpointError(f"{info.architecture} {why_no_language_model(text_config.model_type)}")
    if brings_code and trust_remote_code:
        logger.info(
            "--trust-remote-code: %s is transformers' own, the checkpoint's is not run", found.__name__
        )
    if is_part:
        text_config.tie_word_embeddings = config.tie_word_embeddings
        read_as_whole(found, text_config.model_type, config.model_type)
    elif problem := why_another_head(info.architecture, found.__name__):
        raise CheckpointError(f"{info.architecture} {problem}")
    return found, text_config, is_part


def _check_supported(info: ModelInfo, config: Any) -> None:
    name = info.architecture
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} {ENCODER}")
    types = {each for field in LAYER_TYPES for each in getattr(config, field, None) or ()}
    if problem := why_layers_unsupported(types):
        raise CheckpointError(f"{name} {problem}")


def _take_quantization_out(info: ModelInfo, settings: ModelConfig, config: Any) -> None:
    """Let transformers see plain weights, where quantised ones are widened while they are read."""
    form = format_of_weights(Path(info.directory))
    if form is None:
        if settings.online is not None:
            log_format(online_format(settings.online))
        return
    log_format(form)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
