"""Shard of a model: a stage of its layers, and a rank's cut of each.

The transformers class is made whole on the meta device and then cut: layers of other stages become
pass-throughs, the rest goes through :mod:`parallel.tensor_plan`. transformers loads such a model like any
other, from the tensors that :mod:`engine.model.sharding.shard_weights` reads for it.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from engine.attention.base import CHOSEN_KEYS
from engine.model.checkpoint import CheckpointError
from engine.model.expert_weights import ExpertShare, expert_modules, keep_experts, spread_modules
from engine.states.layers import has_state
from parallel.communicators.base import Communicator
from parallel.pipeline_parallel import balanced_split, check_split, layers_of
from parallel.tensor_parallel import TensorRank
from parallel.tensor_plan import CutModel, cut_model
from parallel.topology import CannotCut

logger = logging.getLogger(__name__)

_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_LATENT_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_MLP = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
GAPS: dict[str, dict[str, str]] = {
    "granitemoe": _ATTENTION,
    "qwen3_vl_text": _ATTENTION | _MLP,
    "hunyuan_v1_dense": _ATTENTION | _MLP,
    "deepseek_v3": _LATENT_ATTENTION,
    "gpt2": {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "gpt_oss": _ATTENTION | {"layers.*.self_attn.sinks": "heads", "layers.*.mlp.experts": "whole_experts"},
    "qwen2_moe": {
        "layers.*.mlp.shared_expert.gate_proj": "colwise",
        "layers.*.mlp.shared_expert.up_proj": "colwise",
        "layers.*.mlp.shared_expert.down_proj": "rowwise",
    },
}
"""Tensor plans that transformers leaves out, by model type.

GPT-OSS's experts have biases and are kept whole, as in its expert-parallel plan: each rank holds some, and
the sum over ranks is that over a token's experts.
"""


@dataclass(frozen=True)
class Shard:
    """One worker's place in its instance."""

    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    """Rank among the tensor-parallel ranks of its stage."""
    size: int = 1
    split: tuple[int, ...] | None = None
    """Layers of each stage; None: balanced by bytes."""
    ranks: Communicator | None = None
    """The ranks of this stage; None if there is one."""
    stages: Communicator | None = None
    """The workers of this rank in all stages; None if there is one stage."""
    device: int = 0
    """Number of the worker's CUDA device on its host."""
    neighbours: int = 1
    """Workers of this instance on this host, this one included."""

    @property
    def is_whole(self) -> bool:
        return self.num_stages == 1 and self.size == 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def __str__(self) -> str:
        return f"PP{self.stage}_TP{self.rank}"


WHOLE = Shard()


class PassThrough(torch.nn.Module):  # type: ignore[misc]
    """Stand-in for a module of another stage."""

    returns_keys = False
    """Whether it stands for a layer that returns :data:`CHOSEN_KEYS`, too."""

    def forward(self, hidden: torch.Tensor, *_: Any, **options: Any) -> Any:
        """The input, as the replaced module returns its output."""
        hidden = self.passed(hidden)
        return (hidden, options.get(CHOSEN_KEYS)) if self.returns_keys else hidden

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for the output."""
        return hidden

    def looks_like(self, module: Any) -> PassThrough:
        """Copy the plain attributes of the replaced module: some models look them up."""
        self.returns_keys = CHOSEN_KEYS in inspect.signature(type(module).forward).parameters
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, torch.Tensor):
                self.__dict__.setdefault(name, value)
        return self


class StageInput(PassThrough):
    """Stand-in for the last layer of the previous stage: returns its output.

    Whatever the model does to its input before the first layer (scaling, for one) was done on the first
    stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What came from the stage before."""
        return hidden if self.received is None else self.received


class StageOutput(PassThrough):
    """Stand-in for the first layer of the next stage: keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output of this stage, which is kept."""
        self.hidden = hidden
        return hidden


@dataclass(frozen=True)
class Stage:
    """The ends of a stage in a model that has been cut."""

    shard: Shard
    layers: range
    input: StageInput | None = None
    output: StageOutput | None = None

    def forward(self, module: Any, hidden: torch.Tensor | None, **arguments: Any) -> torch.Tensor:
        """Run one pass over this stage.

        [1, tokens, hidden] from the stage before (None on the first one) become logits [wanted, vocabulary of
        this rank], or [1, tokens, hidden] for the next stage.
        """
        if self.input is not None:
            assert hidden is not None, "a later stage computes what came from the one before"
            self.input.received = hidden
            arguments.pop("input_ids", None)
            arguments["inputs_embeds"] = hidden
        if self.output is None:
            logits: torch.Tensor = module(**arguments).logits[0]
            return logits
        arguments.pop("logits_to_keep", None)
        module.base_model(**arguments)
        assert self.output.hidden is not None
        result, self.output.hidden = self.output.hidden, None
        return result


@dataclass
class ShardedClass:
    """A model class whose models come out cut.

    The cut is known once one model has been made.
    """

    whole: Any
    """The model on the meta device, as it would be without sharding."""
    model_class: Any
    shard: Shard
    layers: range
    plan: dict[str, str]
    share: ExpertShare | None = None
    """Experts that are held here, whole, where they are spread over instances."""
    done: CutModel = field(default_factory=CutModel)
    ties_head: bool = False
    """Whether this worker's output layer is the embedding of another stage."""
    targets: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Parameter of the whole model, and converter's pattern, by tensor name on disk.

    The reader fills it; working the names out takes seconds for tens of thousands of experts.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits, over all ranks."""
        return int(self.whole.get_output_embeddings().weight.shape[0])

    @cached_property
    def kept(self) -> frozenset[str]:
        """Names of the tensors in a model of this class.

        Once they are asked for, the cut is known.
        """
        with torch.device("meta"):
            return frozenset(self.model_class(self.whole.config).state_dict())

    def stage_of(self, module: Any) -> Stage:
        """The ends of a model of this class."""
        parts = list(stack_of(module.base_model))
        first = next((part for part in parts if isinstance(part, StageInput)), None)
        last = next((part for part in parts if isinstance(part, StageOutput)), None)
        return Stage(self.shard, self.layers, first, last)


def sharded_class(
    model_class: Any,
    config: Any,
    shard: Shard,
    share: ExpertShare | None = None,
    *,
    whole_states: bool = False,
) -> ShardedClass:
    """Prepare to make the shard of a model.

    With ``share``, its experts are not cut: those of the share are kept whole, of the layers of this stage.
    ``whole_states``: each rank has all weights of layers whose recurrent states it computes whole anyway.

    Raises:
        CheckpointError: this family cannot be cut so; the message says why and what to do.
    """
    if not hasattr(model_class, "base_model_prefix"):
        raise CheckpointError(
            "a model that brings its own code (--trust-remote-code) is not cut: use -tp 1 -pp 1"
        )
    with torch.device("meta"):
        whole = model_class(config)
    if whole.base_model is whole and hasattr(whole, USUAL_BASE):  # Llama 4's names its larger model's part
        fields = {"base_model_prefix": USUAL_BASE, "__module__": model_class.__module__}
        model_class = type(model_class.__name__, (model_class,), fields)
        whole.base_model_prefix = USUAL_BASE
    name = model_class.__name__
    layers = _layers_of_stage(name, whole, shard)
    _check_indexers(name, whole, shard, layers)
    plan = tensor_plan(name, whole) if shard.size > 1 else {}
    if share is not None:
        plan = _without_experts(plan, whole)
    if whole_states:
        plan = _without_gathered_states(name, plan, whole)
    result = ShardedClass(whole, None, shard, layers, plan, share)
    tied = whole.get_output_embeddings() is not None and bool(whole.all_tied_weights_keys)
    result.ties_head = tied and shard.is_last and not shard.is_first

    result.model_class = class_leaving(model_class, lambda model: _cut(model, result))
    try:
        assert result.kept  # raises for what does not divide before anything is read
    except CannotCut as error:
        raise CheckpointError(f"{name} with --tensor-parallel-size {shard.size}: {error}") from error
    return result


def class_leaving(model_class: Any, leave: Callable[[Any], None]) -> Any:
    """A class like ``model_class`` whose new models go through ``leave``.

    That removes from them what is not held.
    """

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        leave(self)

    return type(
        model_class.__name__,
        (model_class,),
        {"__init__": initialise, "__module__": model_class.__module__},
    )


def tensor_plan(name: str, whole: Any) -> dict[str, str]:
    """Style by path, from the model's own plan and ours for its gaps.

    Raises:
        CheckpointError: there is no plan.
    """
    config = whole.config.get_text_config()
    own = dict(getattr(config, "base_model_tp_plan", None) or {})
    plan = own | GAPS.get(config.model_type, {})
    if not plan:
        raise CheckpointError(
            f"{name} has no tensor-parallel plan (base_model_tp_plan in transformers), and none is built "
            "here: use -tp 1, and -pp to spread its layers"
        )
    prefix = f"{whole.base_model_prefix}."
    plan = {prefix + path: style for path, style in plan.items()}
    if not any(re.search(r"attn\.|\.attention\.", path) for path in plan):
        logger.warning("%s: its tensor-parallel plan leaves attention whole on every worker", name)
    return plan


def _without_experts(plan: dict[str, str], whole: Any) -> dict[str, str]:
    """A plan that leaves experts alone."""
    experts = {_starred(path) for path in spread_modules(whole)}
    return {
        path: style
        for path, style in plan.items()
        if path not in experts and path.rpartition(".")[0] not in experts
    }


def _without_gathered_states(name: str, plan: dict[str, str], whole: Any) -> dict[str, str]:
    """A plan without products whose outputs a layer with a state gathers again.

    The native kernels do not gather, and the states are those of all heads either way.
    """
    layers = {_starred(path) for path, part in whole.named_modules() if has_state(part)}
    left = {
        path: style
        for path, style in plan.items()
        if style != "colwise_gather_output" or path.rpartition(".")[0] not in layers
    }
    if len(left) < len(plan):
        logger.info("%s: layers with a recurrent state are whole on every worker", name)
    return left


def _starred(path: str) -> str:
    """A module's path as plans name it, with ``*`` for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


USUAL_BASE = "model"
"""Usual name of a model's base, where its class names none that it has."""
STACKS = "layers", "h"
"""Names of a base model's list of layers."""
EMBEDDINGS = "embed_tokens", "embeddings", "wte", "wpe"
"""Names of a base model's embeddings of tokens and of positions."""
LAST_NORMS = "norm", "norm_f", "embedding_norm", "ln_f", "final_layernorm"
"""Names of the norm behind a base model's layers."""


def stack_of(base: Any) -> Any:
    """The list of a base model's layers; None if it has none."""
    return next((getattr(base, name) for name in STACKS if hasattr(base, name)), None)


def _layers_of_stage(name: str, whole: Any, shard: Shard) -> range:
    base = whole.base_model
    stack = stack_of(base)
    if shard.num_stages == 1:
        return range(len(stack)) if isinstance(stack, torch.nn.ModuleList) else range(0)
    if not isinstance(stack, torch.nn.ModuleList):
        raise CheckpointError(f"{name} has no list of layers that could be split into stages: use -pp 1")
    extra = [
        path
        for path, child in base.named_children()
        if path not in (*EMBEDDINGS, *STACKS, *LAST_NORMS) and next(child.parameters(), None) is not None
    ]
    if extra:
        raise CheckpointError(
            f"{name} has {', '.join(extra)} beside its layers, which no stage takes: use -pp 1"
        )
    sizes = [_num_parameters(layer) for layer in stack]
    norms = [getattr(base, name, None) for name in LAST_NORMS]
    ends = _num_parameters(base.get_input_embeddings()), sum(map(_num_parameters, norms))
    head = _num_parameters(whole.get_output_embeddings())
    try:
        check_split(shard.split, len(sizes), shard.num_stages)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    split = shard.split or balanced_split(sizes, ends[0], ends[1] + head, shard.num_stages)
    return layers_of(split, shard.stage)


def _check_indexers(name: str, whole: Any, shard: Shard, layers: range) -> None:
    """Refuse cuts through a choice of keys: between layers that share it, or among heads."""
    kinds = getattr(whole.config.get_text_config(), "indexer_types", None) or ()
    if layers.start and kinds and kinds[layers.start] == "shared":
        full = [index for index, kind in enumerate(kinds) if kind == "full"]
        raise CheckpointError(
            f"{name}: layer {layers.start}, the first of stage {shard.stage}, attends to the keys that layer "
            f"{max(index for index in full if index < layers.start)} chooses, in another stage. Let stages "
            f"begin at one of {', '.join(map(str, full[1:]))} (--pipeline-split), or use -pp 1"
        )
    if shard.size > 1 and any(hasattr(part, "topk_blocks") for part in whole.modules()):
        raise CheckpointError(
            f"{name}: its indexer chooses keys for each KV head, which is not cut: use -tp 1, and -pp to "
            "spread its layers"
        )


def _num_parameters(module: Any) -> int:
    """Number of parameters of a module, equal at all ranks.

    Bytes would depend on torch's default type, which another thread may change meanwhile as it loads a model.
    """
    return 0 if module is None else sum(each.numel() for each in module.parameters())


def _cut(model: Any, sharded: ShardedClass) -> None:
    """Remove from a new model what this worker does not hold."""
    shard = sharded.shard
    if shard.num_stages > 1:
        _keep_stage(model, shard, sharded.layers)
    if shard.size > 1:
        sharded.done = cut_model(model, sharded.plan, TensorRank(shard.rank, shard.size, shard.ranks))
    if sharded.share is not None:
        for module in expert_modules(model).values():
            keep_experts(module, len(sharded.share.experts))


def _keep_stage(model: Any, shard: Shard, layers: range) -> None:
    """Keep the layers of a stage, at their indices, by which models look things up.

    The final norm stays on all stages: it is small, and some models use it before their first layer, too. So
    do learned positions, which a model adds before its first layer.
    """
    base = model.base_model
    stack = stack_of(base)
    for index, layer in enumerate(list(stack)):
        if index == layers.start - 1:
            stack[index] = StageInput().looks_like(layer)
        elif index == layers.stop:
            stack[index] = StageOutput().looks_like(layer)
        elif index not in layers:
            stack[index] = PassThrough().looks_like(layer)
    if not shard.is_last:
        model.set_output_embeddings(PassThrough())
    if not shard.is_first:
        base.set_input_embeddings(PassThrough())
    # The two may be on different workers now: each is read, nothing is tied.
    model.all_tied_weights_keys = {}
    base.all_tied_weights_keys = {}
