"""Parts of modules with a gated delta rule, by role, however families name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.kernels.core.stand_ins import Gives, made_up, with_parts
from engine.kernels.products.projections import Linear, linear_of, whole
from engine.kernels.states.delta_layer import DeltaSizes
from engine.model.quantization.attached import rows_of

GATE_MODULE = "forget_gate"
"""Name of a module of its own that makes decays."""
OUT = "out_proj", "o_proj"
NORM = "norm", "o_norm"
KEY_HEADS = "num_k_heads"
"""Attribute with the number of key heads; without it, that of value heads."""
BOUND = "lower_bound"


class Source(NamedTuple):
    """Where some numbers of a token come from."""

    path: str
    """Name of the linear layer that gives them, with a dot behind another module's."""
    places: torch.Tensor | None = None
    """Which of its outputs they are, in order; None: all of them."""
    before: str | None = None
    """The same from hidden numbers to a layer's inputs; None: it reads them itself."""

    def of(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """These numbers [tokens, ...] out of what the layers gave."""
        given = rows[self.path]
        return given if self.places is None else given[:, self.places]


@dataclass(frozen=True)
class Outputs:
    """Some outputs of a projection, taken out of it when weights are laid out."""

    weight: torch.Tensor
    """[outputs, inputs]"""
    places: torch.Tensor | None
    """Which of them, in order; None: all."""
    down: torch.Tensor | None = None
    """Weight [inputs, hidden] of a layer before it; None: it reads the hidden numbers."""

    @property
    def rows(self) -> torch.Tensor:
        """Weights of these outputs."""
        return self.weight if self.places is None else rows_of(self.weight, self.places)


@dataclass(frozen=True)
class DeltaParts:
    """Parts of a module with a gated delta rule, by role."""

    module: Any
    sizes: DeltaSizes
    sources: tuple[Source, ...]
    """Projections to queries, keys, values, gates, decays and steps."""
    out: str

    @property
    def norm(self) -> Any:
        """The norm with a gate, of each head's result."""
        return _first(self.module, NORM)

    @property
    def owner(self) -> Any:
        """The module whose parameters make decays."""
        return getattr(self.module, GATE_MODULE, self.module)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the projections; some parameters are float32 in any model."""
        dtype: torch.dtype = linear_of(self.layer(self.out)).weight.dtype
        return dtype

    def layer(self, path: str) -> Any:
        """A linear layer by its path."""
        return self.module.get_submodule(path)

    def linears(self) -> list[Linear]:
        """All projections but the last one."""
        paths = {path for each in self.sources for path in (each.before, each.path) if path is not None}
        return [whole(self.layer(path)) for path in sorted(paths)]

    def outputs(self, source: Source) -> Outputs:
        """Weights of a source."""
        down = None if source.before is None else whole(self.layer(source.before)).weight
        return Outputs(whole(self.layer(source.path)).weight, source.places, down)

    def made_up_rows(self, tokens: int) -> dict[str, torch.Tensor]:
        """Made-up outputs [tokens, outputs] of the projections, in the module's type."""
        paths = dict.fromkeys(each.path for each in self.sources)
        return {
            path: made_up(tokens, linear_of(self.layer(path)).outputs, seed=seed, dtype=self.dtype)
            for seed, path in enumerate(paths)
        }

    def run(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Input [tokens, width] of the last projection that the module's own code makes."""
        tokens = len(next(iter(rows.values())))
        stands: dict[str, Any] = {path: Gives(each[None]) for path, each in rows.items()}
        for each in self.sources:
            if each.before is not None:
                few = linear_of(self.layer(each.before)).outputs
                stands[each.before] = Gives(made_up(1, tokens, few, seed=1, dtype=self.dtype))
        inner = {path.split(".")[1]: stands.pop(path) for path in [*stands] if "." in path}
        if inner:
            stands[GATE_MODULE] = with_parts(self.owner, inner)
        out = Gives(lambda given: given)
        alone = with_parts(self.module, stands | {self.out: out})
        alone.__dict__.pop("forward", None)  # the one that computes on the grid
        hidden = linear_of(self.layer(self.out)).weight.shape[0]
        alone(made_up(1, tokens, hidden, seed=2, dtype=self.dtype))
        return out.given[0].reshape(tokens, -1)


def parts_of(module: Any, sizes: DeltaSizes | None = None) -> DeltaParts | None:
    """Parts of a module with a gated delta rule; None for other modules.

    ``sizes``: of a copy of it with fewer heads, for which the parts are.
    """
    names = {name for name, _ in module.named_modules()}
    norm, out = _first(module, NORM), next((name for name in OUT if name in names), None)
    owner = getattr(module, GATE_MODULE, module)
    has_all = hasattr(module, "conv1d") and hasattr(owner, "A_log") and hasattr(owner, "dt_bias")
    if out is None or not has_all or getattr(norm, "weight", None) is None:
        return None
    sizes = sizes or _sizes(module, owner, norm)
    sources = _joined_by_head(names, sizes) or _by_role(names, sizes)
    return None if sources is None else DeltaParts(module, sizes, tuple(sources), out)


def _sizes(module: Any, owner: Any, norm: Any) -> DeltaSizes:
    heads, value_dim = int(owner.A_log.numel()), int(norm.weight.numel())
    key_heads = int(getattr(module, KEY_HEADS, heads))
    of_keys = len(module.conv1d.weight) - heads * value_dim
    return DeltaSizes(heads, key_heads, of_keys // (2 * key_heads), value_dim)


def _joined_by_head(names: set[str], sizes: DeltaSizes) -> list[Source] | None:
    """Sources where two layers give all, key head by key head."""
    if not {"in_proj_qkvz", "in_proj_ba"} <= names:
        return None
    each = sizes.heads // sizes.key_heads
    of_values = each * sizes.value_dim

    def places(*widths: int) -> list[torch.Tensor]:
        by_head = torch.arange(sizes.key_heads * sum(widths)).view(sizes.key_heads, -1)
        return [part.flatten() for part in by_head.split(widths, dim=1)]

    first = [
        Source("in_proj_qkvz", some) for some in places(sizes.key_dim, sizes.key_dim, of_values, of_values)
    ]
    steps, decays = (Source("in_proj_ba", some) for some in places(each, each))
    return [*first, decays, steps]


def _by_role(names: set[str], sizes: DeltaSizes) -> list[Source] | None:
    """Sources where queries, keys and values, gates, decays and steps have layers of their own."""
    if "in_proj_qkv" in names:
        together = torch.arange(sizes.mixed).split([sizes.keys, sizes.keys, sizes.values])
        mixed = [Source("in_proj_qkv", places) for places in together]
    else:
        mixed = [Source(name) for name in ("q_proj", "k_proj", "v_proj")]
    others = [next((way for way in ways if way.path in names), None) for ways in ROLES]
    sources = [*mixed, *(each for each in others if each is not None)]
    complete = all(each is not None for each in others) and all(each.path in names for each in sources)
    return sources if complete else None


ROLES = (
    (Source("in_proj_z"), Source("g_proj"), Source("g_b_proj", before="g_a_proj")),
    (
        *(Source(name) for name in ("in_proj_a", "a_proj", f"{GATE_MODULE}.f_proj")),
        Source(f"{GATE_MODULE}.f_b_proj", before=f"{GATE_MODULE}.f_a_proj"),
    ),
    (Source("in_proj_b"), Source("b_proj")),
)
"""Layers that give gates, decays and steps, as families name them."""


def _first(module: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)
