"""A model directory made from a GGUF file, once (no torch).

It has config.json and the tokenizer, as transformers reads them, and a link to the file with the weights. The
tokenizer is made by transformers, in a process of its own, since callers must not load torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

from coordinator.distribution import installed_version
from engine.model.gguf import configs, names, reading
from engine.model.gguf.configs import config_of
from engine.model.gguf.names import recipes_of
from engine.model.gguf.reading import GgufError, read_header
from parallel.caches import made_once, own_directory

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
WEIGHTS = f"model{SUFFIX}"
"""Name of the link to the file."""
CONVERSION_SECONDS = 300.0
"""Seconds that a conversion may take; 200,000 tokens take some seconds."""
MAX_ERROR = 500
"""Characters of another library's error that are shown."""
PACKAGE = "gguf"


def gguf_directory(path: Path) -> Path:
    """The directory of a file's model.

    Raises:
        GgufError: the file cannot be read, is not whole, or its model is not one that is read.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise GgufError(f"{path} is a GGUF file, and reading it needs the package gguf: pip install gguf")
    try:
        path = path.resolve()
        kept = own_directory("gguf") / _digest(path)
        if not kept.is_dir():
            _check(path)
        return made_once(kept, lambda target: _make(path, target))
    except OSError as error:
        raise GgufError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _digest(path: Path) -> str:
    """Name of the directory: another file, and other code, make another one."""
    found = path.stat()
    digest = hashlib.sha256(f"{path}\0{found.st_size}\0{found.st_mtime_ns}".encode())
    digest.update(installed_version("transformers").encode())
    for module in (configs, names, reading):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:32]


def _check(path: Path) -> None:
    """Refuse unsupported files, before anything is made."""
    header = read_header(path)
    try:
        config_of(header)
        recipes_of(header)
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from error


def _make(path: Path, target: Path) -> None:
    """Write the directory."""
    logger.info("making config.json and the tokenizer of %s, once", path)
    _convert(path, target)
    (target / WEIGHTS).symlink_to(path)


def _convert(path: Path, target: Path) -> None:
    """Write config.json and tokenizer files in another process."""
    command = [sys.executable, "-P", "-m", "engine.model.gguf.conversion", str(path), str(target)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CONVERSION_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GgufError(
            f"making the tokenizer of {path} took more than {CONVERSION_SECONDS:.0f} s: use a checkpoint "
            "with *.safetensors"
        ) from error
    if done.returncode or not (target / "tokenizer.json").is_file():
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1][:MAX_ERROR] if lines else f"exit status {done.returncode}"
        raise GgufError(
            f"{path}: its tokenizer cannot be made ({reason}): use a checkpoint with *.safetensors"
        )
