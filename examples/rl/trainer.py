"""GRPO in torch on a model of transformers, with torch's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.rl.mesh import Rollout

LEARNING_RATE = 3e-4
MOST_GRADIENT = 1.0


class Trainer:
    """Policy in float32, and its optimiser."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimiser = torch.optim.AdamW(self._model.parameters(), LEARNING_RATE, weight_decay=0.0)

    def save(self, directory: Path) -> Path:
        """Write the policy as a checkpoint."""
        self._model.save_pretrained(directory)
        return directory

    def step(self, groups: Sequence[Sequence[Rollout]], ratios: Sequence[torch.Tensor]) -> float:
        """One gradient step; returns the largest difference of torch's log-probabilities from the mesh's.

        ``ratios``: of the policy over the one that sampled, by rollout and token. They are constants; the
        gradient is that of torch's log-probabilities.
        """
        rollouts = [rollout for group in groups for rollout in group]
        advantages = torch.cat([_advantages(group) for group in groups])
        logprobs = self._logprobs(rollouts)
        sampled = torch.tensor([rollout.logprobs for rollout in rollouts])
        weights = torch.stack([*ratios]) * advantages[:, None]
        loss = -(weights * logprobs).mean()
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MOST_GRADIENT)
        self._optimiser.step()
        return float((logprobs.detach() - sampled).abs().max())

    def _logprobs(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """[rollouts, tokens]: of the answers' tokens. Prompts are padded on the left."""
        longest = max(len(rollout.prompt) for rollout in rollouts)
        rows, masks = [], []
        for rollout in rollouts:
            missing = longest - len(rollout.prompt)
            rows.append([0] * missing + rollout.prompt + rollout.answer)
            masks.append([0] * missing + [1] * (len(rows[-1]) - missing))
        ids, mask = torch.tensor(rows), torch.tensor(masks)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._model(ids, attention_mask=mask, position_ids=positions).logits[:, longest - 1 : -1]
        chosen: torch.Tensor = logits.log_softmax(-1).gather(2, ids[:, longest:, None])[..., 0]
        return chosen


def _advantages(group: Sequence[Rollout]) -> torch.Tensor:
    rewards = torch.tensor([rollout.reward for rollout in group])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
