"""Modules of transformers with a recurrent state, computed on the grid as they are.

Such a module updates a cache object that is given to it. Here it gets one that holds the state at a boundary,
and the inputs of one cell of the grid, padded to the whole cell. So each token is computed in the same shape
whatever comes with it. (torch rounds softplus, sigmoid and silu otherwise in the last numbers of a tensor.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from engine.pieces.kinds import BoundaryKind
from engine.states.grid import GRID, LABEL, cells
from engine.states.held import Row, RunningStates, State, StateRows, new_request
from engine.states.pool import StatePool, Zeros, form_of, own_zeros, state_bytes

UPDATES = ("update_conv_state", "update_recurrent_state")
"""Methods of transformers' caches that modules with a state call."""
CACHES = ("cache_params", "past_key_values", "past_key_value", "cache")
"""Names that modules have for the cache."""
INPUTS = ("hidden_states", "hidden_state", "x")
"""Names that modules have for their input."""
CHECKED = 9
"""Tokens behind a boundary that are compared when a model is loaded."""
TOLERANCE = {torch.float32: 1e-3}
"""Largest relative difference of their outputs; in 16 bits 0.05. A lost state makes more."""
DROPPED = ("attention_mask", "seq_idx")
"""Arguments for padding and packed requests: here a call has one request."""


class LostState(Exception):
    """Error: a module that computes something else where its tokens are cut."""


class StateLayers:
    """Modules with a recurrent state of a model, and what they keep."""

    def __init__(self, module: Any) -> None:
        """Finds the modules, and has them computed on the grid."""
        self._module = module
        found = [part for part in module.modules() if has_state(part)]
        self._layers = [_StateLayer(index, part, self) for index, part in enumerate(found)]
        self.running = RunningStates(len(found))
        self.pool: StatePool | None = None
        """Where states are kept; None: before :meth:`allocate`."""
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of a module's own calls, which all have the same shapes."""
        self._rows: list[tuple[Row, int]] | None = None

    @property
    def identities(self) -> set[int]:
        """Identities of the modules."""
        return {id(layer.module) for layer in self._layers}

    @property
    def kind(self) -> BoundaryKind:
        """The kind of piece that states are; its bytes are known once :meth:`settle` has run.

        A running request holds at least one; the inputs that it keeps beside are counted with it.
        """
        like = [layer.like for layer in self._layers]
        num_bytes = state_bytes(like) + sum(layer.open_bytes for layer in self._layers)
        return BoundaryKind(label=LABEL, grid=GRID, num_bytes=num_bytes, form=form_of(like))

    def allocate(self, num_slots: int, first: int, zeros: Zeros = own_zeros) -> None:
        """Make room for states in slots numbered from ``first`` on, and forget all requests."""
        self.running.clear()
        self.pool = StatePool([layer.like for layer in self._layers], num_slots, first, zeros)

    def admit(self, slot: int, num_equal: int) -> None:
        """See :meth:`RunningStates.admit`."""
        self.running.admit(slot, num_equal)

    def settle(self, name: str) -> None:
        """Choose how each module continues from a state, by comparing with itself without a cut.

        Some modules drop the state that they are given when they get several tokens: those compute the tokens
        behind a boundary one by one.

        Raises:
            LostState: a module computes something else either way.
        """
        width = int(self._module.config.get_text_config().hidden_size)
        for layer in self._layers:
            layer.settle(name, width)

    @contextmanager
    def step(self, rows: StateRows) -> Iterator[None]:
        """Context in which the model's calls compute these rows, packed one behind the other."""
        self._rows = [
            (self.running.begin(slot, start, count, rows.pieces.get(index)), count)
            for index, (slot, start, count) in enumerate(
                zip(rows.slots, rows.starts, rows.counts, strict=True)
            )
        ]
        try:
            yield
        finally:
            self._rows = None

    def rows(self, num_tokens: int) -> list[tuple[Row, int]]:
        """Rows of the running step with their tokens; outside of one, a new request."""
        return [(new_request(num_tokens), num_tokens)] if self._rows is None else self._rows


class _StateLayer:
    """One module, called in place of its ``forward``."""

    def __init__(self, index: int, module: Any, layers: StateLayers) -> None:
        self.module = module
        self._index = index
        self._layers = layers
        self._forward: Callable[..., Any] = module.forward
        self._parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        self._cache = _first(CACHES, self._parameters, module)
        self._input = _first(INPUTS, self._parameters, module)
        self._cached_layer = int(module.layer_idx)
        self._one_by_one = False
        """Whether tokens behind a boundary are computed in calls of one token."""
        self.like: State = ()
        """A state, for its form; known once the module has run."""
        self.open_bytes = 0
        """Bytes of the inputs of a cell."""
        module.forward = self

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        """The module's output [1, tokens, width] for the packed rows of a step."""
        options |= dict(zip(self._parameters, args, strict=False))
        hidden = options[self._input][0]
        options |= dict.fromkeys(DROPPED & options.keys())
        rows = self._layers.rows(len(hidden))
        outputs = []
        with self._layers.around():
            for (row, count), new in zip(rows, hidden.split([count for _, count in rows]), strict=True):
                outputs.append(self._row(row, row.inputs(self._index, new), options)[-count:])
        return torch.cat(outputs).unsqueeze(0)

    def settle(self, name: str, width: int) -> None:
        """See :meth:`StateLayers.settle`; ``width``: numbers of a token's input."""
        weight = next(each for each in self.module.parameters() if each.ndim > 1)
        places = torch.arange(1, (GRID + CHECKED) * width + 1, device=weight.device, dtype=torch.float32)
        inputs = torch.sin(places * 0.61803).view(-1, width).to(weight.dtype) * 2**0.5
        whole = _first_of(self._forward(**{self._input: inputs.unsqueeze(0)}))[0].float()
        for self._one_by_one in (False, True):
            self.like = self._cell(inputs[:GRID], None, {})[1]
            self.open_bytes = GRID * width * weight.element_size()
            found = self._row(new_request(len(inputs)), inputs, {}).float()
            error = (found - whole)[GRID:].norm() / whole[GRID:].norm().clamp(min=1e-6)
            if float(error) <= TOLERANCE.get(weight.dtype, 0.05):
                return
        raise LostState(
            f"{name}: {type(self.module).__name__} computes something else where its tokens are cut, by "
            f"{float(error):.0%}: its recurrent state cannot be kept, so it would be served wrong"
        )

    def _row(self, row: Row, inputs: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Outputs [open and new tokens, width] of one row, whose states go where they belong."""
        pool, outputs = self._layers.pool, []
        state = None if row.reads is None or pool is None else pool.read(row.reads, self._index)
        for part in cells(len(inputs)):
            cell = inputs[part.begin : part.end]
            output, behind = self._cell(cell, state, options)
            outputs.append(output[: len(cell)])
            if part.is_whole:
                state = behind
                slot = row.fills.get(row.boundary + part.end)
                if slot is not None and pool is not None:
                    pool.write(slot, self._index, state)
        row.keep(self._index, inputs)
        return torch.cat(outputs)

    def _cell(
        self, cell: torch.Tensor, state: State | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, State]:
        """Outputs [GRID, width] of a padded cell, and the state behind it."""
        if self._one_by_one and state is not None:
            return self._single_tokens(cell, state, options)
        padded = torch.nn.functional.pad(cell, (0, 0, 0, GRID - len(cell)))
        cache = _OneLayer(self._cached_layer, state)
        output = self._forward(**{**options, self._input: padded.unsqueeze(0), self._cache: cache})
        return _first_of(output)[0], cache.state

    def _single_tokens(
        self, cell: torch.Tensor, state: State, options: dict[str, Any]
    ) -> tuple[torch.Tensor, State]:
        """The same by calls of one token each, without padding."""
        cache, outputs = _OneLayer(self._cached_layer, state), []
        for token in cell:
            call = {**options, self._input: token.view(1, 1, -1), self._cache: cache}
            outputs.append(_first_of(self._forward(**call))[0])
        return torch.cat(outputs), cache.state


class _OneLayer(DynamicCache):  # type: ignore[misc]
    """transformers' cache of one layer of one request, made from a state."""

    def __init__(self, index: int, state: State | None) -> None:
        super().__init__()
        layer = LinearAttentionLayer()
        if state is not None:
            conv, recurrent = state
            if conv is not None:
                layer.lazy_initialization(conv_states=conv)
                layer.conv_states[0].copy_(conv)
            if recurrent is not None:
                layer.lazy_initialization(recurrent_states=recurrent)
                layer.recurrent_states[0].copy_(recurrent)
            layer.has_previous_state[0] = True
        self._layer = layer
        self.layers = {index: layer}

    @property
    def state(self) -> State:
        """Tensors of the layer: (conv, recurrent)."""
        return self._layer.conv_states[0], self._layer.recurrent_states[0]


def compute_on_grid(module: Any) -> StateLayers | None:
    """Compute layers with a recurrent state on the grid; None without such layers."""
    states = StateLayers(module)
    return states if states.identities else None


def has_state(module: Any) -> bool:
    """Whether a module's code updates a recurrent state in a cache that it gets."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and any(name in code.co_names for name in UPDATES)


def _first_of(output: Any) -> torch.Tensor:
    """What a module returns, or the first of several."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _first(names: Sequence[str], parameters: Sequence[str], module: Any) -> str:
    for name in names:
        if name in parameters:
            return name
    raise TypeError(f"{type(module).__name__}.forward takes none of {', '.join(names)}")
