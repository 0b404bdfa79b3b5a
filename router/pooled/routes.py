"""Handlers of pooled requests."""

from __future__ import annotations

from router.config import HttpConfig
from router.http.quotas import Quotas
from router.mesh import Mesh
from router.metrics.pooling_counts import PoolingCounts
from router.pooled.cache import PoolingCache
from router.pooled.embedding import EmbeddingEndpoints
from router.pooled.run import PooledRunner
from router.pooled.scoring import ScoringEndpoints
from router.stored.replayed_body import Handler
from router.text.text_models import TextModels


def pooled_handlers(
    mesh: Mesh, config: HttpConfig, quotas: Quotas, models: TextModels, counts: PoolingCounts
) -> dict[str, Handler]:
    """Handlers of embeddings, scores and classes, in the words of each API, by their paths."""
    cache = PoolingCache(config.pooling_cache, counts)
    runner = PooledRunner(mesh, config, quotas, models, cache)
    embedding = EmbeddingEndpoints(runner, models)
    scoring = ScoringEndpoints(runner, embedding)
    return {
        "/v1/embeddings": embedding.embeddings,
        "/v2/embed": embedding.cohere,
        "/embed": embedding.tei,
        "/pooling": embedding.pooling,
        "/api/embed": embedding.ollama,
        "/api/embeddings": embedding.older_ollama,
        "/score": scoring.score,
        "/v1/score": scoring.score,
        "/rerank": scoring.rerank,
        "/v1/rerank": scoring.rerank,
        "/v2/rerank": scoring.rerank,
        "/classify": scoring.classify,
        "/predict": scoring.predict,
        "/similarity": scoring.similarity,
    }
