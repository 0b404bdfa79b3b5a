"""The list of all kinds of operations' structures, which no room but this one knows together."""

from __future__ import annotations

from engine.kernels.choosing.logits import DRAW, SHAPE
from engine.kernels.exchange.layouts import EXCHANGE, LINKAGE, PEER
from engine.kernels.experts.routing import ROUTING
from engine.kernels.products.quantized import ROUNDING

LAYOUTS = {
    "exchange": EXCHANGE,
    "linkage": LINKAGE,
    "peer": PEER,
    "draw": DRAW,
    "shape": SHAPE,
    "routing": ROUTING,
    "rounding": ROUNDING,
}
"""Structures that operations read, by the names that the compiled sources have for their sizes."""
