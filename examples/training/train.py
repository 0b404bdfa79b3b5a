"""The training: its schedule, its loop, its checkpoints."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3MoeForCausalLM

from examples.training.corpus import Corpus, load_corpus
from examples.training.model import AUX_COEFFICIENT, Dropout, build_model
from examples.training.samples import IGNORE, Samples

#: (share of the run at which the stage ends, sequence length)
SEQUENCE_SCHEDULE = ((0.60, 256), (0.88, 512), (1.01, 1024))
#: The first passes over the text go without dropout, which is faster; from this share of the run on the model
#: would begin to learn the text by heart.
DROPOUT_FROM, DROPOUT = 0.49, 0.15


@dataclass
class Progress:
    """Progress of the training.

    It travels with the checkpoint and ends up in the model card.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float = math.nan
    validation_loss: float = math.nan
    history: list[dict[str, float]] = field(default_factory=list)


def validation_batches(corpus: Corpus, tokenizer: Tokenizer, length: int = 512) -> list[torch.Tensor]:
    """The held-out text as windows of ``length`` + 1 ids, four to a batch."""
    windows = []
    for text in corpus.validation:
        ids = torch.tensor(tokenizer.encode(text).ids)
        windows += [ids[at : at + length + 1] for at in range(0, len(ids) - length, length)]
    return list(torch.stack(windows).split(4))


@torch.no_grad()  # type: ignore[untyped-decorator]
def validate(model: Qwen3MoeForCausalLM, batches: list[torch.Tensor], bf16: bool) -> float:
    """Mean cross entropy (nats per token) over the held-out text."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        labels = batch[:, 1:].reshape(-1)
        total += F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum").item()
        count += labels.numel()
    model.train()
    return total / count


def keep_freed_memory() -> None:
    """Make glibc keep large blocks: faulting them in again costs a third of a step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def interruptions() -> Iterator[bool]:
    """Yields False until the process is asked to stop (SIGINT, SIGTERM), then True."""
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.append(True))
    while True:
        yield bool(asked)


def learning_rate(share: float, steps: int, peak: float) -> float:
    """Learning rate: linear over the first 200 steps, then half a cosine to 3%."""
    return (
        peak * min(1.0, (steps + 1) / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))
    )


def stage_train(work: Path, args: argparse.Namespace) -> None:
    """Train until the budget is spent or a signal comes; leaves ``checkpoint.pt``."""
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    corpus = load_corpus(work)
    held_out = validation_batches(corpus, tokenizer)
    model = build_model(args.experts)
    dropout = Dropout(model)
    decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    progress = Progress()
    checkpoint = work / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
    samples = Samples(corpus, tokenizer, args.seed + progress.steps)
    print(
        f"{model.num_parameters():,} parameters, {len(samples.stream):,} training tokens, "
        f"{sum(b[:, 1:].numel() for b in held_out):,} held out",
        flush=True,
    )

    def save_checkpoint() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": asdict(progress),
        }
        torch.save(state, checkpoint.with_suffix(".tmp"))
        os.replace(checkpoint.with_suffix(".tmp"), checkpoint)

    stop = interruptions()
    began = time.monotonic() - progress.seconds
    saved_at = time.monotonic()
    losses: list[float] = []
    model.train()
    while True:
        progress.seconds = time.monotonic() - began
        share = progress.steps / args.steps if args.steps else progress.seconds / (60 * args.minutes)
        if share >= 1 or next(stop):
            break
        length = next(length for end, length in SEQUENCE_SCHEDULE if share < end)
        dropout.rate = DROPOUT if share >= DROPOUT_FROM else 0.0
        rate = learning_rate(share, progress.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = samples.batch(length)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        (loss + AUX_COEFFICIENT * output.aux_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.steps += 1
        progress.tokens += ids.numel()
        losses = [*losses[-199:], loss.item()]
        progress.train_loss = sum(losses) / len(losses)
        if progress.steps % 100 == 0:
            speed = progress.tokens / (time.monotonic() - began)
            print(
                f"step {progress.steps} ({share:.0%}) loss {progress.train_loss:.3f} "
                f"aux {output.aux_loss.item():.3f} norm {norm:.2f} rate {rate:.2e} "
                f"length {length} {speed:.0f} tokens/s",
                flush=True,
            )
        if progress.steps % 500 == 0:
            progress.validation_loss = validate(model, held_out, args.bf16)
            progress.history.append(
                {"step": progress.steps, "train": progress.train_loss, "validation": progress.validation_loss}
            )
            print(f"step {progress.steps} validation loss {progress.validation_loss:.3f}", flush=True)
        if time.monotonic() - saved_at > 120:
            save_checkpoint()
            saved_at = time.monotonic()
    progress.validation_loss = validate(model, held_out, args.bf16)
    save_checkpoint()
    print(f"done: {progress.steps} steps, validation loss {progress.validation_loss:.3f}", flush=True)
