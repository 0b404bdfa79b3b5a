"""Matrix products of one rank's local experts on the CPU, in PyTorch.

There is one product for each expert that has any rows.

What an expert computes is defined by transformers' experts modules: fused ``gate_up_proj`` [E, 2I, H] (or
``up_proj``), ``down_proj`` [E, H, I], the flags that their ``use_experts_implementation`` sets, and
``_apply_gate``. transformers' own grouped function sorts, counts and puts back in order by itself; here
that was done for all ranks' rows already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

PRODUCT = "lockstep_product"
"""Name of the attribute that replaces the matrix product of an experts parameter.

It is a function of an expert's number and rows [n, in], which gives [n, out].
"""


def has_post_norm(module: Any) -> bool:
    """Whether an experts module norms each expert's output; transformers 5.17 does not tell."""
    return getattr(module, "has_post_expert_norm", False)


class ExpertProducts:
    """Outputs of local experts on the CPU, for any number of layers."""

    def __init__(self) -> None:
        self._weights: WeakKeyDictionary[Any, dict[str, list[torch.Tensor]]] = WeakKeyDictionary()
        """Views by module, name and expert, [in, out]: making one costs a small product."""

    def compute(
        self, module: Any, rows: torch.Tensor, counts: Sequence[int], tags: Any = None, held: Any = None
    ) -> torch.Tensor:
        """Outputs [n, H] of rows [n, H] that are sorted by expert.

        The first ``counts[0]`` rows go through the module's expert 0, and so on. ``tags`` [n] name adapters,
        and ``held`` the experts here: None, as adapters need native kernels.
        """
        assert tags is None, (tags, held)
        first = "gate_up_proj" if module.has_gate else "up_proj"
        inner = self._linear(module, first, rows, counts)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outputs = self._linear(module, "down_proj", inner, counts)
        if has_post_norm(module):
            outputs = module.post_expert_norm(outputs)
        return outputs.to(rows.dtype)

    def _linear(self, module: Any, name: str, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        weights = self._by_expert(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        rows = rows.to(weights[0].dtype)
        outputs = rows.new_empty(len(rows), weights[0].shape[1])
        parts, results = torch.split(rows, counts), torch.split(outputs, counts)
        product = getattr(getattr(module, name), PRODUCT, None)
        for expert, count in enumerate(counts):
            if not count:
                continue
            if product is not None:
                results[expert].copy_(product(expert, parts[expert]))
            else:
                torch.mm(parts[expert], weights[expert], out=results[expert])
            if bias is not None:
                results[expert].add_(bias[expert])
        return outputs

    def _by_expert(self, module: Any, name: str) -> list[torch.Tensor]:
        weight = getattr(module, name)
        known = self._weights.setdefault(module, {})
        views = known.get(name)
        if views is None or len(views) != len(weight) or views[0].data_ptr() != weight.data_ptr():
            plain = weight.detach()
            views = known[name] = list((plain if module.is_transposed else plain.transpose(1, 2)).unbind())
        return views
