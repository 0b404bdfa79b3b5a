"""Trial of the kernels against a model's own layers, before they are used.

:mod:`engine.kernels.decoder` finds a model's weights by the names of its parts. It does not see what else a
forward pass does: a factor on queries that grows with the position, a layer without rotary positions, a
clamp, a multiplier. So both compute, on a narrow copy of the model (:mod:`engine.kernels.narrow`) in float32,
where a missing term stands out from rounding by orders of magnitude:

- each layer by itself, from what the model's layer was given to what the next one is given, so that a
  deviation is neither diluted by other layers nor amplified by them;
- at positions on both sides of each whole number that the configuration names, and up to the end of the
  context, since a term may begin to act there. Only the positions' angles are far apart: the tokens lie
  side by side in the cache;
- with weights that make half of the numbers very large, since a term may act on large numbers only.

Forward passes are compared by their results, not by their source. A list of known sources would send every
family to torch with each release of transformers that touches them. It could not judge a model that brings
its own code either.

In bfloat16 rounding hides what is small, so that alone would prove little. What remains to be seen there is
that the kernels round no worse than torch: both are measured by their distance from float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, Int64s, PackedRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.kernels.attention.rotary import Rotary
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core.base_model import base_parts
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decoder import DecoderModel
from engine.kernels.lowering.parts import PositionTable
from engine.kernels.narrow import NarrowCopy
from engine.kernels.products.made_up import random_numbers
from engine.kernels.program import Program
from engine.model.weights import LoadedModel

LAYER_TOLERANCE = 2e-4
"""Greatest difference of a token, relative to what a layer adds to it, in float32.

Rounding makes 5e-6.
"""
ROUNDING, QUANTILE = 2.0, 0.25
"""Largest distance of the kernels' results from float32, relative to torch's.

It holds for bfloat16, at this quantile of the tokens. With many experts, about half of the tokens have met a
near-tie, which rounding decides.
"""
MOST_POSITIONS = 48
"""Tokens of the comparison in float32."""
FEW = 16
"""Tokens of the comparison in bfloat16."""
BLOCK_SIZE = 16


class TrialResult(NamedTuple):
    """The result of a trial."""

    objection: str | None
    """Difference between kernels and the model's own code; None if there is none."""
    rounding: float
    """Distance of the copy's logits from float32, where torch computes in 16 bits.

    It is in the model's data type, relative to how much the logits vary. 0 in float32.
    """


def judge(kernels: KernelLibrary, model: LoadedModel, decoder: DecoderModel) -> TrialResult:
    """Compare the kernels with the model's own code; ``decoder``: its parts.

    Raises:
        Exception: either cannot compute; it may be of any kind.
    """
    positions = telling_positions(model.module.config.get_text_config(), model.context_length)
    copy = NarrowCopy(model, decoder)
    with torch.inference_mode():
        problem = _difference(kernels, copy, positions)
        if problem is not None or model.dtype == torch.float32:
            return TrialResult(problem, 0.0)
        return _compare_rounding(kernels, copy, positions[:: -(-len(positions) // FEW)], model.dtype)


def telling_positions(config: Any, context: int) -> Int64s:
    """Positions that tell forward passes apart, rising.

    They are the first, the last, and those around each whole number in the configuration. Numbers of rotary
    embeddings, windows and contexts go before others.
    """
    wanted = [0, 1, 2, context - 2, context - 1, context // 2]
    named = sorted(_whole_numbers(config.to_dict()), key=lambda each: not any(map(each[0].count, TELLING)))
    powers = [1 << exponent for exponent in range(2, context.bit_length())]
    for number in [*(number for _, number in named), *reversed(powers)]:
        wanted += [number - 1, number, number + 1]
    allowed = list(dict.fromkeys(each for each in wanted if 0 <= each < context))
    return np.array(sorted(allowed[:MOST_POSITIONS]), dtype=np.int64)


TELLING = ("position", "window", "rope", "context", "scal", "chunk", "attention", "attn")
"""Parts of names of configuration values that positions may be compared with."""


def _whole_numbers(values: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _whole_numbers(value, f"{name}.{key}")
    elif isinstance(values, int | float) and not isinstance(values, bool) and float(values).is_integer():
        yield name, int(values)


# ---- in float32, layer by layer


def _difference(kernels: KernelLibrary, copy: NarrowCopy, positions: Int64s) -> str | None:
    """The largest difference, unless it is due to experts that are nearly tied.

    Then the choice may fall either way, but not at the same position with other tokens.
    """
    bad = dict(_deviations(kernels, copy, positions, draw=1))
    if bad:
        again = dict(_deviations(kernels, copy, positions, draw=2))
        bad = {index: again[index] for index in bad if index in again}
    if not bad:
        return None
    (number, index), worst = max(bad.items(), key=lambda each: each[1])
    where = "the output" if number == len(copy.parts) else f"layer {number}"
    return f"{where} differs by {worst:.2g} at position {positions[index]}"


def _deviations(
    kernels: KernelLibrary, copy: NarrowCopy, positions: Int64s, draw: int
) -> Iterator[tuple[tuple[int, int], float]]:
    """Differences that are too large, by (layer, index of the position).

    The output is a last layer.
    """
    run = _run(copy, positions, draw)
    decoder = _placed(copy.decoder, positions)
    programs: dict[tuple[Any, ...], Program] = {}
    for number, layer in enumerate(decoder.layers):
        given, expected = run.states[number], run.states[number + 1]
        kind = tuple(_fields(layer))
        if kind not in programs or (layer.mixer is not None and layer.mixer.source is not None):
            programs[kind] = _program_of(kernels, replace(decoder, output=None), run, number)
        found = _compute(programs[kind], given, run.inputs)
        yield from _too_far(number, (found - expected).norm(dim=-1), (expected - given).norm(dim=-1))
    if copy.decoder.embedding is not None and copy.decoder.embedding.inputs is not None:
        first = replace(decoder, embedding=copy.decoder.embedding, layers=decoder.layers[:1], output=None)
        program = _program(kernels, first, len(positions))
        found, (given, expected) = _compute(program, run.ids), run.states[:2]
        yield from _too_far(0, (found - expected).norm(dim=-1), (expected - given).norm(dim=-1))
    if run.logits is None:
        return
    last = _program_of(kernels, decoder, run, len(copy.parts) - 1)
    found = _compute(last, run.states[-2], run.inputs)
    for half, expected in zip(_halves(found), _halves(run.logits), strict=True):  # one of which is louder
        yield from _too_far(len(copy.parts), (half - expected).norm(dim=-1), expected.norm(dim=-1))


def _program_of(kernels: KernelLibrary, decoder: DecoderModel, run: _Run, number: int) -> Program:
    """A program of one layer alone, with another's keys and values if it reads them."""
    layer, count = decoder.layers[number], len(run.states[0])
    source = None if layer.mixer is None else layer.mixer.source
    if layer.mixer is None or source is None:
        return _program(kernels, replace(decoder, layers=(layer,)), count)
    stored = _program_of(kernels, replace(decoder, output=None), run, source)
    _compute(stored, run.states[source], run.inputs)
    alone = replace(layer, mixer=layer.mixer.reading(0))
    program = Program(kernels, replace(decoder, layers=(alone,)))
    program.use(stored.cache)
    return program


def _fields(part: Any) -> Iterator[Any]:
    """Fields of a layer's part, by which equal parts are found.

    Equal layers have one program.
    """
    for entry in fields(part):
        value = getattr(part, entry.name)
        if is_dataclass(value):
            yield from _fields(value)
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            for each in value:
                yield from _fields(each)
        elif isinstance(value, torch.nn.Module):
            yield tuple(id(weight) for weight in value.parameters())
        elif isinstance(value, torch.Tensor):
            is_small = value.ndim == 1 and not isinstance(value, torch.nn.Parameter)
            yield value.numpy().tobytes() if is_small else _identity(value)
        else:
            yield tuple(map(_identity, value)) if isinstance(value, tuple) else value


def _identity(value: Any) -> Any:
    """Key that is the same for equal parts: of a tensor, its memory."""
    return (value.data_ptr(), value.shape) if isinstance(value, torch.Tensor) else id(value)


def _halves(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    middle = logits.shape[1] // 2
    return logits[:, :middle], logits[:, middle:]


def _too_far(
    number: int, distances: torch.Tensor, sizes: torch.Tensor
) -> Iterator[tuple[tuple[int, int], float]]:
    for index, difference in enumerate((distances / sizes.clamp(min=1e-6)).tolist()):
        if not difference <= LAYER_TOLERANCE:  # or it is no number
            yield (number, index), difference


# ---- in bfloat16, all layers


def _compare_rounding(
    kernels: KernelLibrary, copy: NarrowCopy, positions: Int64s, dtype: torch.dtype
) -> TrialResult:
    copy.quieten()
    exact = _run(copy, positions).result
    copy.convert(dtype)
    rounded = _run(copy, positions)
    decoder = _placed(copy.decoder, positions)
    program = _program(kernels, decoder, len(positions))
    found = _compute(program, rounded.states[0], rounded.inputs)
    size = (exact - exact.mean(dim=-1, keepdim=True)).norm(dim=-1)
    by_torch, by_kernels = (
        float(((each.float() - exact).norm(dim=-1) / size).quantile(QUANTILE))
        for each in (rounded.result, found)
    )
    problem = f"in {dtype} they are {by_kernels:.2g} off float32, where torch is {by_torch:.2g} off"
    return TrialResult(None if by_kernels <= ROUNDING * by_torch else problem, by_torch)


# ---- running both


class _Run(NamedTuple):
    """The results of the model's own code."""

    states: list[torch.Tensor]
    """[tokens, hidden] before each layer, and behind the last one."""
    logits: torch.Tensor | None
    """[tokens, vocabulary]; None before the last stage."""
    ids: torch.Tensor
    """[tokens], if there is an embedding."""
    inputs: torch.Tensor | None
    """[tokens, numbers of all layers] that layers were given beside the stream."""

    @property
    def result(self) -> torch.Tensor:
        return self.states[-1] if self.logits is None else self.logits


def _run(copy: NarrowCopy, positions: Int64s, draw: int = 0) -> _Run:
    """Run the copy's own code on a prompt whose tokens are at these positions."""
    decoder, count = copy.decoder, len(positions)
    given, embedded = _prompt(decoder, positions, draw)
    states: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []

    def note(_part: Any, arguments: tuple[Any, ...]) -> None:
        states.append(arguments[0][0].clone())
        inputs.extend(each[0].clone() for each in arguments[1:2] if isinstance(each, torch.Tensor))

    cache = TorchPagedAttention(
        copy.layers,
        num_blocks=_num_blocks(count),
        block_size=BLOCK_SIZE,
        dtype=decoder.dtype,
        device=copy.module.device,
    )
    hooks = [
        part.register_forward_pre_hook(note)
        for part in (*copy.parts, getattr(copy.base, base_parts(copy.base)["norm"]))
    ]
    whole = copy.module if decoder.output is not None else copy.base
    try:
        outputs = whole(
            **given,
            position_ids=torch.from_numpy(positions).unsqueeze(0),
            use_cache=False,
            **{PLAN_KEYWORD: cache.plan(_packed(count))},
        )
    finally:
        for hook in hooks:
            hook.remove()
    if len(states) != len(copy.parts) + 1:
        raise NotRecognised(f"{len(states) - 1} calls of {len(copy.parts)} layers")
    if decoder.embedding is not None and not torch.equal(states[0], embedded):
        raise NotRecognised("it changes what the embedding gives")
    has_inputs = any(layer.input is not None for layer in decoder.layers)
    ids = given.get("input_ids", torch.zeros(1, count, dtype=torch.int64))[0]
    logits = None if decoder.output is None else outputs.logits[0]
    return _Run(states, logits, ids, torch.cat(inputs, dim=1) if has_inputs else None)


def _prompt(
    decoder: DecoderModel, positions: Int64s, draw: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of a model for tokens at these positions, and the hidden [tokens, hidden].

    The kernels compute from the latter. A later stage gets its own; what the model makes of it before the
    first layer was done on the first stage.
    """
    count = len(positions)
    if decoder.embedding is None:
        embedded = random_numbers((count, decoder.hidden), draw).to(decoder.dtype)
        return {"inputs_embeds": embedded.unsqueeze(0)}, embedded
    weight, first = decoder.embedding.weight, decoder.embedding.first
    ids = (torch.arange(count) * 7919 + 13 * draw) % len(weight)
    embedded = weight[ids] if decoder.embedding.factor == 1.0 else weight[ids] * decoder.embedding.factor
    if decoder.embedding.positions is not None:
        embedded = embedded + decoder.embedding.positions[torch.from_numpy(positions)]
    return {"input_ids": (ids + first).unsqueeze(0)}, embedded


def _program(kernels: KernelLibrary, decoder: DecoderModel, count: int) -> Program:
    program = Program(kernels, decoder)
    program.use(
        NativeCache(decoder.cached, num_blocks=_num_blocks(count), block_size=BLOCK_SIZE, dtype=decoder.dtype)
    )
    program.allocate_states(1, 0)
    return program


def _compute(program: Program, given: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
    """The kernels' result for hidden or ids [tokens], as [tokens, hidden].

    If there is an output layer, it is float32 logits. ``inputs``: see :class:`_Run`.
    """
    count, are_ids = len(given), given.ndim == 1
    ids = given.numpy() if are_ids else np.zeros(count, dtype=np.int64)
    hidden = None if are_ids else given[None]
    with program.alone([(0, 0, count)]):
        found = program.forward(_packed(count), ids, np.arange(count), hidden, None if are_ids else inputs)
    return found.reshape(count, -1).clone()


def _num_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _packed(count: int) -> PackedRows:
    """One prompt whose tokens are side by side in the cache."""
    table = np.arange(_num_blocks(count), dtype=np.int32)[None, ::-1].copy()
    return PackedRows(np.array([0]), np.array([count]), table, np.arange(count), int(count == 1))


def _placed(decoder: DecoderModel, positions: Int64s) -> DecoderModel:
    """The layers of a decoder, where token number i is taken for one at ``positions[i]``."""
    rotaries = tuple(_Placed(rotary, positions) for rotary in decoder.rotaries)
    at = tuple(positions.tolist())
    layers = tuple(
        layer
        if layer.mixer is None
        else replace(layer, mixer=layer.mixer.with_tables(lambda table: _PlacedTable(table, at)))
        for layer in decoder.layers
    )
    return replace(decoder, embedding=None, layers=layers, rotaries=rotaries)


def _padded(table: torch.Tensor, length: int) -> torch.Tensor:
    """So many rows of a table, from the first one on, with zeros behind it."""
    padded = table.new_zeros(length, *table.shape[1:])
    padded[: len(table)] = table[:length]
    return padded


@dataclass(frozen=True)
class _PlacedTable:
    """A table that takes token number i for one at ``positions[i]``."""

    own: PositionTable
    positions: tuple[int, ...]

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        return _padded(self.own.table(torch.tensor(self.positions)), len(positions))


class _Placed(Rotary):
    """A rotary embedding that takes token number i for one at ``positions[i]``."""

    def __init__(self, rotary: Rotary, positions: Int64s) -> None:
        super().__init__(rotary.module, *rotary.kind)
        self._positions = torch.from_numpy(positions)

    def halves(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = super().halves(self._positions)
        return _padded(cosines, len(ids)), _padded(sines, len(ids))
