"""``python -m engine.model.tokenizer_conversion FROM TO``: writes tokenizer.json for another form.

This process loads transformers; :mod:`engine.model.tokenizer_files` starts it and does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    # Tokenizers take no torch, which transformers loads where it finds it: more than half of the time.
    cast(dict[str, Any], sys.modules)["torch"] = None

from transformers import AutoTokenizer
from transformers.utils import logging

CONFIG = "tokenizer_config.json"


def convert(source: Path, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Values in the source's own configuration win.

    Raises:
        ValueError: transformers has no fast form of this tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} has no form that could be written as tokenizer.json")
    tokenizer.save_pretrained(target)
    given = source / CONFIG
    if given.is_file():
        made = json.loads((target / CONFIG).read_bytes())
        (target / CONFIG).write_text(json.dumps(made | json.loads(given.read_bytes())))


if __name__ == "__main__":
    logging.set_verbosity_error()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 (its words go to who started this)
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        sys.exit(1)
