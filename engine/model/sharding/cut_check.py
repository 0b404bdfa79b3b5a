"""Compares a model cut by ``-tp`` or ``-pp`` with layers that were not cut.

A cut model agrees with itself whatever was cut wrong: :func:`engine.model.probe.verify` cannot find a
sum made twice or a norm left out. So all workers compute the layers that one of them has computed whole
(:mod:`engine.model.sharding.uncut`) with what they hold, each from the same input, and compare.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import IMPLEMENTATION
from engine.attention.own_attention import set_implementation
from engine.model.checkpoint import CheckpointError
from engine.model.expert_weights import expert_modules
from engine.model.sharding.shard import PassThrough, Shard, ShardedClass, Stage
from engine.model.sharding.uncut import (
    NoExperts,
    UncutRun,
    checked_layers,
    columns_of,
    ends_in_float32,
    forward_by,
    hidden_of,
    in_float32,
    input_ids,
    layer_list,
    one_forward,
    use_eager,
)
from parallel.tensor_parallel import TensorRank

TOLERANCE = 2e-3
"""Difference that a quarter of the tokens may exceed, relative to what a layer adds."""
ROUNDING = 1e-5
"""Difference that a quarter of the tokens may exceed, relative to a layer's output.

Sums of other order differ by a few units in the last place.
"""
MOST_DIMENSIONS = 8
"""Most dimensions of a tensor that is shared out."""
SHARE_OF_TOKENS = 0.75
"""Part of the tokens that must agree.

A near tie between experts may fall otherwise for some tokens.
"""


def share_run(run: UncutRun | None, shard: Shard) -> UncutRun:
    """Share what the worker that answers computed with all workers of the instance."""
    tensors = [None] * 3 if run is None else [run.inputs, run.outputs, run.logits]
    shared = []
    for tensor in tensors:
        for group, source, has_it in (
            (shard.ranks, 0, shard.is_last),
            (shard.stages, shard.num_stages - 1, True),
        ):
            if group is not None and has_it:
                tensor = _broadcast(group, tensor, source)
        assert tensor is not None
        shared.append(tensor)
    return UncutRun(*shared)


def _broadcast(group: Any, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
    """Share a tensor whose shape the other workers do not know."""
    shape = torch.zeros(MOST_DIMENSIONS, dtype=torch.int64)
    if tensor is not None:
        shape[: tensor.dim()] = torch.tensor(tensor.shape)
    sizes = [int(size) for size in group.broadcast(shape, source) if size]
    result: torch.Tensor = group.broadcast(
        torch.empty(sizes, dtype=torch.float32) if tensor is None else tensor, source
    )
    return result


def check(module: Any, name: str, sharded: ShardedClass, stage: Stage, run: UncutRun) -> None:
    """Compare what this worker, together with the others, computes with what uncut layers computed.

    Raises:
        CheckpointError: they differ; the message names the place.
    """
    layers, shard, device = checked_layers(sharded.whole), sharded.shard, module.device
    columns = columns_of(sharded)
    judge = _Judge(name, shard)
    before = [row for row, index in enumerate(layers) if index < stage.layers.start]
    inside = [row for row, index in enumerate(layers) if index < stage.layers.stop]
    hidden = None if shard.is_first else run.outputs[before[-1]].to(device)
    head = module.get_output_embeddings()
    here, rows = _columns_here(shard, columns, sharded.vocab_size, head)
    use_eager(module)
    try:
        with ExitStack() as stack:
            _compare_layers(stack, module, sharded, layers, run, judge)
            stack.enter_context(ends_in_float32(module, but=head))
            if not isinstance(head, PassThrough):
                stack.enter_context(forward_by(head, _SomeRows(head, rows)))
            output = one_forward(module, input_ids(columns, device), stage, hidden)
    finally:
        set_implementation(module, IMPLEMENTATION)
    if shard.is_last:
        judge.same("the logits", output, run.logits[:, here])
    else:
        judge.same("the output of its stage", output, run.outputs[inside[-1]])
    judge.conclude()


def _columns_here(
    shard: Shard, columns: list[int], vocab_size: int, head: Any
) -> tuple[list[int], list[int]]:
    """Compared tokens that this rank's output layer has, and their rows in it."""
    start, stop = 0, vocab_size
    if isinstance(head, torch.nn.Linear) and head.weight.shape[0] != vocab_size:
        start, stop = TensorRank(shard.rank, shard.size).even(vocab_size)
    here = [row for row, column in enumerate(columns) if start <= column < stop]
    return here, [columns[row] - start for row in here]


class _SomeRows:
    """The forward of an output layer that computes some rows only, in float32.

    All rows would take as much memory as several layers.
    """

    def __init__(self, head: Any, rows: list[int]) -> None:
        self._head = head
        self._own = head.forward
        self._rows = rows

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not isinstance(self._head, torch.nn.Linear):
            output: torch.Tensor = self._own(hidden.to(next(self._head.parameters()).dtype))[..., self._rows]
            return output
        bias = self._head.bias
        weight = self._head.weight[self._rows].float()
        return F.linear(hidden.float(), weight, None if bias is None else bias[self._rows].float())


def _compare_layers(
    stack: ExitStack, module: Any, sharded: ShardedClass, layers: list[int], run: UncutRun, judge: _Judge
) -> None:
    """Make the checked layers of this stage compare until the stack ends.

    The other layers pass on their input.
    """
    for index, layer in enumerate(layer_list(module)):
        if isinstance(layer, PassThrough):
            continue
        if index in layers:
            row = layers.index(index)
            forward = _Compared(layer, index, run.inputs[row], run.outputs[row], judge)
            stack.enter_context(forward_by(layer, forward))
        else:
            stack.enter_context(forward_by(layer, PassThrough().looks_like(layer).forward))
    if sharded.share is not None:
        for experts in expert_modules(module).values():
            stack.enter_context(forward_by(experts, NoExperts().forward))


class _Compared:
    """The forward of a compared layer: takes the uncut layer's input, returns that layer's result."""

    def __init__(
        self, layer: Any, index: int, given: torch.Tensor, result: torch.Tensor, judge: _Judge
    ) -> None:
        self._layer = layer
        self._own = layer.forward
        self._index = index
        self._given = given
        self._result = result
        self._judge = judge

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._judge.same(f"the input of layer {self._index}", hidden, self._given)
        with in_float32(self._layer):
            output = self._own(self._given.to(hidden.device), *args, **kwargs)
        self._judge.layer(self._index, hidden_of(output), self._given, self._result)
        result = self._result.to(hidden.device)
        return (result, *output[1:]) if isinstance(output, tuple) else result


class _Judge:
    """Collects differences, so that no worker leaves the others in the middle of a collective."""

    def __init__(self, name: str, shard: Shard) -> None:
        self._name = name
        self._shard = shard
        self._problems: list[str] = []

    def same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare a tensor that no layer computes."""
        self._compare(what, found, expected, expected)

    def layer(self, index: int, found: torch.Tensor, given: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare a layer's output; ``given``: its input."""
        added = expected - given if expected.shape == given.shape else expected
        self._compare(f"layer {index}", found, expected, added)

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> None:
        if found.shape != expected.shape:
            self._problems.append(f"{what} has the shape {list(found.shape)}, not {list(expected.shape)}")
            return
        usable = expected.isfinite()  # rows of a vocabulary that nobody trained may hold anything
        found, expected, scale = (each.where(usable, 0.0) for each in (found.float().cpu(), expected, scale))
        difference, size, added = (_norms(each) for each in (found - expected, expected, scale))
        relative = (difference - ROUNDING * size).clamp(min=0) / added.clamp(min=1e-12)
        if not bool(relative.isfinite().all()):
            self._problems.append(f"{what} is not finite")
        elif (typical := float(relative.quantile(SHARE_OF_TOKENS))) > TOLERANCE:
            self._problems.append(f"{what} differs by {typical:.2g}")

    def conclude(self) -> None:
        """Refuse the model if any difference was found.

        Raises:
            CheckpointError: something differs.
        """
        if self._problems:
            flags = [
                flag
                for flag, size in (("-tp 1", self._shard.size), ("-pp 1", self._shard.num_stages))
                if size > 1
            ]
            raise CheckpointError(
                f"{self._name}: cut for worker {self._shard} it computes something else than its uncut "
                f"layers: {'; '.join(self._problems[:3])}. It would be served wrong: use {' '.join(flags)}"
            )


def _norms(values: torch.Tensor) -> torch.Tensor:
    """Norm of each token's values: [tokens]."""
    tokens = values if values.dim() == 2 else values[0]
    return tokens.flatten(1).norm(dim=1)
