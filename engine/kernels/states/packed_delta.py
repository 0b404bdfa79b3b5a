"""Gated delta rules in a step: packed weights, operations and narrow copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.core.operations import OperationKind
from engine.kernels.core.rows import pitch_of
from engine.kernels.lowering.parts import KeptNumbers, Packing
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.writer import Writer
from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.products.projections import linear_of
from engine.kernels.states.delta import (
    CONVOLVED,
    DECAYS,
    GATES,
    INPUTS,
    REDUCED,
    RULED,
    WANTED,
    DeltaRule,
)
from engine.kernels.states.delta_layer import DeltaSizes, delta_layer
from engine.kernels.states.delta_parts import Outputs, parts_of
from engine.model.quantization.attached import in_a_row
from parallel.parts import parts_here


class PackedDeltaRule:
    """The weights of a gated delta rule, and its operations."""

    def __init__(self, mixer: DeltaRule, packing: Packing) -> None:
        self.mixer, packer = mixer, packing.packer
        made = {GATES: mixer.gates, DECAYS: mixer.decays}
        direct = [each.rows for each in (*mixer.mixed, *made.values()) if each.down is None]
        few = [direct.pop()] if mixer.decays.down is None else []
        self.inward = packer.panels(*direct, in_a_row([*few, mixer.steps.rows]), multiple=32)
        """Weights to queries, keys, values, then gates, decays and steps."""
        self.reduced = {
            name: (
                len(each.down),
                packer.panels(each.down, multiple=32),
                packer.panels(each.rows, multiple=32),
            )
            for name, each in made.items()
            if each.down is not None
        }
        """How many numbers gates or decays are made from, weights to those, and from those."""
        parts = parts_here(mixer.width, packing.ranks if mixer.is_partial else 1)
        self.out = packer.panels(mixer.out, multiple=32, parts=parts)

    def project(self, writer: Writer, into: Rows, kept: KeptNumbers) -> None:
        """Write the projections, the convolution and the rule itself."""
        mixer, buffers = self.mixer, writer.buffers
        inputs, width = buffers[INPUTS], mixer.inputs_width
        shape = {"n": width, "k": writer.hidden}
        into_here = writer.rounded(into, self.inward, writer.hidden)
        writer.add(OperationKind.LINEAR, into=into_here, out=inputs, weights=self.inward, **shape)
        for name, each in ((GATES, mixer.gates), (DECAYS, mixer.decays)):
            if each.down is not None:
                self._reduce(writer, into, name, mixer.width if name == GATES else mixer.decays_width)
        state = writer.layer_state(kept.state)
        mixer.conv.write(writer, inputs, buffers[CONVOLVED], state, n=width)
        writer.add(OperationKind.DELTA_ROWS, out=buffers[RULED], more=self._record(writer), extra=state)

    def mix(self, writer: Writer, kept: KeptNumbers) -> Product:
        """Write nothing but the choice of rows: what is left is the last product."""
        mixer, buffers = self.mixer, writer.buffers
        rows = writer.selected(buffers[RULED], buffers[WANTED], mixer.width)
        return Product(rows, self.out, mixer.width, mixer.out_bias, mixer.is_partial)

    def _reduce(self, writer: Writer, into: Rows, name: str, outputs: int) -> None:
        """Write a projection by few numbers into rows of its own."""
        (rank, down, up), few = self.reduced[name], writer.buffers[REDUCED]
        into = writer.rounded(into, down, writer.hidden)
        writer.add(OperationKind.LINEAR, into=into, out=few, weights=down, n=rank, k=writer.hidden)
        into = writer.rounded(few, up, rank)
        out = writer.buffers[name]
        writer.add(OperationKind.LINEAR, into=into, out=out, weights=up, n=outputs, k=rank)

    def _record(self, writer: Writer) -> np.ndarray[Any, Any]:
        """Where the numbers of a token are, and how they become decays and steps."""
        mixer, buffers, dtype = self.mixer, writer.buffers, writer.facts.dtype
        inputs, begin = buffers[INPUTS], mixer.conv.width
        at: dict[str, int] = {}
        places: tuple[tuple[str, Outputs, int, str], ...] = (
            ("gates", mixer.gates, mixer.width, GATES),
            ("decays", mixer.decays, mixer.decays_width, DECAYS),
            ("steps", mixer.steps, mixer.sizes.heads, INPUTS),
        )
        for field, outputs, width, name in places:
            if outputs.down is not None:
                at |= {field: buffers[name].data_ptr(), f"{field}_pitch": pitch_of(width, dtype)}
                continue
            address = inputs.data_ptr() + begin * inputs.element_size()
            at |= {field: address, f"{field}_pitch": pitch_of(mixer.inputs_width, dtype)}
            begin += width
        return delta_layer(
            mixer.sizes,
            **at,
            mixed=buffers[CONVOLVED].data_ptr(),
            mixed_pitch=pitch_of(mixer.conv.width, dtype),
            by_channel=mixer.decay.by_channel,
            rates=mixer.decay.rates.data_ptr(),
            shifts=mixer.decay.shifts.data_ptr(),
            norm=mixer.norm.data_ptr(),
            bound=mixer.decay.bound,
            step_factor=mixer.step_factor,
            eps=mixer.eps,
            gate_kind=mixer.gate_kind,
        )


MOST_HEADS = 2
"""Value heads of a narrow copy; they share a key head as in the model."""


def narrow_sizes(mixer: DeltaRule) -> DeltaSizes:
    """Heads of the copy of a layer."""
    sizes = mixer.sizes
    heads = min(sizes.heads, MOST_HEADS)
    return sizes._replace(heads=heads, key_heads=heads if sizes.heads == sizes.key_heads else 1)


def tell(mixer: DeltaRule, module: Any) -> None:
    """Set the numbers that a copy's forward pass splits projections by."""
    sizes = narrow_sizes(mixer)
    numbers = {
        "num_v_heads": sizes.heads,
        "num_k_heads": sizes.key_heads,
        "num_heads": sizes.heads,
        "key_dim": sizes.keys,
        "value_dim": sizes.values,
        "qkv_dim": sizes.values,
        **dict.fromkeys(("conv_dim", "in_channels", "out_channels", "groups"), sizes.mixed),
    }
    for owner in (module, *module.children()):
        for name, number in numbers.items():
            if isinstance(getattr(owner, name, None), int):
                setattr(owner, name, number)


def make_up(weights: MadeUpWeights, mixer: DeltaRule, module: Any) -> None:
    """Make weights up for the module of a gated delta rule.

    Half of each value is loud, and so are the last head's decays.
    """
    sizes, hidden = narrow_sizes(mixer), mixer.out.shape[0]
    parts = parts_of(module, sizes)
    assert parts is not None
    loud_values = [
        number for number in range(sizes.values) if number % sizes.value_dim >= sizes.value_dim // 2
    ]
    each = sizes.key_dim if mixer.decay.by_channel else 1
    widths = sizes.keys, sizes.keys, sizes.values, sizes.values, sizes.heads * each, sizes.heads
    loud = {2: loud_values, 4: [*range((sizes.heads - 1) * each, sizes.heads * each)]}
    outputs: dict[str, int] = {}
    rows: dict[str, list[int]] = {}
    for number, (source, width) in enumerate(zip(parts.sources, widths, strict=True)):
        outputs[source.path] = outputs.get(source.path, 0) + width
        places = range(width) if source.places is None else source.places.tolist()
        rows.setdefault(source.path, []).extend(places[one] for one in loud.get(number, ()))
    for source in {each.path: each for each in parts.sources}.values():
        inputs = hidden
        if source.before is not None:
            inputs = linear_of(parts.layer(source.before)).outputs
            weights.linear(parts.layer(source.before), inputs, hidden)
        weights.linear(parts.layer(source.path), outputs[source.path], inputs, loud_rows=rows[source.path])
    conv = module.conv1d.weight
    weights.put(conv, (sizes.mixed, *conv.shape[1:]), size=mixer.conv.kernel**-0.5)
    rates, shifts = parts.owner.A_log, parts.owner.dt_bias
    shape = tuple(sizes.heads if number == mixer.sizes.heads else number for number in rates.shape)
    weights.put(rates, shape, size=0.5)
    weights.put(shifts, (sizes.heads * each,), "shifts", size=0.5)
    weights.linear(parts.layer(parts.out), hidden, sizes.values, quiet_columns=loud_values)
