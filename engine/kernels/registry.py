"""All kinds of layer parts, and the structures of their operations.

Only this module knows them together. A new kind of attention, of state or of product is a class of
:mod:`engine.kernels.lowering.parts` in a room of its own, a line here, and its operations in
``operations.def``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.attention.base import LAYER_ATTRIBUTE, LayerShape
from engine.kernels.adapters.sites import (
    ADAPTER_PANEL,
    ADAPTER_PART,
    ADAPTER_RUN,
    ADAPTER_SITE,
    TAGGED_ADAPTERS,
)
from engine.kernels.attention import narrow as narrow_attention
from engine.kernels.attention.attention import Attention
from engine.kernels.attention.packed import PackedAttention
from engine.kernels.attention.recognition import attention_of
from engine.kernels.cache.state_shape import LAYER_STATE, STATE_FILL, STATE_ROW
from engine.kernels.choosing.logits import DRAW, SHAPE
from engine.kernels.core.base_model import BaseModel
from engine.kernels.exchange.layouts import EXCHANGE, LINKAGE, PEER
from engine.kernels.experts import narrow as narrow_mixture
from engine.kernels.experts.mixture import Moe
from engine.kernels.experts.packed_mixture import PackedMoe
from engine.kernels.experts.routing import ROUTING
from engine.kernels.lowering.parts import FeedForward, Mixer, PackedFeedForward, PackedMixer, Packing
from engine.kernels.mlp import narrow as narrow_mlp
from engine.kernels.mlp.mlp import Mlp, PackedMlp
from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.products.quantized import ROUNDING
from engine.kernels.states import narrow_ssd, packed_delta, short_conv
from engine.kernels.states.delta import DeltaRule, delta_rule_of
from engine.kernels.states.delta_layer import DELTA_LAYER
from engine.kernels.states.packed_ssd import PackedSsd
from engine.kernels.states.side_by_side import PackedSideBySide, SideBySide
from engine.kernels.states.ssd import Ssd, ssd_of

LAYOUTS = {
    "exchange": EXCHANGE,
    "linkage": LINKAGE,
    "peer": PEER,
    "draw": DRAW,
    "shape": SHAPE,
    "routing": ROUTING,
    "rounding": ROUNDING,
    "delta_layer": DELTA_LAYER,
    "layer_state": LAYER_STATE,
    "state_row": STATE_ROW,
    "state_fill": STATE_FILL,
    "adapter_part": ADAPTER_PART,
    "adapter_panel": ADAPTER_PANEL,
    "adapter_site": ADAPTER_SITE,
    "adapter_run": ADAPTER_RUN,
    "tagged_adapters": TAGGED_ADAPTERS,
}
"""Structures that operations read, by the names that the compiled sources have for their sizes."""

RECOGNISERS: tuple[Callable[[Any, LayerShape | None, BaseModel], Mixer | None], ...] = (
    short_conv.short_conv_of,
    ssd_of,
    delta_rule_of,
    attention_of,
)
"""Recognisers of mixers, the particular before the general.

Each returns None for modules that it does not know; the last one raises. The shape is that of what attention
caches; None for modules without attention.
"""

PACKED_MIXERS: dict[type, Callable[[Any, Packing], PackedMixer]] = {
    Attention: PackedAttention,
    short_conv.ShortConv: short_conv.PackedShortConv,
    Ssd: PackedSsd,
    SideBySide: lambda mixer, packing: PackedSideBySide(
        mixer, packed_mixer(mixer.recurrence, packing), packed_mixer(mixer.attention, packing)
    ),
    DeltaRule: packed_delta.PackedDeltaRule,
}
PACKED_FEED_FORWARDS: dict[type, Callable[[Any, Packing], PackedFeedForward]] = {
    Mlp: PackedMlp,
    Moe: PackedMoe,
}


class NarrowMixer(NamedTuple):
    """Functions that copy a kind of mixer with few heads (:mod:`engine.kernels.narrow`)."""

    make_up: Callable[[MadeUpWeights, Any, Any], None]
    """Makes weights up for a module of the model."""
    tell: Callable[[Any, Any], None] = lambda mixer, module: None
    """Sets numbers that the copy's module reads."""
    shape: Callable[[Any, LayerShape], LayerShape] = lambda mixer, shape: shape
    """Shape of what the copy caches."""


NARROW_MIXERS: dict[type, NarrowMixer] = {
    Attention: NarrowMixer(narrow_attention.make_up, narrow_attention.tell, narrow_attention.narrow_shape),
    short_conv.ShortConv: NarrowMixer(short_conv.make_up),
    Ssd: NarrowMixer(narrow_ssd.make_up, narrow_ssd.tell),
    DeltaRule: NarrowMixer(packed_delta.make_up, packed_delta.tell),
}


def _make_up_both(weights: MadeUpWeights, mixer: SideBySide, modules: Any) -> None:
    for part, module in _with_modules(mixer, modules):
        NARROW_MIXERS[type(part)].make_up(weights, part, module)


def _tell_both(mixer: SideBySide, modules: Any) -> None:
    for part, module in _with_modules(mixer, modules):
        NARROW_MIXERS[type(part)].tell(part, module)


def _with_modules(mixer: SideBySide, modules: Any) -> list[tuple[Mixer, Any]]:
    """Both mixers of a layer with their modules, which come in any order."""
    recurrence, attention = sorted(modules, key=lambda module: hasattr(module, LAYER_ATTRIBUTE))
    return [(mixer.recurrence, recurrence), (mixer.attention, attention)]


NARROW_MIXERS[SideBySide] = NarrowMixer(
    _make_up_both,
    _tell_both,
    lambda mixer, shape: NARROW_MIXERS[Attention].shape(mixer.attention, shape),
)
NARROW_PARTS: dict[type, Callable[[MadeUpWeights, Any, Any], None]] = {
    Mlp: narrow_mlp.make_up,
    Moe: narrow_mixture.make_up,
}


def mixer_of(module: Any, shape: LayerShape | None, base: BaseModel) -> Mixer:
    """The mixer of a module.

    Raises:
        engine.kernels.core.stand_ins.NotRecognised: no kind knows it.
    """
    found = (recognise(module, shape, base) for recognise in RECOGNISERS)
    return next(mixer for mixer in found if mixer is not None)


def packed_mixer(mixer: Mixer, packing: Packing) -> PackedMixer:
    """The mixer with its weights laid out."""
    return PACKED_MIXERS[type(mixer)](mixer, packing)


def packed_feed_forward(mlp: FeedForward, packing: Packing) -> PackedFeedForward:
    """The feed-forward part with its weights laid out."""
    return PACKED_FEED_FORWARDS[type(mlp)](mlp, packing)
