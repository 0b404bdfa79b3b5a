#!/usr/bin/env python3
"""GRPO with the shipped model: rollouts of a mesh, gradients of torch.

    python -m examples.rl.grpo
    python -m examples.rl.grpo --iterations 4 --kill-at 2

Each iteration samples a group of answers to each prompt from two instances, rewards them by a rule (short
words), asserts that scoring gives each token the log-probability that it was sampled with, bit for bit, and
so a ratio of exactly 1.0; takes one gradient step; and has both instances go over to the new weights. One
instance is killed (SIGKILL) in the middle: no rollout is lost.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from examples.rl.mesh import Mesh, Rollout
from examples.rl.trainer import Trainer

OPENINGS = ["It is a truth", "Elizabeth said", "Mr. Darcy was", "My dear sister", "The ball",
            "In the morning", "I am", "He had"]  # fmt: skip
GROUP, TOKENS = 8, 24
"""Answers to each prompt, and tokens of each."""
SHORT = 3
"""Letters of a short word."""
MOST_DIFFERENCE = 1e-3
"""Most difference of torch's log-probabilities from the mesh's, which have other bits."""
KILL_AFTER = 0.1
"""Seconds from the beginning of an iteration to the death of an instance."""
MEMORY = Path("/dev/shm")


def reward(text: str) -> float:
    """Share of short words in an answer."""
    words = re.findall(r"[A-Za-z]+", text)
    return sum(len(word) <= SHORT for word in words) / len(words) if words else 0.0


def ratios_of(mesh: Mesh, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """Ratio of policy and sampling policy by token, 1.0 before the gradient step."""
    ratios = []
    for rollout, scored in zip(rollouts, mesh.score(rollouts), strict=True):
        assert scored == rollout.logprobs, "a score differs from the log-probability of sampling"
        scores = torch.tensor([scored, rollout.logprobs], dtype=torch.float64)
        ratios.append((scores[0] - scores[1]).exp().float())
        assert bool((ratios[-1] == 1.0).all())
    return ratios


def train(iterations: int, kill_at: int, work: Path) -> list[float]:
    """Run the loop; returns the mean reward of each iteration."""
    shipped = MODELS_DIRECTORY / SHIPPED_MODEL
    policy = Path(shutil.copytree(shipped, work / "policy"))
    trainer = Trainer(shipped)
    trainer.save(policy)  # in float32: what is served is what is trained
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    prompts = [tokenizer(opening).input_ids for opening in OPENINGS]
    mesh, rewards = Mesh(policy, work / "serve.log"), list[float]()
    try:
        mesh.wait()
        for number in range(iterations):
            began = time.monotonic()
            if number == kill_at:
                threading.Timer(KILL_AFTER, mesh.kill_one).start()
            groups = mesh.sample(prompts, GROUP, TOKENS, seed=1000 * number)
            rollouts = [rollout for group in groups for rollout in group]
            for rollout in rollouts:
                rollout.reward = reward(rollout.text)
            ratios = ratios_of(mesh, rollouts)
            sampled = time.monotonic()
            difference = trainer.step(groups, ratios)
            assert difference < MOST_DIFFERENCE, f"torch's log-probabilities are {difference} away"
            stepped = time.monotonic()
            mesh.update(trainer.save(work / f"weights-{number % 2}"), f"step {number + 1}")
            ended = time.monotonic()
            rewards.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
            print(
                f"step {number + 1:3}: reward {rewards[-1]:.3f}, {len(rollouts) * TOKENS} ratios are 1.0, "
                f"torch within {difference:.1e}; sampled and scored {sampled - began:.1f} s, trained "
                f"{stepped - sampled:.1f} s, new weights {ended - stepped:.1f} s"
                f"{', an instance was killed' * (number == kill_at)}",
                flush=True,
            )
        mesh.wait()
    finally:
        mesh.stop()
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=30, help="gradient steps (default: 30)")
    parser.add_argument("--kill-at", type=int, default=5, help="iteration in which an instance is killed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the instances have the others
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as work:
        rewards = train(arguments.iterations, arguments.kill_at, Path(work))
    third = max(len(rewards) // 3, 1)
    first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
    print(f"mean reward {first:.3f} in the first third, {last:.3f} in the last")


if __name__ == "__main__":
    main()
