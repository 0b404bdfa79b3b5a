"""Routes of files and batches."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route

from router.api.generating import Generating
from router.batches.batch_runs import BatchLimits, BatchRuns
from router.batches.batch_store import BatchStore
from router.batches.endpoints import BatchEndpoints, FileEndpoints
from router.batches.file_store import StoredFiles
from router.batches.line_runner import LineRunner
from router.batches.lines import GENERATING, POOLED
from router.config import HttpConfig
from router.mesh import Mesh
from router.metrics.metrics import Metrics
from router.stored.database import StoreDatabase
from router.stored.failures import where_it_works
from router.stored.replayed_body import Handler


def line_handlers(generating: Generating, pooled: Mapping[str, Handler]) -> dict[str, Handler]:
    """Handlers of batch lines by their endpoint; ``pooled`` are those of pooled requests."""
    generates = (generating.chat, generating.completions, generating.responses)
    return dict(zip(GENERATING, generates, strict=True)) | {path: pooled[path] for path in POOLED}


def batch_runs(
    database: StoreDatabase, mesh: Mesh, config: HttpConfig, metrics: Metrics, handlers: Mapping[str, Handler]
) -> BatchRuns:
    """Batches of a router whose handlers, by endpoint, answer their lines."""
    limits = BatchLimits(
        lines=config.batch_max_lines,
        line_bytes=config.max_request_bytes,
        lines_per_instance=config.batch_lines_per_instance,
        ttl=config.store_ttl,
    )
    runner = LineRunner(handlers, mesh, metrics, metrics.store.events, limits.lines_per_instance)
    return BatchRuns(StoredFiles(database), BatchStore(database), runner, mesh, limits)


def batch_routes(runs: BatchRuns, config: HttpConfig) -> list[Route]:
    """Routes of the batch API."""
    files, batches = FileEndpoints(runs, config), BatchEndpoints(runs, config)
    return [
        Route(path, where_it_works(handler), methods=[method])
        for method, path, handler in (
            ("POST", "/v1/files", files.upload),
            ("GET", "/v1/files", files.list),
            ("GET", "/v1/files/{id}", files.get),
            ("DELETE", "/v1/files/{id}", files.delete),
            ("GET", "/v1/files/{id}/content", files.content),
            ("POST", "/v1/batches", batches.create),
            ("GET", "/v1/batches", batches.list),
            ("GET", "/v1/batches/{id}", batches.get),
            ("POST", "/v1/batches/{id}/cancel", batches.cancel),
        )
    ]
