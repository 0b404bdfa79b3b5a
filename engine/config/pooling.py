"""Settings of pooling models, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from coordinator.settings.flags import flag

Convert = Literal["auto", "none", "embed", "classify", "reward"]


class PoolerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``--pooler-config`` may name; None: as the checkpoint says."""

    pooling_type: Literal["CLS", "MEAN", "LAST", "ALL", "cls", "mean", "last", "all"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """Whether embeddings get the length 1, and labels are probabilities."""
    matryoshka_dimensions: tuple[int, ...] | None = None
    is_matryoshka: bool | None = None
    answer_tokens: tuple[str, str] | None = None
    """Tokens for no and yes of a reranker that answers with one of them."""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a model generates text or answers with numbers, and with which."""

    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        flag(
            help="generate: serve a model that writes text. pooling: serve embeddings, scores or classes. "
            "auto: pooling for encoders, classifiers and checkpoints of sentence-transformers."
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        flag(
            help="What a pooling model answers with: embed (one vector for a text), classify (labels, or the "
            "score of a pair) or reward (a score for each token). auto: by its architecture."
        ),
    ] = "auto"
    pooler_config: Annotated[
        str | None,
        flag(
            help='How a pooling model pools, as JSON: {"pooling_type": "MEAN", "normalize": true}. '
            "[default: as the checkpoint says]"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.runner == "generate" and (self.convert not in ("auto", "none") or self.pooler_config):
            raise ValueError("--convert and --pooler-config are for pooling models: drop --runner generate")
        self.pooler  # noqa: B018 (checks it)

    @property
    def pooler(self) -> PoolerSettings:
        """What ``--pooler-config`` asks for.

        Raises:
            ValueError: it is no such JSON object.
        """
        try:
            return msgspec.json.decode(self.pooler_config or "{}", type=PoolerSettings)
        except msgspec.DecodeError as error:
            raise ValueError(f"--pooler-config: {error}") from error

    @property
    def asks_for_pooling(self) -> bool:
        """Whether flags ask for a pooling model."""
        asked: Any = self.pooler_config not in (None, "{}")
        return self.runner == "pooling" or self.convert not in ("auto", "none") or bool(asked)
