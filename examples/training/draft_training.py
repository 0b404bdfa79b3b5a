"""Training of a draft head: its samples, its loss, its checkpoints."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from engine.config import SHIPPED_MODEL
from engine.model.finding import find_model
from examples.training.corpus import load_corpus
from examples.training.draft_head import DRAFT_VOCAB, DraftHead, Features
from examples.training.draft_text import tokenizer_of_model
from examples.training.samples import Samples
from examples.training.train import interruptions, keep_freed_memory, learning_rate

TOKENS_PER_STEP = 1024
STEPS = 3
"""Steps of a chain of drafts that are learnt together."""
STEP_WEIGHT = 0.8
"""What a step's loss counts, of that of the step before it."""
WRITTEN_SHARE = 0.7
"""Share of the batches that the model has written."""
TEMPERATURE = 0.7
"""Temperature of the model's distributions that are learnt: that at which it is mostly sampled."""
WINDOWS = ((0.70, 256), (0.90, 512), (1.01, 1024))
"""(share of the run at which the stage ends, window)"""


def load_served() -> Qwen3MoeForCausalLM:
    """The shipped model, which stays as it is."""
    model = Qwen3MoeForCausalLM.from_pretrained(
        find_model(SHIPPED_MODEL),
        dtype=torch.float32,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    return model.eval().requires_grad_(False)


def frequent_tokens(samples: Samples, written: torch.Tensor) -> torch.Tensor:
    """The ids that the head proposes, in order."""
    counts = torch.bincount(written.flatten(), minlength=len(samples.tokenizer.get_vocab()))
    counts += torch.bincount(samples.stream, minlength=len(counts))
    return counts.topk(DRAFT_VOCAB).indices.sort().values


class Batches:
    """Windows of novels, of chats and of what the model wrote."""

    def __init__(self, samples: Samples, written: torch.Tensor, seed: int) -> None:
        self._samples, self._written, self._random = samples, written, random.Random(seed)

    def take(self, length: int) -> torch.Tensor:
        """Ids [rows, ``length``]."""
        rows = []
        for _ in range(TOKENS_PER_STEP // length):
            if self._random.random() < WRITTEN_SHARE:
                row = self._written[self._random.randrange(len(self._written))]
                start = self._random.randrange(len(row) - length + 1)
                rows.append(row[start : start + length])
            else:
                rows.append(self._samples.row(length)[0])
        return torch.stack(rows)


def chain(
    model: Qwen3MoeForCausalLM, features: Features, head: DraftHead, ids: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of each step of the head, and the model's own behind each position."""
    with torch.no_grad():
        served = model(input_ids=ids, use_cache=False).logits
        embedded = model.model.embed_tokens(ids[:, 1:])
    positions = ids.shape[1] - STEPS
    return head.logits(embedded, features.joined()[:, :positions], STEPS), served


def loss_of(found: list[torch.Tensor], served: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each step with the model's own distribution over the draft vocabulary."""
    with torch.no_grad():
        shares = (served.float() / TEMPERATURE).softmax(-1)[..., tokens]
    total, weights = served.new_zeros((), dtype=torch.float32), 0.0
    for step, logits in enumerate(found):
        begin = step + 1  # the first step proposes what stands behind the token after its features
        wanted = shares[:, begin : begin + logits.shape[1]]
        losses = logits.float().logsumexp(-1) * wanted.sum(-1) - (wanted * logits).sum(-1)
        total = total + STEP_WEIGHT**step * losses.mean()
        weights += STEP_WEIGHT**step
    return total / weights


@torch.no_grad()  # type: ignore[untyped-decorator]
def tokens_per_step(
    model: Qwen3MoeForCausalLM, features: Features, head: DraftHead, rows: torch.Tensor, prompt: int
) -> list[float]:
    """Shares of positions at which the first, the first two and more drafts are right.

    A step with so many drafts gives one token more than the sum of them. ``rows``: prompts of so many tokens,
    and what the model wrote behind them.
    """
    head.eval()
    right = torch.zeros(STEPS)
    count = 0
    for ids in rows.split(8):
        found, _ = chain(model, features, head, ids)
        still = torch.ones(ids.shape[0], ids.shape[1] - STEPS, dtype=torch.bool)
        still[:, : prompt - 1] = False
        still = still[:, :-1]
        count += int(still.sum())
        for step, logits in enumerate(found):
            proposed = head.tokens[logits.argmax(-1)][:, :-1]
            still = still & (proposed == ids[:, step + 2 : step + 2 + still.shape[1]])
            right[step] += still.sum()
    head.train()
    return (right / count).tolist()


def stage_train(work: Path, minutes: float, peak: float, seed: int) -> None:
    """Train until the budget is spent or a signal comes; leaves ``head.pt``."""
    keep_freed_memory()
    torch.manual_seed(seed)
    written = torch.load(work / "written.pt", weights_only=True)
    samples = Samples(load_corpus(work), tokenizer_of_model(), seed)
    batches, model = Batches(samples, written["learnt"], seed), load_served()
    features = Features(model)
    head = DraftHead(model, frequent_tokens(samples, written["learnt"]))
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in head.parameters() if each.dim() > 1], "weight_decay": 0.05},
            {"params": [each for each in head.parameters() if each.dim() < 2], "weight_decay": 0.0},
        ],
        lr=peak,
        betas=(0.9, 0.95),
        fused=True,
    )
    print(f"{sum(each.numel() for each in head.parameters()):,} parameters", flush=True)

    def save() -> None:
        torch.save({"head": head.state_dict()}, work / "head.tmp")
        os.replace(work / "head.tmp", work / "head.pt")

    stop, began, saved_at, losses, steps = interruptions(), time.monotonic(), time.monotonic(), [], 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1 and not next(stop):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share, steps, peak)
        ids = batches.take(next(window for end, window in WINDOWS if share < end))
        with torch.autocast("cpu", torch.bfloat16):
            found, served = chain(model, features, head, ids)
        loss = loss_of(found, served, head.tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        losses = [*losses[-99:], loss.item()]
        if steps % 50 == 0:
            speed = steps * TOKENS_PER_STEP / (time.monotonic() - began)
            print(
                f"step {steps} ({share:.0%}) loss {sum(losses) / len(losses):.4f} {speed:.0f} tokens/s",
                flush=True,
            )
        if time.monotonic() - saved_at > 120:
            save()
            saved_at = time.monotonic()
            for name in ("0", "0.7"):
                shares = tokens_per_step(model, features, head, written[name][::3], 64)
                print(f"step {steps} temperature {name}: {[round(each, 3) for each in shares]}", flush=True)
    save()
    print(f"done: {steps} steps", flush=True)
