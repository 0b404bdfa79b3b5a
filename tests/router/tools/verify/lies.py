"""Planted lies about answers, each with the honest answer to what its capsule claims."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from engine.sampling import SamplingParams, ThinkingBudget
from router.capsule import Capsule
from router.recorded import RecordedSample, first_difference
from tests.router.tools.verify.answers import DIRECTORY, SAMPLED, Server, edited, honest, named_as

PENALISED = SAMPLED | {"frequency_penalty": 0.9}
BUDGET = ThinkingBudget(tokens=6, begin=(), end=(70,))


def answered(params: dict[str, Any], **how: Any) -> Capsule:
    return honest().answer(SamplingParams(**params), **how)


def result_of(capsule: Capsule) -> RecordedSample:
    return capsule.prompts[0].samples[0].result


class Lie(msgspec.Struct, frozen=True):
    """A capsule that claims to be another answer than it is."""

    capsule: Capsule
    honest: Capsule
    """The answer that it claims to be."""
    words: str
    """Explanation that must be found."""

    @property
    def first(self) -> int:
        """The first token that shows the lie."""
        difference = first_difference(result_of(self.capsule), result_of(self.honest))
        assert difference is not None
        return difference.index


def token() -> Lie:
    truth = answered(SAMPLED)
    ids = result_of(truth).token_ids
    changed = edited(truth, {"token_ids": [*ids[:17], ids[17] ^ 1, *ids[18:]]})
    return Lie(changed, truth, "this place alone was changed")


def logprob() -> Lie:
    truth = answered(SAMPLED)
    logprobs = list(result_of(truth).logprobs or ())
    logprobs[5] = (logprobs[5] or 0.0) - 2**-20
    return Lie(edited(truth, {"logprobs": logprobs}), truth, "this place alone was changed")


def last_logprob() -> Lie:
    """A change that no later token shows, either."""
    truth = answered(SAMPLED)
    logprobs = result_of(truth).logprobs or ()
    changed = edited(truth, {"logprobs": [*logprobs[:-1], (logprobs[-1] or 0.0) - 2**-20]})
    return Lie(changed, truth, "this place alone was changed")


def cut() -> Lie:
    truth = answered(SAMPLED)
    result = result_of(truth)
    short = {"token_ids": result.token_ids[:9], "logprobs": (result.logprobs or ())[:9]}
    return Lie(edited(truth, short), truth, "the answer was cut")


def capped() -> Lie:
    """An answer of a lower limit than the capsule names."""
    short = answered(SAMPLED | {"max_tokens": 20})
    return Lie(edited(short, params=SAMPLED), answered(SAMPLED), "the answer was cut")


def seed() -> Lie:
    lie = edited(answered(SAMPLED), seed="8")
    return Lie(lie, answered(SAMPLED, seed=8), "the model gives its tokens these log-probabilities but")


def greedy() -> Lie:
    lie = edited(answered(SAMPLED | {"temperature": 0.0}), params=SAMPLED)
    return Lie(lie, answered(SAMPLED), "it is what the model gives greedily; ")


def penalty() -> Lie:
    lie = edited(answered(SAMPLED), params=PENALISED)
    return Lie(lie, answered(PENALISED), "it is what the model gives without penalties")


def reasoning() -> Lie:
    """Reasoning that was ended early, under parameters without a budget."""
    lie = edited(answered(SAMPLED | {"thinking": BUDGET}), params=SAMPLED)
    return Lie(lie, answered(SAMPLED), "the model gives its tokens these log-probabilities but draws others")


def prompt() -> Lie:
    """An answer to another prompt than the capsule names."""
    other = "You are short. It was a dark"
    truth = answered(SAMPLED)
    lie = edited(answered(SAMPLED, text=other), prompt_ids=truth.prompts[0].prompt_ids)
    return Lie(lie, truth, "the model gives other log-probabilities: other weights, another prompt")


def fine_tune(directory: Path) -> Lie:
    """An answer of a fine-tune, under the name and class of the model."""
    claimed = honest().numerics
    lie = tuned(directory).answer(SamplingParams(**SAMPLED), claimed=claimed)
    return Lie(named_as(lie, honest().text), answered(SAMPLED), "the model gives other log-probabilities")


def cache() -> Lie:
    lie = Server(kept="int8").answer(SamplingParams(**SAMPLED), claimed=honest().numerics)
    return Lie(lie, answered(SAMPLED), "it is what the model gives with --kv-cache-dtype int8, which is not")


def weights() -> Lie:
    lie = Server(quantization="int8").answer(SamplingParams(**SAMPLED), claimed=honest().numerics)
    return Lie(lie, answered(SAMPLED), "it is what the model gives with --quantization int8, which is not")


LIES: dict[str, Callable[[], Lie]] = {
    make.__name__: make
    for make in (token, logprob, last_logprob, cut, capped, seed, greedy, penalty, reasoning, prompt)
}
QUANTISED: dict[str, Callable[[], Lie]] = {make.__name__: make for make in (cache, weights)}
"""Lies that are explained by reading the checkpoint again with other settings."""


def tuned(directory: Path) -> Server:
    """Server of a fine-tune."""
    return Server(tuned_copy(directory))


def tuned_copy(directory: Path) -> Path:
    """A fine-tune in a new directory: the same model but for part of a layer."""
    directory.mkdir()
    for path in DIRECTORY.iterdir():
        (directory / path.name).symlink_to(path)
    (file,) = directory.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = next(name for name in tensors if "layers.0" in name and "q_proj" in name)
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    tensors[name] = (tensors[name].float() + 0.02 * noise).to(tensors[name].dtype)
    file.unlink()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return directory
