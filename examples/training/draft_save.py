"""Draft head as a model directory in the format of EAGLE-3, and its measures."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.config import SHIPPED_HEAD, SHIPPED_MODEL
from examples.training.draft_head import DRAFT_VOCAB, FEATURE_LAYERS, INTERMEDIATE, DraftHead, Features
from examples.training.draft_text import HELD_OUT_PROMPT
from examples.training.draft_training import STEPS, load_served, tokens_per_step

WEIGHTS = "model.safetensors"
CARD = f"""---
license: apache-2.0
language: en
tags: [eagle3, speculative-decoding]
---

# {SHIPPED_HEAD}

An EAGLE-3 head for `{SHIPPED_MODEL}`: one decoder layer that drafts tokens from the model's hidden states, in
the format that SGLang, vLLM and Lockstep read. `serve --speculative-config.model {SHIPPED_HEAD}` uses it.
Answers are those without it, to the bit.

`examples/training/train_draft_head.py` trained it from nothing on the novels of the model's own training
(public domain) and on text that the model wrote itself, by the multi-step loss of EAGLE-3 with {STEPS} steps.
It proposes the {DRAFT_VOCAB} most frequent tokens.

Shares of positions whose first drafts are what the model wrote, behind {HELD_OUT_PROMPT} tokens of text
that neither was trained on, and the tokens of a step with {STEPS} drafts:

| temperature | first | first two | all three | tokens a step |
|---|---:|---:|---:|---:|
{{rows}}

Licence: Apache License 2.0.
"""


def head_config(served: dict[str, object]) -> dict[str, object]:
    """config.json of a head for the model that ``served`` describes."""
    same = (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size",
        "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    parameters = served["rope_parameters"]
    assert isinstance(parameters, dict)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
            "use_aux_hidden_state": True,
        },
        "hidden_act": "silu",
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "rope_theta": parameters["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{name: served[name] for name in same},
    }


def stage_save(work: Path, out: Path) -> None:
    """Write the checkpoint: config.json and the weights, with the maps of its vocabulary."""
    state = torch.load(work / "head.pt", weights_only=True)["head"]
    tokens, model = state.pop("tokens"), load_served()
    tensors = {name: tensor.bfloat16() for name, tensor in state.items()}
    tensors["d2t"] = tokens - torch.arange(len(tokens))  # added to a proposed id, gives the model's
    tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    config = head_config(model.config.to_dict())
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in out.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB, drafts for {SHIPPED_MODEL}", flush=True)


def stage_measure(work: Path, out: Path) -> None:
    """Shares of accepted drafts behind held-out prompts, for the head's card."""
    tensors, model = load_file(out / WEIGHTS), load_served()
    tokens = tensors.pop("d2t") + torch.arange(DRAFT_VOCAB)
    tensors.pop("t2d")
    lines = []
    features, head = Features(model), DraftHead(model, tokens)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()} | {"tokens": tokens})
    for name, rows in torch.load(work / "written.pt", weights_only=True).items():
        if name == "learnt":
            continue
        shares = tokens_per_step(model, features, head, rows, HELD_OUT_PROMPT)
        each = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {name} | {each} | {1 + sum(shares):.2f} |")
    (out / "README.md").write_text(CARD.format(rows="\n".join(lines)), encoding="utf-8")
    (out / "README.md").chmod(0o644)
    print("\n".join(lines), flush=True)
