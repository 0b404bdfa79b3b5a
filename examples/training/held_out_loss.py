#!/usr/bin/env python3
"""Loss on the shipped model's held-out text, as Lockstep serves it with some flags.

    python examples/training/train_model.py text --work /tmp/lockstep-moe
    python examples/training/held_out_loss.py --kv-cache-dtype auto int8 fp8
    python examples/training/held_out_loss.py --models lockstep-moe DIRECTORY

The text is that of the training's validation, in the same windows. Each is a prompt whose log-probabilities
are asked for. The first line is what the others are compared with.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from tokenizers import Tokenizer

from engine.config import SHIPPED_MODEL
from engine.model.finding import find_model
from examples.benchmarks.bench_lockstep import print_table
from examples.training.corpus import load_corpus
from router.offline.llm import LLM
from router.offline.params import SamplingParams

WINDOW = 512
"""Tokens that are predicted in a window, behind one more."""


def windows(work: Path) -> list[list[int]]:
    """The held-out text, cut into windows."""
    tokenizer = Tokenizer.from_file(str(find_model(SHIPPED_MODEL) / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in load_corpus(work).validation]
    return [ids[at : at + WINDOW + 1] for ids in texts for at in range(0, len(ids) - WINDOW, WINDOW)]


def loss_of(
    model: str, kept: str, dtype: str, prompts: list[list[int]], quantization: str | None = None
) -> float:
    """Mean cross entropy, in nats per token."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(model, dtype=dtype, kv_cache_dtype=kept, quantization=quantization) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    total = count = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output.prompt_logprobs
        assert found is not None
        for token, line in zip(prompt[1:], found[1:], strict=True):
            assert line is not None
            total, count = total - line[token].logprob, count + 1
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/lockstep-moe"), help="where the text is")
    parser.add_argument("--models", nargs="+", default=[SHIPPED_MODEL])
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"])
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    prompts, lines, first = windows(args.work), [], None
    for model in args.models:
        for kept in args.kv_cache_dtype:
            loss = loss_of(model, kept, args.dtype, prompts)
            first = loss if first is None else first
            change = f"{100 * (math.exp(loss - first) - 1):+.3f} %"
            lines.append([model, kept, f"{loss:.4f}", f"{math.exp(loss):.2f}", change])
    print(f"{len(prompts)} windows of {WINDOW} tokens")
    print_table(["model", "KV cache", "loss", "perplexity", "change"], lines)


if __name__ == "__main__":
    main()
