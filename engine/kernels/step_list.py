"""A decoder's weights, laid out once, and its list of operations for ``step.cpp``.

What the last layer gives for a token is read only to find the token behind it. So once the keys and values
of all tokens are in the cache, that layer goes on with those alone whose logits are wanted: of a prompt, one.
Where a prediction layer reads it (:mod:`engine.kernels.step_ends`), all of them go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from engine.kernels.choosing.output import PackedOutput
from engine.kernels.core.operations import OperationKind
from engine.kernels.decoder import DecoderModel, Layer
from engine.kernels.embedding.embedding import PackedEmbedding
from engine.kernels.embedding.per_layer import PackedInput
from engine.kernels.embedding.token_product import TokenProduct
from engine.kernels.lowering.parts import KeptNumbers, Packing
from engine.kernels.lowering.writer import StepList, Writer
from engine.kernels.registry import packed_feed_forward, packed_mixer
from engine.kernels.step_ends import INNER, StepEnds

OPERATIONS_PER_LAYER = 55
OTHER_OPERATIONS = 10


class PackedLayer:
    """One layer whose weights are laid out."""

    def __init__(self, layer: Layer, packing: Packing) -> None:
        self.layer = layer
        self.mixer = None if layer.mixer is None else packed_mixer(layer.mixer, packing)
        self.mlp = None if layer.mlp is None else packed_feed_forward(layer.mlp, packing)
        self.input = None if layer.input is None else PackedInput(layer.input, packing)


def _kept_numbers(layers: Sequence[Layer]) -> list[KeptNumbers]:
    """Numbers of what each layer keeps."""
    mixers = [layer.mixer for layer in layers]
    caches = accumulate((each is not None and each.cached is not None for each in mixers), initial=0)
    states = accumulate((each is not None and each.state is not None for each in mixers), initial=0)
    return [KeptNumbers(*each) for each in zip(caches, states, strict=True)][: len(layers)]


class PackedDecoder:
    """The weights of all layers, and of the output layer.

    The embedding and the norms are read as they are.
    """

    def __init__(self, decoder: DecoderModel, packing: Packing) -> None:
        self.decoder = decoder
        self.layers = [PackedLayer(layer, packing) for layer in decoder.layers]
        self._kept = _kept_numbers(decoder.layers)
        self.output = None if decoder.output is None else PackedOutput(decoder.output, packing)
        embedding = decoder.embedding
        self.embedding = None if embedding is None else PackedEmbedding(embedding, packing)

    def __repr__(self) -> str:
        return f"<PackedDecoder {len(self.layers)} layers, {self.decoder.dtype}>"

    def give_back(self) -> None:
        """Let go of all weights: no step can be computed with them any more."""
        self.layers, self.output, self.embedding = [], None, None

    @property
    def most_operations(self) -> int:
        """Bound of the operations of a step."""
        return OPERATIONS_PER_LAYER * len(self.layers) + OTHER_OPERATIONS

    def write(self, writer: Writer, ends: StepEnds, *, exchanges: bool) -> StepList:
        """The list of a step; ``exchanges``: with the exchange of experts."""
        if self.embedding is not None and not ends.from_rows:
            self.embedding.write(writer)
        for number, packed in enumerate(self.layers):
            is_cut = packed.mlp is not None and packed.mlp.exchanges and not exchanges
            selects = packed is self.layers[-1] and not is_cut and self.output is not None
            selects = selects and not writer.facts.computes_all
            if number in ends.kept_layers:
                writer.scale(1.0, writer.buffers[INNER.format(number)])
            self._write_layer(writer, number, ends.tokens if number == 0 else None, selects=selects)
            if number < writer.facts.num_added:
                given = {"a": number + 1, "k": writer.hidden, "flags": writer.rows}
                writer.add(OperationKind.ADD_GIVEN, out=writer.stream, **given)
        if writer.num_sums == 1:
            writer.meet(0, 0)  # or what was given for this step's sum could be gone before all have read it
        if (output := ends.output or self.output) is not None:
            output.write(writer)
        return writer.finish()

    def _write_layer(
        self, writer: Writer, number: int, tokens: TokenProduct | None, *, selects: bool
    ) -> None:
        """Write the operations of one layer.

        If it ``selects``, it goes on from its mixer with those rows alone whose logits are wanted.
        ``tokens``: the product that it adds to its mixer's first.
        """
        packed, layer = self.layers[number], self.layers[number].layer
        place, mlp_place = layer.places
        kept = self._kept[number]
        if packed.mixer is not None:
            packed.mixer.project(writer, writer.norm(place.norm, writer.buffers.normed), kept)
        if tokens is not None:
            tokens.write(writer)
        if selects:
            writer.select()
        rows = packed.mlp.read(writer, mlp_place) if packed.mlp is not None and layer.is_parallel else None
        if packed.mixer is not None:
            writer.add_product(packed.mixer.mix(writer, kept), place.last_norm, place.factor)
        if layer.stream_norms is not None:
            writer.normalise(layer.stream_norms[0], writer.stream, writer.stream, writer.hidden)
        if packed.mlp is not None:
            packed.mlp.add(writer, mlp_place, packed.mlp.read(writer, mlp_place) if rows is None else rows)
        if layer.stream_norms is not None:
            writer.normalise(layer.stream_norms[1], writer.stream, writer.stream, writer.hidden)
        if packed.input is not None:
            packed.input.add(writer)
        if layer.stream_factor != 1.0:
            writer.scale(layer.stream_factor)
