"""Whether a checkpoint is a pooling model, and what it answers with (pure).

As vLLM decides it: flags first, then the files of sentence-transformers, then the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from coordinator.pooled_model import PooledModel, PoolingTask
from engine.config.pooling import PoolerSettings, PoolingConfig
from engine.model.checkpoint import ModelInfo
from engine.model.errors import CheckpointError
from engine.model.model_files import read_json, readable_errors
from engine.model.model_sources import config_defaults, has_language_model, language_config, why_not_served
from engine.pooling.sentence_files import SentenceModel, read_sentence_files

OFFSET_POSITIONS = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "mpnet", "data2vec-text",
    "ibert", "esm", "longformer",
})  # fmt: skip
"""Model types whose first position is behind that of the padding token."""
DECODER = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
SEQUENCE = "ForSequenceClassification"
TOKENS = "ForTokenClassification"
POOLS = re.compile(rf"({SEQUENCE}|{TOKENS}|ForMaskedLM|RewardModel|(?<!LMHead)Model)$")
ANSWERS = ("no", "yes")
"""Tokens with which Qwen's rerankers answer."""
IDENTITY = "Identity"


@readable_errors()
def find_pooling(directory: Path, config: PoolingConfig) -> PooledModel | None:
    """What a checkpoint answers with in place of tokens; None: it generates text.

    Raises:
        CheckpointError: it cannot do what is asked for.
    """
    if config.runner == "generate":
        return None
    settings = read_json(directory / "config.json", required=True)
    architecture = str(next(iter(settings.get("architectures") or ()), ""))
    sentence = read_sentence_files(directory)
    is_plain = not config.asks_for_pooling and not sentence.is_given
    if is_plain and not (POOLS.search(architecture) and why_not_served(settings)):
        return None
    return _found(settings, architecture, sentence, config)


def as_pooling(info: ModelInfo, pooled: PooledModel | None) -> ModelInfo:
    """Facts of a checkpoint that is served as a pooling model, with its longest input."""
    if pooled is None:
        return info
    settings = language_config(read_json(Path(info.directory) / "config.json", required=True))
    longest = info.context_length
    if info.model_type in OFFSET_POSITIONS:
        padding = settings.get("pad_token_id", config_defaults(info.model_type).get("pad_token_id"))
        longest -= 1 + (padding if isinstance(padding, int) else 1)
    asked = read_sentence_files(Path(info.directory)).max_tokens
    return msgspec.structs.replace(
        info, pooling=pooled, context_length=min(longest, asked) if asked else longest, num_experts=0
    )


def _found(
    settings: Mapping[str, Any], architecture: str, sentence: SentenceModel, config: PoolingConfig
) -> PooledModel:
    text = language_config(dict(settings))
    defaults = config_defaults(str(text.get("model_type", "")))
    convert, pooler = _convert(architecture, config), config.pooler
    width = text.get("hidden_size", defaults.get("hidden_size") or text.get("d_model") or text.get("dim"))
    if not isinstance(width, int):
        raise CheckpointError(f"{architecture}: config.json names no hidden_size")
    segments = text.get("type_vocab_size", defaults.get("type_vocab_size"))
    has_segments = isinstance(segments, int) and segments > 1
    pooling = (pooler.pooling_type or sentence.pooling).lower()
    if not pooling:  # as vLLM
        pooling = "last" if _is_decoder(architecture, str(text.get("model_type", "")), defaults) else "cls"
    if convert == "embed":
        return _embedder(text, sentence, pooler, width, pooling, has_segments=has_segments)
    answers = pooler.answer_tokens or ANSWERS if DECODER.search(architecture) else ()
    labels = ("yes",) if answers else _labels(settings)
    activates = pooler.use_activation
    return PooledModel(
        tasks=_tasks(architecture, convert, len(labels)),
        labels=labels,
        takes_pairs=len(labels) == 1,
        has_segments=has_segments,
        convert=convert,
        pooling="all" if architecture.endswith(TOKENS) else pooling,
        activates=_activates(settings) and convert != "reward" if activates is None else activates,
        answer_tokens=answers,
    )


def _embedder(
    text: Mapping[str, Any],
    sentence: SentenceModel,
    pooler: PoolerSettings,
    width: int,
    pooling: str,
    *,
    has_segments: bool,
) -> PooledModel:
    matryoshka = pooler.matryoshka_dimensions or text.get("matryoshka_dimensions") or ()
    normalizes = pooler.normalize if pooler.normalize is not None else pooler.use_activation
    if normalizes is None:
        normalizes = sentence.normalizes or not sentence.is_given
    return PooledModel(
        tasks=(PoolingTask.TOKEN_EMBED,)
        if pooling == "all"
        else (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
        dimensions=sentence.dense[-1].outputs if sentence.dense else width,
        matryoshka=tuple(sorted(int(each) for each in matryoshka)),
        cuts_anywhere=bool(pooler.is_matryoshka or text.get("is_matryoshka")),
        has_segments=has_segments,
        prompts=sentence.prompts,
        default_prompt=sentence.default_prompt,
        convert="embed",
        pooling=pooling,
        normalizes=normalizes,
    )


def _convert(architecture: str, config: PoolingConfig) -> Literal["embed", "classify", "reward"]:
    if config.convert != "auto" and config.convert != "none":
        return config.convert
    if architecture.endswith((SEQUENCE, TOKENS)):
        return "classify"
    if architecture.endswith("RewardModel"):
        return "reward"
    return "embed"


def _is_decoder(architecture: str, model_type: str, defaults: Mapping[str, Any]) -> bool:
    """Whether tokens see only those before them, as the last one does all."""
    is_both = "is_decoder" in defaults  # families like BERT, made as either
    return bool(DECODER.search(architecture)) or (has_language_model(model_type) and not is_both)


def _labels(settings: Mapping[str, Any]) -> tuple[str, ...]:
    named, count = settings.get("id2label"), settings.get("num_labels")
    if isinstance(named, dict) and named:
        return tuple(str(label) for _, label in sorted(named.items(), key=lambda each: int(each[0])))
    return tuple(f"LABEL_{number}" for number in range(count if isinstance(count, int) and count > 0 else 2))


def _tasks(architecture: str, convert: str, num_labels: int) -> tuple[PoolingTask, ...]:
    if architecture.endswith(TOKENS):
        return (PoolingTask.TOKEN_CLASSIFY,)
    tasks = (PoolingTask.SCORE, PoolingTask.CLASSIFY) if num_labels == 1 else (PoolingTask.CLASSIFY,)
    return (PoolingTask.TOKEN_CLASSIFY, *tasks) if convert == "reward" else tasks


def _activates(settings: Mapping[str, Any]) -> bool:
    """Whether logits become probabilities, as cross-encoders of sentence-transformers name it."""
    nested = settings.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or settings.get("sbert_ce_default_activation_function")
    return not str(named or "").endswith(IDENTITY)
