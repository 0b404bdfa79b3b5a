"""The check of a model cut by ``-tp`` or ``-pp`` against layers that were not cut.

A cut model agrees with itself whatever was cut wrong: :func:`engine.attention.probe.verify` cannot find a
sum made twice or a norm left out. Here the worker that answers reads a few layers whole, one at a time, and
computes a model of these layers alone (:func:`uncut_run`). Then all workers compute the same with what they
hold, each layer from the same input, and compare (:func:`check`).

All of it is in float32, whatever the model's data type: what is left is rounding, far below any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint import CheckpointError
from engine.expert_weights import expert_modules
from engine.shard import WHOLE, PassThrough, Shard, ShardedClass, Stage, class_leaving
from parallel.tensor_parallel import TensorRank, empty_parameter
from parallel.tensor_plan import Cut, CutModel

NUM_TOKENS = 24
"""Tokens of the check: enough that their experts are spread over all ranks."""
MOST_LAYERS = 8
"""Layers that are read whole: the first, the last, and one of each other kind."""
COLUMNS_PER_RANK = 8
"""Tokens of each rank's part of the vocabulary whose vectors and logits are compared."""
TOLERANCE = 2e-3
"""Difference that a quarter of the tokens may exceed, relative to what a layer adds to its input."""
ROUNDING = 1e-5
"""The same relative to what a layer gives: sums of other order differ by a few units in the last place."""
MOST_DIMENSIONS = 8
"""Of a tensor that is shared out."""
SHARE_OF_TOKENS = 0.75
"""A near tie between experts may fall otherwise for some tokens."""


@dataclass(frozen=True)
class UncutRun:
    """What a model of a few uncut layers computed. All tensors in float32 on the CPU."""

    inputs: torch.Tensor
    """[checked layers, ...]: of each layer, in the model's order."""
    outputs: torch.Tensor
    """[checked layers, ...]"""
    logits: torch.Tensor
    """[tokens, columns]"""


Load = Callable[[ShardedClass], Any]
"""Makes a model of a class with weights of the checkpoint, on the device, in evaluation mode."""


class _NoExperts(PassThrough):
    """Stands in place of experts that are spread over instances: adds nothing."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(hidden)


class _SomeTokens:
    """Mixed into an embedding that has the vectors of a few tokens only."""

    chosen: torch.Tensor
    """Their numbers, ascending."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.searchsorted(self.chosen.to(input_ids.device), input_ids)
        found: torch.Tensor = super().forward(places)  # type: ignore[misc]
        return found


# ---- what is checked


def layer_list(model: Any) -> Any:
    """The list of a model's decoder layers, None if it has none."""
    stacks = [part for part in model.base_model.modules() if isinstance(part, torch.nn.ModuleList)]
    named = getattr(model.base_model, "layers", None)
    return named if isinstance(named, torch.nn.ModuleList) else next(iter(stacks), None)


def checked_layers(whole: Any) -> list[int]:
    """Numbers of the layers to compare, ascending: the first, the last, and the first of each other kind."""
    kinds = [_kind(whole, index, layer) for index, layer in enumerate(layer_list(whole))]
    first_of_kind = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    return sorted({*first_of_kind[: MOST_LAYERS - 1], len(kinds) - 1})


def _kind(whole: Any, index: int, layer: Any) -> tuple[Any, ...]:
    """Equal for layers that are cut alike: the same modules with parameters of the same shapes."""
    types = getattr(whole.config.get_text_config(), "layer_types", None)
    shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    modules = tuple(type(module).__name__ for module in layer.modules())
    return (types[index] if types and index < len(types) else None, modules, shapes)


def checked_tokens(vocab_size: int, ranks: int) -> list[int]:
    """Token numbers, ascending: the ends of each rank's part of the vocabulary and some between."""
    spread = TensorRank(0, ranks)
    chosen: set[int] = set()
    for rank in range(ranks):
        spread.rank = rank
        start, stop = spread.even(vocab_size)
        chosen |= {
            start + (stop - 1 - start) * step // (COLUMNS_PER_RANK - 1) for step in range(COLUMNS_PER_RANK)
        }
    return sorted(chosen)


def _input_ids(columns: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([columns[step * 7 % len(columns)] for step in range(NUM_TOKENS)], device=device)


# ---- the model that is not cut


def uncut_run(sharded: ShardedClass, load: Load, device: torch.device) -> UncutRun:
    """Compute a model of a few whole layers, of which one at a time is held.

    Raises:
        CheckpointError: that is not possible.
    """
    whole, spread = sharded.whole, sharded.share is not None
    if layer_list(whole) is None:
        raise CheckpointError(
            f"{type(whole).__name__} has no list of layers to check a cut by: use -tp 1 -pp 1"
        )
    layers = checked_layers(whole)
    columns = checked_tokens(sharded.vocab_size, sharded.shard.size)
    ends = load(_ends(whole, columns))
    _use_eager(ends)
    runs = [_LayerRun(whole, index, load, spread) for index in layers]
    with torch.inference_mode(), _ends_in_float32(ends), ExitStack() as stack:
        for index, run in zip(layers, runs, strict=True):
            stack.enter_context(_forward_by(layer_list(ends)[index], run))
        logits = _forward(ends, _input_ids(columns, device))
    return UncutRun(
        torch.stack([run.given for run in runs]), torch.stack([run.result for run in runs]), logits.cpu()
    )


class _LayerRun:
    """The forward of a layer that is read when it is called, and gone when it returns."""

    given: torch.Tensor
    result: torch.Tensor

    def __init__(self, whole: Any, index: int, load: Load, spread: bool) -> None:
        self._whole = whole
        self._index = index
        self._load = load
        self._spread = spread

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = hidden.float().cpu()
        with torch.inference_mode(mode=False):
            model = self._load(_lone_layer(self._whole, self._index, self._spread))
        _use_eager(model)
        layer = layer_list(model)[self._index]
        with _in_float32(layer):
            output = layer(hidden, *args, **kwargs)
        self.result = _hidden_of(output).float().cpu()
        return output


def _ends(whole: Any, columns: list[int]) -> ShardedClass:
    """A model without layers, and of its vocabulary with a few tokens only."""
    result = ShardedClass(whole, None, WHOLE, range(0), {})

    def leave(model: Any) -> None:
        result.done = CutModel()
        stack = layer_list(model)
        for index, layer in enumerate(list(stack)):
            stack[index] = PassThrough().looks_like(layer)
        _keep_tokens(model, columns, result.done)

    result.model_class = class_leaving(type(whole), leave)
    return result


def _keep_tokens(model: Any, columns: list[int], done: CutModel) -> None:
    paths = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)
    ranges = tuple((token, token + 1) for token in columns)
    for module in (embedding, head):
        for name, parameter in list(module.named_parameters(recurse=False)):
            path, total = f"{paths[id(module)]}.{name}", parameter.shape[0]
            done.cuts[path] = Cut(-parameter.dim(), total, ranges)
            setattr(module, name, empty_parameter(parameter, (len(columns), *parameter.shape[1:])))
    embedding.num_embeddings, embedding.padding_idx = len(columns), None
    head.out_features = len(columns)
    embedding.__class__ = type(type(embedding).__name__, (_SomeTokens, type(embedding)), {})
    embedding.chosen = torch.tensor(columns, device="cpu")
    if tied:
        head.weight = embedding.weight


def _lone_layer(whole: Any, index: int, spread: bool) -> ShardedClass:
    """A model of which one layer is left; ``spread``: without its experts."""
    result = ShardedClass(whole, None, WHOLE, range(index, index + 1), {})

    def leave(model: Any) -> None:
        stack = layer_list(model)
        _leave_only(model, stack)
        for other, layer in enumerate(list(stack)):
            if other != index:
                stack[other] = PassThrough().looks_like(layer)
        if spread:
            for path, experts in expert_modules(model).items():
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, _NoExperts().looks_like(experts))
        model.all_tied_weights_keys = model.base_model.all_tied_weights_keys = {}

    result.model_class = class_leaving(type(whole), leave)
    return result


def _leave_only(module: Any, wanted: Any) -> None:
    """Take away all modules but one, which may lie deeper, and those that it is in."""
    for name, child in list(module.named_children()):
        if child is wanted:
            continue
        if any(part is wanted for part in child.modules()):
            _leave_only(child, wanted)
        else:
            setattr(module, name, PassThrough())


# ---- the cut one


def share_run(run: UncutRun | None, shard: Shard) -> UncutRun:
    """What the worker that answers computed, for all workers of the instance."""
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
    """A tensor whose shape the others do not know."""
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
        CheckpointError: they differ; the message says where.
    """
    layers, shard, device = checked_layers(sharded.whole), sharded.shard, module.device
    columns = checked_tokens(sharded.vocab_size, shard.size)
    judge = _Judge(name, shard)
    before = [place for place, index in enumerate(layers) if index < stage.layers.start]
    inside = [place for place, index in enumerate(layers) if index < stage.layers.stop]
    hidden = None if shard.is_first else run.outputs[before[-1]].to(device)
    implementation = module.config._attn_implementation
    _use_eager(module)
    try:
        with ExitStack() as stack:
            _compare_layers(stack, module, sharded, layers, run, judge)
            stack.enter_context(_ends_in_float32(module))
            output = _forward(module, _input_ids(columns, device), stage, hidden)
    finally:
        module.set_attn_implementation(implementation)
    if shard.is_last:
        judge.logits(output, run.logits, columns, sharded.vocab_size)
    else:
        judge.same("the output of its stage", output, run.outputs[inside[-1]])
    judge.conclude()


def _compare_layers(
    stack: ExitStack, module: Any, sharded: ShardedClass, layers: list[int], run: UncutRun, judge: _Judge
) -> None:
    """Until the stack ends, the checked layers of this stage compare, and the others pass on their input."""
    for index, layer in enumerate(layer_list(module)):
        if isinstance(layer, PassThrough):
            continue
        if index in layers:
            place = layers.index(index)
            forward = _Compared(layer, index, run.inputs[place], run.outputs[place], judge)
            stack.enter_context(_forward_by(layer, forward))
        else:
            stack.enter_context(_forward_by(layer, PassThrough().forward))
    if sharded.share is not None:
        for experts in expert_modules(module).values():
            stack.enter_context(_forward_by(experts, _NoExperts().forward))


class _Compared:
    """The forward of a layer that is compared: computes from what the uncut one got, gives what that gave."""

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
        with _in_float32(self._layer):
            output = self._own(self._given.to(hidden.device), *args, **kwargs)
        self._judge.layer(self._index, _hidden_of(output), self._given, self._result)
        result = self._result.to(hidden.device)
        return (result, *output[1:]) if isinstance(output, tuple) else result


class _Judge:
    """Collects differences, so that no worker leaves the others in the middle of a collective."""

    def __init__(self, name: str, shard: Shard) -> None:
        self._name = name
        self._shard = shard
        self._problems: list[str] = []

    def same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Of something that is not computed by a layer."""
        self._compare(what, found, expected, expected)

    def layer(self, index: int, found: torch.Tensor, given: torch.Tensor, expected: torch.Tensor) -> None:
        """Of a layer's output; ``given``: its input."""
        added = expected - given if expected.shape == given.shape else expected
        self._compare(f"layer {index}", found, expected, added)

    def logits(
        self, found: torch.Tensor, expected: torch.Tensor, columns: list[int], vocab_size: int
    ) -> None:
        """Of the columns that this rank has."""
        start, stop = 0, vocab_size
        if found.shape[-1] != vocab_size:
            start, stop = TensorRank(self._shard.rank, self._shard.size).even(vocab_size)
        here = [place for place, column in enumerate(columns) if start <= column < stop]
        own = [columns[place] - start for place in here]
        self.same("the logits", found[:, own], expected[:, here])

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> None:
        if found.shape != expected.shape:
            self._problems.append(f"{what} has the shape {list(found.shape)}, not {list(expected.shape)}")
            return
        found = found.float().cpu()
        difference, size, added = (_norms(each) for each in (found - expected, expected, scale))
        relative = (difference - ROUNDING * size).clamp(min=0) / added.clamp(min=1e-12)
        if not bool(relative.isfinite().all()):
            self._problems.append(f"{what} is not finite")
        elif (typical := float(relative.quantile(SHARE_OF_TOKENS))) > TOLERANCE:
            self._problems.append(f"{what} differs by {typical:.2g}")

    def conclude(self) -> None:
        """
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
    """Of each token: [tokens]."""
    tokens = values if values.dim() == 2 else values[0]
    return tokens.flatten(1).norm(dim=1)


# ---- for both


def _forward(
    module: Any, ids: torch.Tensor, stage: Stage | None = None, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    stage = stage or Stage(WHOLE, range(0))
    return stage.forward(
        module,
        hidden,
        input_ids=ids.unsqueeze(0),
        position_ids=torch.arange(len(ids), device=ids.device).unsqueeze(0),
        use_cache=False,
    ).float()


def _use_eager(module: Any) -> None:
    module.set_attn_implementation("eager")


def _hidden_of(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@contextmanager
def _ends_in_float32(module: Any) -> Iterator[None]:
    """While it lasts, what is outside of layers is in float32. Embeddings stay as they are: they are large,
    and what they give is exact."""
    inside = {id(part) for part in layer_list(module).modules()}
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, torch.nn.Embedding):
                stack.callback(part.register_forward_hook(_widen_output).remove)
            elif id(part) not in inside:
                stack.enter_context(_wide(part))
        yield


def _widen_output(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


@contextmanager
def _in_float32(layer: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for part in layer.modules():
            stack.enter_context(_wide(part))
        yield


@contextmanager
def _wide(part: Any) -> Iterator[None]:
    """One module's own parameters and buffers in float32, then the same tensors as before."""
    before = []
    for held in (part._parameters, part._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32:
                before.append((held, name, tensor))
                held[name] = tensor.float()
    try:
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


@contextmanager
def _forward_by(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, a module computes by another function."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
