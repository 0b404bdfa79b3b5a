"""The same model and requests by transformers' continuous batching: tokens per second.

python -m examples.benchmarks.gpu.peer_steps --shape qwen3-0.6b --rows 32 --output FILE
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.gpu.shapes import SHAPES, config_of

LEAST_PART = 0.2
"""Part of the time that decoding must take for its speed to be known."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each number of requests at once, prompts included and not.

    The time of prompts is that of a run with a single token each.
    """
    shape = config_of(options.shape, options.tiny)
    kind = getattr(transformers, shape["architectures"][0])
    config = kind.config_class(**{name: each for name, each in shape.items() if name != "architectures"})
    torch.manual_seed(0)
    with torch.device(options.device):
        model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    # On a CPU it would size its cache by all memory.
    sizes = transformers.ContinuousBatchingConfig(num_blocks=64) if options.device == "cpu" else None
    facts: dict[str, Any] = {"shape": options.shape, "transformers": transformers.__version__, "rows": []}
    for rows in options.rows:
        prompts = [
            [(slot * 31 + place * 7) % 900 + 3 for place in range(options.context)] for slot in range(rows)
        ]

        def run(tokens: int, prompts: list[list[int]] = prompts) -> float:
            wanted = transformers.GenerationConfig(
                max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            began = time.perf_counter()
            outputs = model.generate_batch(
                inputs=prompts, generation_config=wanted, continuous_batching_config=sizes
            )
            seconds = time.perf_counter() - began
            found = [len(each.generated_tokens) for each in outputs.values()]
            assert found == [tokens] * len(prompts), found
            return seconds

        run(1)
        first, whole = run(1), run(options.tokens)
        facts["rows"].append(
            {
                "rows": rows,
                "seconds": whole,
                "tokens_per_s": rows * options.tokens / whole,
                "decode_tokens_per_s": None
                if whole - first < LEAST_PART * whole
                else rows * (options.tokens - 1) / (whole - first),
            }
        )
        if options.output is not None:
            options.output.write_text(json.dumps(facts, indent=2))
    return facts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--output", type=Path)
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(measure(parser.parse_args(argv))))


if __name__ == "__main__":
    main()
