"""``python -m tests.mesh.clients.lm_eval_formats``: lm-eval's results on the shipped model in each format.

lm-eval runs in the environment of ``examples/clients`` and asks a mesh that is started for each format.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from examples.benchmarks.bench_lockstep import print_table
from tests.mesh.harness import Ports, serve

FOLDER = Path(__file__).parents[3] / "examples" / "clients"
ENVIRONMENT = FOLDER.parents[1] / "build" / "clients" / "lm-eval"
TASKS = ("lockstep_choices", "lockstep_passages")
RUN_SECONDS = 400
MAX_LENGTH = 130
"""Tokens of a window, of which lm-eval uses two less; long passages take several."""
PLAIN = "bfloat16"
FORMATS: dict[str, Sequence[str]] = {
    PLAIN: (),
    "--quantization int8": ("--quantization", "int8"),
    "--quantization int8_per_channel_weight_only": ("--quantization", "int8_per_channel_weight_only"),
    "--quantization fp8_per_channel": ("--quantization", "fp8_per_channel"),
    "--quantization int4": ("--quantization", "int4"),
    "lockstep-moe-int8 (W8A8)": (f"{SHIPPED_MODEL}-int8",),
    "lockstep-moe-int4 (W4A16)": (f"{SHIPPED_MODEL}-int4",),
    "--kv-cache-dtype int8": ("--kv-cache-dtype", "int8"),
    "--kv-cache-dtype fp8": ("--kv-cache-dtype", "fp8"),
}
"""Arguments of ``serve``."""
METRICS = ("acc", "acc_norm", "word_perplexity", "bits_per_byte")


def measure(name: str, directory: Path) -> dict[str, float]:
    """What lm-eval finds with the model in a format."""
    ports = Ports()
    given = FORMATS[name]
    model = () if given and not given[0].startswith("-") else (SHIPPED_MODEL,)
    flags = ["-dp", "1", "--served-model-name", SHIPPED_MODEL, *ports.head()]
    with serve(directory / "log", *model, *given, *flags) as mesh:
        mesh.wait_for("ready at http")
        return _evaluated(ports.url, directory)


def _evaluated(url: str, directory: Path) -> dict[str, float]:
    arguments = {
        "model": SHIPPED_MODEL,
        "base_url": f"{url}/v1/completions",
        "tokenizer": MODELS_DIRECTORY / SHIPPED_MODEL,
        "tokenizer_backend": "huggingface",
        "max_length": MAX_LENGTH,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    done = subprocess.run(
        [
            *(ENVIRONMENT / "bin" / "python", "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={each}" for key, each in arguments.items())),
            *("--tasks", ",".join(TASKS), "--include_path", "."),
            *("--output_path", directory / "results"),
        ],
        cwd=FOLDER / "lm_eval_tasks",  # the tasks name their data from here
        env={name: each for name, each in os.environ.items() if not name.startswith("PYTHON")}
        | {"OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"lm-eval failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (file,) = (directory / "results").rglob("results_*.json")
    found: dict[str, float] = {}
    for results in json.loads(file.read_text())["results"].values():
        found |= {name: results[f"{name},none"] for name in METRICS if f"{name},none" in results}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--formats", default="", help="only those with this in their names")
    args = parser.parse_args()
    lines = []
    for name in (each for each in FORMATS if args.formats in each):
        with tempfile.TemporaryDirectory() as directory:
            found = measure(name, Path(directory))
        lines.append([name, *(f"{found[each]:.4g}" for each in METRICS)])
        print(*lines[-1], sep="  ", flush=True)
    print_table(["format", *METRICS], lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
