"""``python -m engine.model.gguf.conversion FILE TO``: writes config.json and the tokenizer of a GGUF file.

This process loads transformers; :mod:`engine.model.gguf.directory` starts it and does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    # Tokenizers take no torch, which transformers loads where it finds it: more than half of the time.
    cast(dict[str, Any], sys.modules)["torch"] = None

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)
from transformers.utils import logging

from engine.model.gguf.configs import FACTORS, config_of
from engine.model.gguf.reading import GgufError, GgufHeader, read_header

TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Special tokens, and the names of their ids in the file."""


def convert(path: Path, target: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json."""
    header = read_header(path, texts=True)
    config = config_of(header, _factors(path, header))
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _tokenizer(header).save_pretrained(target)


def _factors(path: Path, header: GgufHeader) -> list[float]:
    entry = header.tensors.get(FACTORS)
    if entry is None:
        return []
    found = np.fromfile(path, dtype="<f4", count=entry.num_bytes // 4, offset=entry.begin)
    return [float(each) for each in found]


def _tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    values = header.metadata
    renamed = {
        group: {
            ours: values[f"tokenizer.{key}"] for key, ours in keys.items() if f"tokenizer.{key}" in values
        }
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    if "tokens" not in renamed["tokenizer"]:
        raise GgufError("the file has no vocabulary (tokenizer.ggml.tokens): get it again")
    backend, _ = convert_gguf_tokenizer(header.architecture, renamed["tokenizer"])
    options: dict[str, Any] = dict(renamed["tokenizer_config"])
    if renamed["tokenizer"].get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # as llama.cpp does where the file says nothing
    tokens = renamed["tokenizer"]["tokens"]
    for name, key in TOKENS.items():
        number = values.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            options[name] = AddedToken(tokens[number], normalized=False, special=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


if __name__ == "__main__":
    logging.set_verbosity_error()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except GgufError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # noqa: BLE001 (its words go to who started this)
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        sys.exit(1)
