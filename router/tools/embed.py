"""Command ``lockstep embed``: a file of texts to a file of vectors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from coordinator.config import LogLevel, MeshConfig
from coordinator.process import process
from coordinator.settings.flags import flag, parse
from engine.config import EngineConfig
from engine.model.checkpoint import CheckpointError
from router.config import HttpConfig, ServeConfig
from router.offline.llm import LLM
from router.offline.mesh import EngineDeadError
from router.offline.pooled import PooledParams
from router.offline.run import GenerationError

PROG = "lockstep embed"
TOGETHER = 4096
"""Texts that are read, embedded and written before the next ones are."""
FIELDS = "text", "input", "content"
"""Fields of a JSON object that may have its text."""


class EmbedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Embedding of a file."""

    file: Annotated[
        str,
        flag(
            positional=True,
            path=True,
            help="Texts, one a line; of a .jsonl file each line is a JSON string, or an object with text.",
        ),
    ] = ""
    output_file: Annotated[
        str, flag("-o", path=True, help="Vectors, in order: .jsonl (index and embedding) or .npy (float32).")
    ] = ""
    dimensions: Annotated[int | None, flag(help="Length to which embeddings are cut.")] = None
    prompt_name: Annotated[str | None, flag(help="Name of the model's prompt before each text.")] = None
    truncate: Annotated[bool, flag(help="Cut texts that are too long, instead of an error.")] = False
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
    log_level: LogLevel = "warning"

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("give the FILE of texts")
        if not self.output_file.endswith((".jsonl", ".npy")):
            raise ValueError("give the file for the vectors: -o VECTORS.jsonl or -o VECTORS.npy")
        if self.mesh.headless:
            raise ValueError("--headless instances belong to a mesh: ask its /v1/embeddings")


def main(argv: list[str] | None = None) -> int:
    """Embed all texts of a file; returns the exit status."""
    config = parse(
        EmbedConfig,
        sys.argv[1:] if argv is None else argv,
        prog=PROG,
        description="Embed the texts of a file by a mesh that ends with it.",
    )
    process.set_up("Embed", config.log_level, config.mesh.observability.log_format)
    try:
        with Path(config.file).open("rb") as lines:
            count = _embedded(config, texts_of(lines, is_json=config.file.endswith(".jsonl")))
    except (OSError, ValueError, CheckpointError, EngineDeadError, GenerationError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return process.EXIT_USAGE
    except KeyboardInterrupt:
        return process.EXIT_INTERRUPTED
    print(f"{count} texts embedded: {config.output_file}")
    return 0


def texts_of(lines: Iterable[bytes], *, is_json: bool) -> Iterator[str]:
    """Texts of lines.

    Raises:
        ValueError: a line has none; says which.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = _text(msgspec.json.decode(line)) if is_json else line.decode().rstrip("\r\n")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if not text:
            raise ValueError(f"line {number} has no text")
        yield text


def _text(found: Any) -> str:
    if isinstance(found, dict):
        found = next((found[name] for name in FIELDS if name in found), "")
    return found if isinstance(found, str) else ""


def _embedded(config: EmbedConfig, texts: Iterator[str]) -> int:
    """Number of texts whose vectors are written.

    The output gets its name when all are.
    """
    out = Path(config.output_file)
    unfinished = out.with_name(f"{out.name}.unfinished")
    params = PooledParams(
        dimensions=config.dimensions,
        prompt_name=config.prompt_name,
        truncate_prompt_tokens=-1 if config.truncate else None,
    )
    serve = ServeConfig(mesh=config.mesh, engine=config.engine, http=config.http)
    count, vectors = 0, []
    with LLM.of(serve) as llm, unfinished.open("wb") as file:
        while some := list(islice(texts, TOGETHER)):
            found = llm.embed(some, pooling_params=params)
            embeddings = [each.outputs.embedding for each in found]
            if out.suffix == ".npy":
                vectors.append(np.array(embeddings, dtype=np.float32))
            else:
                rows = [{"index": count + at, "embedding": each} for at, each in enumerate(embeddings)]
                file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
            count += len(some)
        if out.suffix == ".npy":
            np.save(file, np.concatenate(vectors) if vectors else np.zeros((0, 0), dtype=np.float32))
    unfinished.replace(out)
    return count
