"""Facts of a pooling model, which answers a prompt with numbers instead of tokens (pure).

Instances find them in the checkpoint; routers get them with the settings of the mesh.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec


class PoolingTask(enum.StrEnum):
    """Kind of answer to a pooled request, by vLLM's names."""

    EMBED = "embed"
    """One embedding: [dimensions]."""
    CLASSIFY = "classify"
    """One probability for each label: [labels]."""
    SCORE = "score"
    """One number for a pair of texts, from a cross-encoder or a reward model: [1]."""
    TOKEN_EMBED = "token_embed"
    """One embedding for each token: [tokens, dimensions]."""
    TOKEN_CLASSIFY = "token_classify"
    """Probabilities of all labels for each token: [tokens, labels]."""


PATHS = {
    PoolingTask.EMBED: "/v1/embeddings",
    PoolingTask.CLASSIFY: "/classify",
    PoolingTask.SCORE: "/score and /v1/rerank",
    PoolingTask.TOKEN_EMBED: "/pooling",
    PoolingTask.TOKEN_CLASSIFY: "/pooling",
}
"""Endpoints of each task, for error messages."""


class PooledModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a mesh with ``--runner pooling`` computes."""

    tasks: tuple[PoolingTask, ...]
    """Tasks that requests may have; the first is the model's own."""
    dimensions: int = 0
    """Numbers of an embedding; 0 where it gives none."""
    matryoshka: tuple[int, ...] = ()
    """Lengths to which embeddings may be cut, as the checkpoint lists them."""
    cuts_anywhere: bool = False
    """Whether embeddings may be cut to any length up to ``dimensions``."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of the answer's numbers."""
    takes_pairs: bool = False
    """Whether it reads both texts of a pair at once, as cross-encoders do.

    Without, a score is the cosine of two embeddings.
    """
    has_segments: bool = False
    """Whether it has token type ids, which tell the texts of a pair apart."""
    prompts: dict[str, str] = {}
    """Texts to put before inputs, by name (``config_sentence_transformers.json``)."""
    default_prompt: str = ""
    """Name of the prompt where a request names none; empty for none."""
    convert: Literal["embed", "classify", "reward"] = "embed"
    """``--convert`` as resolved."""
    pooling: str = ""
    """How tokens become one answer: cls, mean, last or all."""
    normalizes: bool = False
    """Whether embeddings have the length 1 unless a request asks otherwise."""
    activates: bool = True
    """Whether scores and classes are probabilities unless a request asks otherwise."""
    answer_tokens: tuple[str, ...] = ()
    """Tokens for no and yes, of a reranker that answers with one of them."""

    @property
    def offer(self) -> str:
        """Tasks with their endpoints, for error messages."""
        return ", ".join(f"{task} (POST {PATHS[task]})" for task in self.tasks)

    def cuts_to(self, dimensions: int) -> bool:
        """Whether embeddings may be cut to this length."""
        if dimensions == self.dimensions:
            return True
        return dimensions in self.matryoshka or (self.cuts_anywhere and 0 < dimensions < self.dimensions)
