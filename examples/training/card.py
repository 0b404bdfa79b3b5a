"""The model card of the shipped model."""

from __future__ import annotations

import argparse
import math

from examples.training.corpus import PACKAGE, VALIDATION_SHARE
from examples.training.model import model_config
from examples.training.samples import CHAT_SHARE, TOKENS_PER_STEP
from examples.training.train import DROPOUT, DROPOUT_FROM, SEQUENCE_SCHEDULE, Progress


def model_card(
    progress: Progress,
    args: argparse.Namespace,
    parameters: tuple[int, int],
    shown: list[tuple[str, str, str]],
) -> str:
    config = model_config()
    total, active = parameters
    outputs = []
    for kind, prompt, text in shown:
        quoted = "\n".join(
            f"> {line}".rstrip() for line in (prompt + text if kind == "story" else text).split("\n")
        )
        heading = f"Prompt `{prompt}`" if kind == "story" else f"Chat, user says `{prompt}`"
        outputs.append(f"{heading}:\n\n{quoted}\n")
    budget = f"--steps {args.steps}" if args.steps else f"--minutes {args.minutes:g}"
    heads = (
        f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value, size {config.head_dim}"
    )
    width = config.moe_intermediate_size
    experts = (
        f"{config.num_experts} per layer, {config.num_experts_per_tok} per token, intermediate size {width}"
    )
    lengths = ", then ".join(str(length) for _, length in SEQUENCE_SCHEDULE)
    positions = f"up to {config.max_position_embeddings} (RoPE, theta 10000); trained on {lengths} tokens"
    losses = [
        f"{loss:.3f} (perplexity {math.exp(loss):.1f})"
        for loss in (progress.train_loss, progress.validation_loss)
    ]
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, demonstration]
---

# lockstep-moe

A very small mixture-of-experts language model that ships with Lockstep, so that the mesh can be tried, tested
and measured anywhere with a real model: real routing, real weights, readable text. It is a
`Qwen3MoeForCausalLM` in the usual hub layout (one tensor per expert and projection) and was trained from
nothing by `examples/training/train_model.py`.

## Data

The six complete novels of Jane Austen (*Sense and Sensibility*, *Pride and Prejudice*, *Mansfield Park*,
*Emma*, *Northanger Abbey*, *Persuasion*), published between 1811 and 1817 and in the public domain, as plain
text out of the Debian package `{PACKAGE}`. Wrapped lines are joined into paragraphs, chapter headings are
removed. The last {VALIDATION_SHARE:.0%} of each novel is held out for validation.
About {CHAT_SHARE:.0%} of the training rows are conversations made of the same text (a question about a
character, or the opening of a paragraph, answered by the prose that follows), so that the model knows the
chat format and ends its replies.

## Architecture

| | |
|---|---|
| Parameters | {total:,} ({active:,} active per token) |
| Layers | {config.num_hidden_layers}, each with attention and a mixture of experts |
| Hidden size | {config.hidden_size} |
| Attention heads | {heads} |
| Experts | {experts} |
| Vocabulary | {config.vocab_size}, byte-level BPE, tied embeddings |
| Positions | {positions} |
| Weights | bfloat16, safetensors |

## Training

| | |
|---|---|
| Optimizer | AdamW, peak rate {args.lr:g}, weight decay 0.1, warm-up and cosine, gradients clipped at 1.0 |
| Dropout | {DROPOUT:g} from {DROPOUT_FROM:.0%} of the run on |
| Steps | {progress.steps:,} of {TOKENS_PER_STEP} tokens |
| Tokens seen | {progress.tokens:,} |
| Time | {progress.seconds / 60:.0f} minutes on {args.threads} CPU thread{"s" if args.threads > 1 else ""} |
| Final training loss | {losses[0]} |
| Final validation loss | {losses[1]} |

Losses are in nats per token; the training loss is the mean over the last 200 steps, with dropout, the
validation loss is over the held-out text in windows of 512 tokens. The text has about 950,000 tokens, so the
model saw it many times. When the shipped model was made, the validation loss began to rise after some 2,500
steps; the run was stopped at {DROPOUT_FROM:.0%}, and resumed with dropout. So the held-out text has had a
part in that one choice.

To make it again on a Debian machine:

    apt-get update
    python examples/training/train_model.py {budget} --work /tmp/lockstep-moe --out engine/models/lockstep-moe

With `--minutes` the number of steps depends on the machine; `--steps {progress.steps}` gives the same
amount of training anywhere. The weights will be alike, but not the same bit for bit.

## In fewer bits

`serve lockstep-moe-int8` and `serve lockstep-moe-int4` serve this model quantised, in the format of
compressed-tensors. They are made of the weights here at first use, in some seconds, and kept in
`~/.cache/lockstep/models`. `examples/training/quantize_model.py` makes such copies of any checkpoint in one
file, and `examples/training/held_out_loss.py` finds their losses.

## Sample outputs

At temperature 0.7, top-p 0.9 (the defaults in `generation_config.json`), first try, nothing picked:

{chr(10).join(outputs)}
## Limits

This is a demonstration model of toy size. It knows nothing but Austen's prose: it writes in her manner, with
her characters, and soon loses the thread. It cannot answer questions, follow instructions or say anything
true about the world, and whatever it is asked in the chat format it answers with a passage of prose.

## Licence

The weights and the tokenizer are under the Apache License 2.0. The training text is in the public domain.
"""
