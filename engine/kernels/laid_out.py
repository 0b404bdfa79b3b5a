"""A decoder's weights as the kernels read them, which a model can exchange."""

from __future__ import annotations

from typing import Any

from engine.kernels.adapters.sites import Sites
from engine.kernels.core.library import KernelLibrary
from engine.kernels.decoder import DecoderModel
from engine.kernels.lowering.parts import Packing
from engine.kernels.position_tables import PositionTables
from engine.kernels.products.packing import Packer
from engine.kernels.step_list import PackedDecoder


class LaidOut:
    """Weights of a decoder, laid out, with its tables by position."""

    def __init__(
        self,
        library: KernelLibrary,
        decoder: DecoderModel,
        ranks: int,
        spread: Any = None,
        sites: Sites | None = None,
    ) -> None:
        """``ranks``: tensor-parallel ranks. ``spread``: packs experts that come and go; None: they stay.

        ``sites``: where adapters add something; None: nowhere.
        """
        packer = Packer(library)
        self.decoder = decoder
        self.sizes = decoder.needs, decoder.cached, decoder.states
        """Sizes that buffers and caches depend on.

        The decoder cannot give them once the model's own tensors are let go.
        """
        self.packed = PackedDecoder(decoder, Packing(packer, decoder.dtype, ranks, spread, sites))
        self.positions = PositionTables(decoder)
        self.weight_bytes, self.saved_bytes = packer.num_bytes, packer.saved_bytes
        """Bytes of the weights as they are laid out, and bytes that this saves.

        Without spread experts.
        """
        self.quantized_bytes, self.half_bytes = packer.quantized_bytes, packer.half_bytes
        """Bytes of packed weights of 4 and 8 bits, and of weights in float16."""

    def give_back(self) -> None:
        """Let go of the weights; only their sizes stay."""
        self.packed.give_back()

    def __repr__(self) -> str:
        return f"<LaidOut {self.packed!r}, {self.weight_bytes} bytes>"
