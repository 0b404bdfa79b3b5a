"""A few uncut layers of a cut model, computed one at a time for comparison.

The worker of a cut model that answers reads them (:func:`uncut_run`). Each is in a model of its class of
which nothing else is left, with a few tokens of the vocabulary. :mod:`engine.model.sharding.cut_check`
compares.

All is computed in float32, whatever the model's data type: what is left is rounding, far below any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.own_attention import set_implementation
from engine.model.checkpoint import CheckpointError
from engine.model.expert_weights import expert_modules
from engine.model.sharding.shard import WHOLE, PassThrough, ShardedClass, Stage, class_leaving
from parallel.tensor_parallel import TensorRank, empty_parameter
from parallel.tensor_plan import Cut, CutModel

NUM_TOKENS = 24
"""Tokens of the check: enough that their experts are spread over all ranks."""
MOST_LAYERS = 8
"""Layers that are read whole: the first, the last, and one of each other kind."""
COLUMNS_PER_RANK = 8
"""Tokens of each rank's part of the vocabulary whose vectors and logits are compared."""


@dataclass(frozen=True)
class UncutRun:
    """Results of a model of a few uncut layers.

    All tensors in float32 on the CPU.
    """

    inputs: torch.Tensor
    """[checked layers, ...] of each layer, in the model's order."""
    outputs: torch.Tensor
    """[checked layers, ...]"""
    logits: torch.Tensor
    """[tokens, columns]"""


Load = Callable[[ShardedClass], Any]
"""Maker of a model from checkpoint weights, on the device, in evaluation mode."""


class NoExperts(PassThrough):
    """Stand-in for experts that are spread over instances: adds nothing."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(hidden)


class _SomeTokens:
    """Mixin of an embedding that has the vectors of a few tokens only."""

    chosen: torch.Tensor
    """Numbers of these tokens, ascending."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        indices = torch.searchsorted(self.chosen.to(input_ids.device), input_ids)
        found: torch.Tensor = super().forward(indices)  # type: ignore[misc]
        return found


# ---- what is checked


def layer_list(model: Any) -> Any:
    """The list of a model's decoder layers, None if it has none."""
    stacks = [part for part in model.base_model.modules() if isinstance(part, torch.nn.ModuleList)]
    named = getattr(model.base_model, "layers", None)
    return named if isinstance(named, torch.nn.ModuleList) else next(iter(stacks), None)


def checked_layers(whole: Any) -> list[int]:
    """Numbers of the layers to compare, ascending.

    They are the first, the last, and each other kind's first.
    """
    kinds = [_kind(whole, index, layer) for index, layer in enumerate(layer_list(whole))]
    first_of_kind = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    return sorted({*first_of_kind[: MOST_LAYERS - 1], len(kinds) - 1})


def _kind(whole: Any, index: int, layer: Any) -> tuple[Any, ...]:
    """Key of a layer's kind, equal for layers that are cut alike.

    Those have the same modules with equal parameter shapes.
    """
    types = getattr(whole.config.get_text_config(), "layer_types", None)
    shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    modules = tuple(type(module).__name__ for module in layer.modules())
    return (types[index] if types and index < len(types) else None, modules, shapes)


def checked_tokens(vocab_size: int, ranks: int) -> list[int]:
    """Token numbers, ascending: the ends of each rank's part of the vocabulary and some between."""
    spread = TensorRank(0, ranks)
    chosen: set[int] = set()
    for rank in range(min(ranks, vocab_size)):
        spread.rank = rank
        start, stop = spread.even(vocab_size)
        chosen |= {
            start + (stop - 1 - start) * step // (COLUMNS_PER_RANK - 1) for step in range(COLUMNS_PER_RANK)
        }
    return sorted(chosen)


def columns_of(sharded: ShardedClass) -> list[int]:
    """Tokens of :func:`checked_tokens` that the embedding has, too."""
    chosen = checked_tokens(sharded.vocab_size, sharded.shard.size)
    embedding = sharded.whole.get_input_embeddings()
    if isinstance(embedding, torch.nn.Embedding):
        chosen = [token for token in chosen if token < embedding.weight.shape[0]]
    return chosen


def input_ids(columns: list[int], device: torch.device) -> torch.Tensor:
    """Token ids of the check, without the vocabulary's last token, which may be padding."""
    used = columns[:-1] or columns
    return torch.tensor([used[step * 7 % len(used)] for step in range(NUM_TOKENS)], device=device)


# ---- the run


def uncut_run(sharded: ShardedClass, load: Load, device: torch.device) -> UncutRun:
    """Compute a model of a few whole layers, holding one layer at a time.

    Raises:
        CheckpointError: that is not possible.
    """
    whole = sharded.whole
    if layer_list(whole) is None:
        raise CheckpointError(
            f"{type(whole).__name__} has no list of layers to check a cut by: use -tp 1 -pp 1"
        )
    layers = checked_layers(whole)
    columns = columns_of(sharded)
    ends = load(_ends(sharded, columns))
    use_eager(ends)
    runs = [_LayerRun(sharded, index, load) for index in layers]
    with torch.inference_mode(), ends_in_float32(ends), ExitStack() as stack:
        for index, run in zip(layers, runs, strict=True):
            stack.enter_context(forward_by(layer_list(ends)[index], run))
        logits = one_forward(ends, input_ids(columns, device))
        if logits.shape[-1] != len(columns):  # an output layer of its own kind
            logits = logits[:, columns]
    return UncutRun(
        torch.stack([run.given for run in runs]), torch.stack([run.result for run in runs]), logits.cpu()
    )


class _LayerRun:
    """Forward of a layer that is read at its call and dropped at its return."""

    given: torch.Tensor
    result: torch.Tensor

    def __init__(self, sharded: ShardedClass, index: int, load: Load) -> None:
        self._sharded = sharded
        self._index = index
        self._load = load

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = hidden.float().cpu()
        with torch.inference_mode(mode=False):
            model = self._load(_lone_layer(self._sharded, self._index))
        use_eager(model)
        output = layer_list(model)[self._index].float()(hidden, *args, **kwargs)
        self.result = hidden_of(output).float().cpu()
        return output


def _ends(sharded: ShardedClass, columns: list[int]) -> ShardedClass:
    """A model without layers, and with a few tokens of its vocabulary."""
    result = ShardedClass(sharded.whole, None, WHOLE, range(0), {}, targets=sharded.targets)

    def leave(model: Any) -> None:
        result.done = CutModel()
        stack = layer_list(model)
        for index, layer in enumerate(list(stack)):
            stack[index] = PassThrough().looks_like(layer)
        _keep_tokens(model, columns, result.done)

    result.model_class = class_leaving(type(sharded.whole), leave)
    return result


def _keep_tokens(model: Any, columns: list[int], done: CutModel) -> None:
    paths = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)
    ranges = tuple((token, token + 1) for token in columns)
    for module in (embedding, head):
        if not isinstance(module, torch.nn.Embedding | torch.nn.Linear):
            continue  # it is used as it is
        for name, parameter in list(module.named_parameters(recurse=False)):
            path, total = f"{paths[id(module)]}.{name}", parameter.shape[0]
            done.cuts[path] = Cut(-parameter.dim(), total, ranges)
            setattr(module, name, empty_parameter(parameter, (len(columns), *parameter.shape[1:])))
    if isinstance(embedding, torch.nn.Embedding):
        embedding.num_embeddings, embedding.padding_idx = len(columns), None
        embedding.__class__ = type(type(embedding).__name__, (_SomeTokens, type(embedding)), {})
        embedding.chosen = torch.tensor(columns, device="cpu")
    if isinstance(head, torch.nn.Linear):
        head.out_features = len(columns)
    if tied:
        head.weight = embedding.weight


def _lone_layer(sharded: ShardedClass, index: int) -> ShardedClass:
    """A model with one layer left, without its experts if they are spread over instances."""
    layers = range(index, index + 1)
    result = ShardedClass(sharded.whole, None, WHOLE, layers, {}, targets=sharded.targets)

    def leave(model: Any) -> None:
        stack = layer_list(model)
        _leave_only(model, stack)
        for other, layer in enumerate(list(stack)):
            if other != index:
                stack[other] = PassThrough().looks_like(layer)
        if sharded.share is not None:
            for path, experts in expert_modules(model).items():
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, NoExperts().looks_like(experts))
        model.all_tied_weights_keys = model.base_model.all_tied_weights_keys = {}

    result.model_class = class_leaving(type(sharded.whole), leave)
    return result


def _leave_only(module: Any, wanted: Any) -> None:
    """Remove all modules but one, which may lie deeper, and those that contain it."""
    for name, child in list(module.named_children()):
        if child is wanted:
            continue
        if any(part is wanted for part in child.modules()):
            _leave_only(child, wanted)
        else:
            setattr(module, name, PassThrough())


# ---- for the cut model, too


def one_forward(
    module: Any, ids: torch.Tensor, stage: Stage | None = None, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """One sequence of token ids [tokens] through a model, or through a stage of one."""
    stage = stage or Stage(WHOLE, range(0))
    return stage.forward(
        module,
        hidden,
        input_ids=ids.unsqueeze(0),
        position_ids=torch.arange(len(ids), device=ids.device).unsqueeze(0),
        use_cache=False,
    ).float()


def use_eager(module: Any) -> None:
    set_implementation(module, "eager")


def hidden_of(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@contextmanager
def ends_in_float32(module: Any, but: Any = None) -> Iterator[None]:
    """Context in which all but the layers, and ``but`` one module, are in float32.

    Embeddings stay as they are: they are large, and their vectors are exact.
    """
    inside = {id(part) for part in layer_list(module).modules()}
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, torch.nn.Embedding):
                stack.callback(part.register_forward_hook(_widen_output).remove)
            elif part is not but and id(part) not in inside:
                stack.enter_context(_wide(part))
        yield


def _widen_output(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


@contextmanager
def in_float32(layer: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for part in layer.modules():
            stack.enter_context(_wide(part))
        yield


@contextmanager
def _wide(part: Any) -> Iterator[None]:
    """Context in which one module's own parameters and buffers are in float32."""
    before = []
    for held in (part._parameters, part._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32:
                before.append((held, name, tensor))
                held[name] = tensor.float()
                held[name].__dict__.update(tensor.__dict__)  # codes, by which inputs are rounded
    try:
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


@contextmanager
def forward_by(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which a module computes by another function."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
