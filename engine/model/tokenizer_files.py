"""A model's tokenizer.json: its own, or one converted from another form and kept (no torch).

transformers reads the other forms: tekken.json, tokenizer.model (sentencepiece or tiktoken), tiktoken.model,
and vocab.json with merges.txt. It does so in a process of its own, since callers must not load torch. What it
makes is kept under the digest of the files that it was made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from coordinator.distribution import installed_version
from parallel.caches import cache_directory

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEKKEN = "tekken.json"
MODELS = ("*.model", "*.tiktoken")
"""Patterns of files that sentencepiece or tiktoken reads."""
PLAIN = ("vocab.json", "merges.txt")
OTHER_FORMS = (TEKKEN, "tokenizer.model", "tiktoken.model", *PLAIN)
"""Usual names of files that hold a tokenizer where there is no tokenizer.json."""
BESIDE = (CONFIG, "config.json", "special_tokens_map.json", "added_tokens.json", *PLAIN)
"""Files that influence a conversion."""
CONVERSION_SECONDS = 300.0
"""Seconds that a conversion may take; 200,000 tokens take about half a minute."""
MAX_ERROR = 500
"""Characters of another library's error that are shown."""
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\s*")
PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf", "tiktoken": "tiktoken"}
"""Modules that forms need, and the packages that have them."""


class TokenizerFilesError(ValueError):
    """A directory without a usable tokenizer. The message names what to do."""


def tokenizer_directory(directory: Path) -> Path:
    """A directory with tokenizer.json and tokenizer_config.json, converted if need be.

    Raises:
        TokenizerFilesError: there is no tokenizer in a form that can be read, or a package is missing.
    """
    if (directory / TOKENIZER).is_file():
        return directory
    try:
        sources = _sources(directory)
        if not sources:
            raise TokenizerFilesError(
                f"{directory} has no {TOKENIZER}: name a directory that has one with --tokenizer, or write "
                "one with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        kept = cache_directory("tokenizers") / _digest(directory, sources)
        if not (kept / TOKENIZER).is_file():
            _check_readable(directory, sources)
            _convert(directory, sources[0].name, kept)
    except OSError as error:
        raise TokenizerFilesError(
            f"the tokenizer of {directory} cannot be converted: {error.filename or error}: {error.strerror}"
        ) from error
    return kept


def _sources(directory: Path) -> list[Path]:
    """Files that hold a vocabulary, the one that counts first."""
    if (directory / TEKKEN).is_file():
        return [directory / TEKKEN]
    if found := [path for pattern in MODELS for path in sorted(directory.glob(pattern))]:
        return found
    plain = [directory / name for name in PLAIN]
    return plain if all(path.is_file() for path in plain) else []


def _digest(directory: Path, sources: list[Path]) -> str:
    digest = hashlib.sha256(installed_version("transformers").encode())
    for path in sorted({*sources, *(directory / name for name in BESIDE)}):
        if path.is_file():
            digest.update(f"{path.name}:{path.stat().st_size}".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _check_readable(directory: Path, sources: list[Path]) -> None:
    """Check that transformers has what it needs for a form.

    Raises:
        TokenizerFilesError: a package is missing, or the checkpoint's own code would be needed.
    """
    name = sources[0].name
    if "AutoTokenizer" in (_config(directory).get("auto_map") or ()):
        raise TokenizerFilesError(
            f"{directory} has its tokenizer as {name} and code of its own, which is not run: write a "
            f"{TOKENIZER} with that code, or name a directory that has one with --tokenizer"
        )
    missing = [PACKAGES[module] for module in _needed(sources[0]) if not _has(module)]
    if missing:
        packages = " ".join(missing)
        raise TokenizerFilesError(
            f"{directory} has its tokenizer as {name} only, and reading that needs {' and '.join(missing)}: "
            f"pip install {packages}, or name a directory that has a {TOKENIZER} with --tokenizer"
        )


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError):  # it need not be there; a broken one is named where it is read
        return {}
    return config if isinstance(config, dict) else {}


def _needed(source: Path) -> tuple[str, ...]:
    """Modules that reading a file needs."""
    if source.suffix == ".json":
        return ()
    with source.open("rb") as file:
        is_tiktoken = TIKTOKEN_LINE.fullmatch(file.readline(4096)) is not None
    return ("tiktoken",) if is_tiktoken else ("sentencepiece", "google.protobuf")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _convert(directory: Path, name: str, kept: Path) -> None:
    """Write both files in another process, and put them in place at once.

    Raises:
        TokenizerFilesError: the conversion fails, or takes too long.
    """
    logger.info("converting %s of %s to %s, once", name, directory, TOKENIZER)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as made:
        target = Path(made) / "made"
        command = [
            sys.executable,
            "-P",
            "-m",
            "engine.model.tokenizer_conversion",
            str(directory),
            str(target),
        ]
        # tiktoken would keep what it read under the path of the file, and not see that it has changed.
        environment = {**os.environ, "TIKTOKEN_CACHE_DIR": "", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CONVERSION_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TokenizerFilesError(
                f"converting {name} of {directory} took more than {CONVERSION_SECONDS:.0f} s: write a "
                f"{TOKENIZER} with transformers, and name its directory with --tokenizer"
            ) from error
        if done.returncode or not (target / TOKENIZER).is_file():
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1][:MAX_ERROR] if lines else f"exit status {done.returncode}"
            raise TokenizerFilesError(
                f"transformers cannot convert {name} of {directory} ({reason}): get it again, or name a "
                f"directory that has a {TOKENIZER} with --tokenizer"
            )
        if not kept.exists():  # another process may have been faster
            try:
                target.rename(kept)
            except OSError:
                if not (kept / TOKENIZER).is_file():
                    shutil.rmtree(kept, ignore_errors=True)
                    raise
