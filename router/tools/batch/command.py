"""Command ``lockstep batch``: flags, its mesh, exit status."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from coordinator.config import LogLevel, MeshConfig
from coordinator.process import process
from coordinator.settings.flags import flag, parse
from engine.config import EngineConfig
from engine.model.checkpoint import CheckpointError
from router.api.answering import Answering
from router.api.generating import Generating
from router.api.understanding import Understanding
from router.batches.line_runner import LineRunner
from router.batches.routes import line_handlers
from router.config import HttpConfig, ServeConfig
from router.http.quotas import Quotas
from router.offline.llm import local_model, most_samples, samples_per_instance
from router.offline.mesh import EngineDeadError, PrivateMesh
from router.offline.progress import rich_bar
from router.pooled.routes import pooled_handlers
from router.text.text_models import TextModels
from router.tools.batch.file_run import FileRun, WrongFile

PROG = "lockstep batch"


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batch of a file."""

    file: Annotated[str | None, flag(positional=True, path=True, help="File of requests, one a line.")] = None
    input_file: Annotated[str | None, flag("-i", path=True, help="The same, as vLLM's run-batch has it.")] = (
        None
    )
    output_file: Annotated[
        str, flag("-o", path=True, help="File for the answers, in the order of the requests.")
    ] = ""
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
    log_level: LogLevel = "warning"

    def __post_init__(self) -> None:
        if (self.file is None) == (self.input_file is None):
            raise ValueError("give the FILE of requests, or --input-file")
        if not self.output_file:
            raise ValueError("give the file for the answers: -o ANSWERS.jsonl")
        if self.mesh.headless:
            raise ValueError("--headless instances belong to a mesh: use its batch API")


def main(argv: list[str] | None = None) -> int:
    """Answer all requests of a file; returns the exit status.

    It is 0 if all are answered, 1 if some have errors, 2 if nothing could be run.
    """
    config = parse(
        BatchConfig,
        sys.argv[1:] if argv is None else argv,
        prog=PROG,
        description="Answer a file of requests (OpenAI's batch format) by a mesh that ends with it.",
    )
    process.set_up("Batch", config.log_level, config.mesh.observability.log_format)
    try:
        run = FileRun(Path(config.file or config.input_file or ""), Path(config.output_file))
        failed = _carried_out(config, run)
    except (WrongFile, OSError, ValueError, CheckpointError, EngineDeadError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return process.EXIT_USAGE
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted; started again, it goes on with the other lines", file=sys.stderr)
        return process.EXIT_INTERRUPTED
    print(f"{run.total - failed} of {run.total} requests answered: {config.output_file}")
    return process.EXIT_FAILED if failed else 0


def _carried_out(config: BatchConfig, run: FileRun) -> int:
    """Number of lines with errors."""
    serve = ServeConfig(mesh=config.mesh, engine=config.engine, http=config.http)
    settings, _ = local_model(serve)
    mesh = PrivateMesh(serve, settings, port_is_free_choice=True)
    try:
        mesh.start()
        with rich_bar() as progress:
            task = progress.add_task("Answered requests", total=run.total, completed=run.num_kept, rates="")
            counts: Counter[bool] = Counter()

            def on_answer(is_error: bool) -> None:
                counts[is_error] += 1
                failures = f"{counts[True]} with errors" if counts[True] else ""
                progress.update(task, advance=1, rates=failures)

            return mesh.call(_answered(mesh, serve, run, on_answer))
    finally:
        mesh.close(waits_for_others=False)


async def _answered(
    mesh: PrivateMesh, config: ServeConfig, run: FileRun, on_answer: Callable[[bool], None]
) -> int:
    http, quotas = config.http, Quotas([])
    models = TextModels(mesh.client, http)
    answering = Answering(mesh.client, http, mesh.metrics, quotas)
    generating = Generating(http, Understanding(models, http), answering, quotas)
    handlers = line_handlers(
        generating, pooled_handlers(mesh.client, http, quotas, models, mesh.metrics.pooling)
    )
    runner = LineRunner(handlers, mesh.client, mesh.metrics, Counter(), samples_per_instance(config))
    return await run.answer(runner, most_samples(config), on_answer)
