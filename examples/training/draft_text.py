"""Training text of a draft head: what the model itself writes behind the novels."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.config import SHIPPED_MODEL
from engine.model.finding import find_model
from examples.training.corpus import load_corpus
from examples.training.samples import Samples
from router.offline.llm import LLM
from router.offline.params import SamplingParams

LENGTH = 1026
"""Tokens of a written row, prompt included."""
TEMPERATURES = (0.0, 0.7, 0.7, 1.0)
HELD_OUT_PROMPT = 64
"""Tokens of the prompts out of the novels' held-out ends."""


def tokenizer_of_model() -> Tokenizer:
    return Tokenizer.from_file(str(find_model(SHIPPED_MODEL) / "tokenizer.json"))


def write_rows(prompts: list[list[int]], temperatures: list[float], length: int) -> torch.Tensor:
    """Rows [prompts, length]: each prompt and what the model writes behind it."""
    params = [
        SamplingParams(
            max_tokens=length - len(prompt), temperature=temperature, top_p=0.9, ignore_eos=True, seed=number
        )
        for number, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    with LLM(SHIPPED_MODEL, max_num_seqs=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return torch.tensor(
        [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    )


def stage_write(work: Path, rows: int, seed: int) -> None:
    """Write ``written.pt``: rows to learn from, and rows behind held-out text for each temperature."""
    tokenizer, corpus, rng = tokenizer_of_model(), load_corpus(work), random.Random(seed)
    samples = Samples(corpus, tokenizer, seed)
    prompts = [samples.row(rng.randrange(16, 257))[0].tolist() for _ in range(rows)]
    learnt = write_rows(prompts, [rng.choice(TEMPERATURES) for _ in prompts], LENGTH)
    texts = [tokenizer.encode(text).ids for text in corpus.validation]
    held = [
        ids[at : at + HELD_OUT_PROMPT] for ids in texts for at in range(0, len(ids) - HELD_OUT_PROMPT, 256)
    ]
    kept = {"learnt": learnt}
    for temperature in sorted(set(TEMPERATURES)):
        kept[f"{temperature:g}"] = write_rows(held, [temperature] * len(held), HELD_OUT_PROMPT + 256)
    torch.save(kept, work / "written.pt")
    print(f"{learnt.numel():,} tokens written, {len(held)} held-out prompts", flush=True)
