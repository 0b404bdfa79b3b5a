"""Default sampling parameters, as the model's authors or the operator set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.checkpoint import GENERATION_CONFIG, SAMPLING_KEYS, CheckpointError, default_sampling
from engine.sampling import BadParameter, SamplingParams
from router.config import HttpConfig

MANY = 1 << 31
"""A vocabulary size above any real one.

What depends on the vocabulary is checked with each request instead.
"""
WHOLE = ("top_k", "max_tokens")


def sampling_defaults(config: HttpConfig, model_directory: str) -> dict[str, Any]:
    """Default parameters by their names in :class:`engine.sampling.SamplingParams`.

    ``--generation-config auto`` takes the model's, ``vllm`` none, any other value those of the directory that
    it names. ``--override-generation-config`` has precedence over them.

    Raises:
        CheckpointError: they cannot be read, or used; the message suggests what to do.
    """
    defaults = _of_files(config.generation_config, model_directory)
    try:
        overrides = _overrides(config.sampling_overrides)
        _check({key: value for key, value in overrides.items() if value is not None})
    except ValueError as error:
        raise CheckpointError(f"--override-generation-config: {error}") from error
    return {key: value for key, value in (defaults | overrides).items() if value is not None}


def most_tokens(config: HttpConfig, defaults: dict[str, Any]) -> int | None:
    """Most tokens of an answer if the operator set them.

    That is by an override or a directory of defaults. The model's limit is only for requests that set none
    (as in vLLM).
    """
    is_own = config.generation_config not in ("auto", "vllm") or "max_new_tokens" in config.sampling_overrides
    return defaults.get("max_tokens") if is_own else None


def _of_files(chosen: str, model_directory: str) -> dict[str, Any]:
    if chosen == "vllm":
        return {}
    directory = Path(model_directory if chosen == "auto" else chosen)
    file = directory / GENERATION_CONFIG
    try:
        found = default_sampling(directory)  # first: it says why a file cannot even be looked at
        if chosen != "auto" and not file.is_file():
            raise CheckpointError(f"{directory} has no {GENERATION_CONFIG}")
        defaults = {key: _number(key, value) for key, value in found.items()}
        _check(defaults)
    except ValueError as error:
        named = str(error) if isinstance(error, CheckpointError) else f"{file}: {error}"
        raise CheckpointError(
            f"{named.rstrip('.')}: repair it, or give --generation-config another directory, or vllm for "
            "neutral sampling defaults"
        ) from error
    return defaults


def _overrides(given: dict[str, Any]) -> dict[str, Any]:
    """Checked overrides; None removes a default."""
    if unknown := given.keys() - SAMPLING_KEYS.keys():
        raise ValueError(f"{min(unknown)!r} is none of {', '.join(SAMPLING_KEYS)}")
    return {
        SAMPLING_KEYS[key]: None if value is None else _number(SAMPLING_KEYS[key], value)
        for key, value in given.items()
    }


def _number(key: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} = {value!r} is no number")
    try:
        is_whole = float(value).is_integer()
    except OverflowError:
        raise ValueError(f"{key} is larger than any number that is meant") from None
    if key not in WHOLE:
        return value
    if not is_whole:
        raise ValueError(f"{key} = {value!r} is no whole number")
    return int(value)


def _check(defaults: dict[str, Any]) -> None:
    """Check the defaults as those of a request that sets all of them."""
    if defaults.get("max_tokens", 1) < 1:
        raise BadParameter("max_tokens", f"max_new_tokens must be at least 1, got {defaults['max_tokens']}")
    SamplingParams(**defaults).check(vocab_size=MANY)
