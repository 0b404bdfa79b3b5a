"""Mixtures: a router, its experts, and experts of all tokens beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.kernels.adapters.sites import Site, in_whole_panels
from engine.kernels.core.rows import SLACK, pitch_of
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.experts.form import ExpertForm, form_of
from engine.kernels.experts.routing import (
    Routing,
    router_of,
    routing_of,
    scaled_routing_of,
    weights_of,
)
from engine.kernels.lowering.layer_order import Inside
from engine.kernels.lowering.parts import FeedForward
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.mlp.mlp import Mlp, mlp_of
from engine.kernels.norms.norm import Norm, norm_of
from engine.kernels.products.projections import whole
from parallel.tensor_parallel import SummedExperts

SHARED = {"shared_expert", "shared_experts", "shared_mlp"}
"""Names of an expert of all tokens in a mixture."""
SHARED_GATE = "shared_expert_gate"

SCORES, IDS, ROUTER_LOGITS, SHARED_LOGITS = "scores", "ids", "router_logits", "shared_logits"
"""Names of scratch rows: scores and ids of a token's experts; logits."""
WIDENED, MIXED, EXPERT_MIDDLE = "widened", "mixed", "expert_middle"
"""Names of scratch rows: float32 rows, experts' results, and their middle."""


@dataclass(frozen=True)
class MoeNorms:
    """Norms of the parts of a mixture that stands beside an MLP, its shared expert.

    The layer's norms are before the MLP, and behind the sum of both.
    """

    router: Norm
    """Norm before the router."""
    experts: Norm
    """Norm before the experts."""
    shared_last: Norm
    """Norm behind the MLP."""
    experts_last: Norm
    """Norm behind the experts."""


@dataclass(frozen=True)
class Moe:
    """A router and its experts."""

    router: torch.Tensor
    """[experts, hidden]; may be float32 in a model of another type."""
    router_bias: torch.Tensor | None
    routing: Routing
    experts: Any
    """The module with the weights of the experts here."""
    form: ExpertForm
    is_partial: bool
    """Whether its result is a sum over the tensor-parallel ranks."""
    num_experts: int
    dtype: torch.dtype
    """Type of the rows."""
    first_whole: int | None = None
    """Number of the first expert here, where each tensor-parallel rank has whole ones."""
    shared: Mlp | None = None
    """An expert of all tokens, whose result is added."""
    shared_gate: torch.Tensor | None = None
    """[1, hidden]: the sigmoid of its product is a factor on the shared expert's result."""
    norms: MoeNorms | None = None
    """None: the layer's norms are those of all parts."""

    has_last_norm: bool = False
    """Whether a norm comes between what it gives and the stream."""

    @property
    def width(self) -> int:
        """Numbers between the two products of an expert."""
        return self.form.width

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.routing.top_k

    @property
    def has_parts(self) -> bool:
        """Whether ranks have some inputs each of the experts' last product."""
        return self.is_partial and self.first_whole is None

    @property
    def num_sums(self) -> int:
        return self.is_partial + (0 if self.shared is None else self.shared.num_sums)

    @property
    def sums_per_token(self) -> int:
        return self.top_k if self.is_partial else 1

    def matrices(self) -> list[torch.Tensor]:
        shared = [] if self.shared is None else self.shared.matrices()
        return [*shared, self.router, getattr(self.experts, self.form.first), self.experts.down_proj]

    def sites(self, *, is_spread: bool) -> list[Site]:
        """Adapters of the experts' first product, and of their last one.

        ``is_spread``: whether other instances have experts, too.
        """
        form, count = self.form, self.num_experts if is_spread else len(self.experts.down_proj)
        outputs = torch.arange((1 + form.has_gate) * form.width)
        order = in_whole_panels(form.halves(outputs) if form.has_gate else (outputs,))
        experts: dict[str, Any] = {"modules": (self.experts,), "experts": count, "times": self.top_k}
        experts["is_spread"] = is_spread
        return [
            Site(sizes=(len(outputs),), inputs=form.hidden, order=order, parameter=form.first, **experts),
            Site(sizes=(form.hidden,), inputs=form.width, parameter="down_proj", **experts),
        ]

    def scratch(self) -> list[Scratch]:
        floats, hidden = {"dtype": torch.float32}, self.router.shape[1]
        is_wide = self.router.dtype != self.dtype
        return [
            *([] if self.shared is None else self.shared.scratch()),
            Scratch(SCORES, self.top_k, **floats),
            Scratch(IDS, self.top_k, dtype=torch.int64),
            Scratch(ROUTER_LOGITS, self.num_experts, **floats),
            Scratch(SHARED_LOGITS, 1, **floats),
            Scratch(WIDENED, pitch_of(hidden, torch.float32) if is_wide else 0, **floats),
            Scratch(MIXED, hidden if self.has_last_norm else 0),
            Scratch(EXPERT_MIDDLE, self.width, per="group token", times=self.top_k, slack=SLACK),
        ]

    def cut_inputs(self) -> list[int]:
        own = [self.width] if self.has_parts else []
        return own + ([] if self.shared is None else self.shared.cut_inputs())

    def whole(self) -> Moe:
        shared = None if self.shared is None else self.shared.whole()
        return replace(self, is_partial=False, first_whole=None, shared=shared)


def mixture_of(block: Any, beside: Any, hidden: int, dtype: torch.dtype) -> Moe:
    """The mixture of a block: router, experts, and perhaps a shared expert."""
    children = {
        name
        for name, part in block.named_children()
        if part is not norm_in(block) and not isinstance(part, torch.nn.Identity)
    }
    children -= {"experts", "gate", "router", "act_fn"}
    shared = shared_of(block)
    if beside is not None and shared is not None:
        raise NotRecognised("two shared experts")
    others = children - SHARED - {SHARED_GATE}
    if others or len(children & SHARED) > 1 or (SHARED_GATE in children and shared is None):
        raise NotRecognised(f"{type(block).__name__} has the parts {', '.join(sorted(children))}")
    experts = block.experts
    form, is_partial = _form_of(experts, hidden)
    router, bias = weights_of(router_of(block))
    first_whole = experts.first_whole if is_partial else None
    if is_partial and form.has_bias and first_whole is None:
        raise NotRecognised("experts with biases of which tensor-parallel ranks have parts")
    return Moe(
        router=router,
        router_bias=None if bias is None else bias.detach().to(torch.float32, copy=True),
        routing=routing_of(block, dtype),
        experts=experts,
        form=form,
        is_partial=is_partial,
        num_experts=router.shape[0],
        dtype=dtype,
        first_whole=first_whole,
        shared=next((mlp_of(each) for each in (shared, beside) if each is not None), None),
        shared_gate=whole(getattr(block, SHARED_GATE)).weight if SHARED_GATE in children else None,
    )


def _form_of(experts: Any, hidden: int) -> tuple[ExpertForm, bool]:
    """The form of experts, and whether they give partial sums."""
    form = form_of(experts)
    if form.hidden != hidden:
        raise NotRecognised("experts laid out the other way round")
    return form, isinstance(experts, SummedExperts)


def mixture_beside(layer: Any, inside: Inside, mlp: FeedForward, hidden: int, dtype: torch.dtype) -> Moe:
    """A mixture that stands beside an MLP, each with norms of its own."""
    assert isinstance(mlp, Mlp)
    experts = getattr(layer, inside.experts)
    form, is_partial = _form_of(experts, hidden)
    product, norm, routing = scaled_routing_of(getattr(layer, inside.router))
    names = inside.before_experts, inside.behind_mlp, inside.behind_experts
    return Moe(
        router=whole(product).weight,
        router_bias=None,
        routing=routing,
        experts=experts,
        form=form,
        is_partial=is_partial,
        num_experts=product.weight.shape[0],
        dtype=dtype,
        shared=mlp,
        norms=MoeNorms(norm, *(norm_of(getattr(layer, name), hidden) for name in names)),
    )


def norm_in(block: Any) -> Any:
    """The norm of what a mixture gives, if it is one of its parts."""
    found = [part for name, part in block.named_children() if name.endswith("norm")]
    return found[0] if len(found) == 1 else None


def shared_of(block: Any) -> Any:
    """The module of a mixture's expert of all tokens; None if it has none."""
    return next((part for name, part in block.named_children() if name in SHARED), None)
