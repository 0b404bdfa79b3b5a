"""Parameters of a pooled request, and its answer, as they cross the wire (pure)."""

from __future__ import annotations

import msgspec

from coordinator.pooled_model import PooledModel, PoolingTask


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a pooled request asks for.

    Its tokens are ``Submit.prompt_ids``, those of both texts of a pair with the special tokens between.
    """

    task: PoolingTask
    token_type_ids: bytes = b""
    """One byte for each token, of models with segments; empty: all 0."""
    dimensions: int = 0
    """Length to which an embedding is cut before it is normalised; 0: not cut."""
    normalize: bool | None = None
    """Whether an embedding gets the length 1; None: as the model does."""
    activation: bool | None = None
    """Whether labels and scores are probabilities, rather than logits; None: as the model does."""

    def problem(self, model: PooledModel, num_tokens: int) -> str:
        """Why a model cannot answer this; empty if it can."""
        if self.task not in model.tasks:
            return f"this model does not do {self.task}: it does {model.offer}"
        if self.token_type_ids and len(self.token_type_ids) != num_tokens:
            return f"{len(self.token_type_ids)} token type ids for {num_tokens} tokens"
        if self.token_type_ids and not model.has_segments and any(self.token_type_ids):
            return "this model has no token type ids"
        if max(self.token_type_ids, default=0) > 1:
            return "token type ids are 0 or 1"
        embeds = self.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
        if self.dimensions and not (embeds and model.cuts_to(self.dimensions)):
            allowed = ", ".join(map(str, (*model.matryoshka, model.dimensions)))
            return f"this model has no embeddings of {self.dimensions} dimensions: ask for {allowed}"
        return ""


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answer to a pooled request."""

    values: bytes
    """Numbers in float32, the lowest byte first, rows one after the other; all are finite."""
    shape: tuple[int, ...]
    """Their shape by :class:`coordinator.pooled_model.PoolingTask`."""
