"""Models with weights that formats' own libraries widened, run by torch.

Where a format rounds activations, compressed-tensors' own function rounds them. Experts are one tensor for a
layer in transformers; here each is computed by itself, so that its inputs can be rounded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers import AutoModelForCausalLM

Inputs: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""What becomes of the inputs of a matrix, by its name without ``.weight``."""


class _Experts(torch.nn.Module):
    """The experts of a layer, one by one."""

    def __init__(self, stacked: Any, name: str, inputs: Inputs) -> None:
        super().__init__()
        self._stacked, self._name, self._inputs = stacked, name, inputs

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self._stacked.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                found = self._one(expert, hidden[token]) * top_k_weights[token, place, None]
                out.index_add_(0, token, found)
        return out

    def _one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        name = f"{self._name}.{expert}"
        rows = self._inputs(f"{name}.up_proj", rows)
        gate, up = F.linear(rows, self._stacked.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = self._inputs(f"{name}.down_proj", self._stacked.act_fn(gate) * up)
        return F.linear(inner, self._stacked.down_proj[expert])


def loss_by_torch(directory: Path, windows: Sequence[Sequence[int]], inputs: Inputs | None = None) -> float:
    """Mean cross entropy in nats per token, computed in float32.

    It is that of the windows but for their first tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if inputs is not None:
        change_inputs(model, inputs)
    total = count = 0.0
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window])
            logits = model(ids[:, :-1]).logits[0]
            total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(window) - 1
    return total / count


def change_inputs(model: Any, inputs: Inputs) -> None:
    """Let all linear layers but the head, and all experts, get other inputs."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(
                lambda _module, given, name=name: (inputs(name, given[0]), *given[1:])
            )
        if name.endswith(".mlp.experts"):
            model.get_submodule(name.removesuffix(".experts")).experts = _Experts(module, name, inputs)


def rounded_by_library(args: QuantizationArgs, scales: dict[str, torch.Tensor]) -> Inputs:
    """Inputs as the library rounds them.

    ``scales``: where they do not follow from the inputs.
    """

    def rounded(name: str, x: torch.Tensor) -> torch.Tensor:
        if args.dynamic:
            scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
        else:
            scale, zero = scales[name], torch.zeros_like(scales[name])
        return fake_quantize(x, scale, zero, args)

    return rounded


def largest_inputs(directory: Path, windows: Sequence[Sequence[int]]) -> dict[str, float]:
    """The greatest size of an input of each matrix, as calibrations find it."""
    largest: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> torch.Tensor:
        largest[name] = max(largest.get(name, 0.0), float(x.abs().max()))
        return x

    loss_by_torch(directory, windows, note)
    return largest
