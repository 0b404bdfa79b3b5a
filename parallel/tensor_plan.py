"""Cuts a model over the ranks of a tensor-parallel group, by its plan.

A plan names for each module how it is cut: ``colwise`` keeps some outputs of a linear layer, the ``rowwise``
one after it the matching inputs, and one all-reduce after the pair adds up. Styles and patterns are those of
transformers' ``base_model_tp_plan``. Attention is cut by heads; KV heads fewer than ranks are held by
several. The embedding and the output layer are cut by the vocabulary.

:func:`cut_model` changes a model in place (made on the meta device, so that nothing is allocated), and
returns what of each parameter remains, so that a loader reads no more than that. The layers that it puts in
are those of :mod:`parallel.tensor_parallel`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel.tensor_parallel import (
    FirstRankOnly,
    GatheredLinear,
    OwnNumbers,
    ParallelRMSNorm,
    RowParallelLinear,
    SummedExperts,
    TensorRank,
    VocabularyParallel,
    empty_parameter,
    inputs_of,
    is_turned,
    mix_in,
    outputs_of,
)
from parallel.topology import CannotCut, kv_heads_of

JOINED_MLP = {"gate_up_proj": "colwise_gather_output", "down_proj": "rowwise_split_input"}
"""Styles of an MLP whose gate and up are one layer."""
QUERY_LIKE = {"q_proj", "q_b_proj", "kv_b_proj"}
"""Children of attention modules with outputs per query head.

Those of latent attention include keys and values.
"""
JOINED_QKV = {"qkv_proj", "c_attn"}
"""Children of attention modules with all queries, then all keys, then all values."""
KEY_LIKE = {"k_proj", "v_proj"}
"""Children of attention modules with outputs per KV head."""
REPLICATED = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
"""Styles that leave a module whole: what they add concerns training."""


@dataclass(frozen=True)
class Cut:
    """What one rank keeps of a parameter: ranges along one dimension."""

    dim: int
    """Cut dimension, counted from the end if negative.

    Checkpoints may hold a stacked parameter's experts one by one.
    """
    total: int
    """Size of the whole parameter along the cut dimension."""
    ranges: tuple[tuple[int, int], ...]
    """Ranges to keep.

    A parameter packed from equal parts, as gate and up, has several: the same range of each part.
    """

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def take(self, source: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """The rank's part of a tensor of ``shape``, or of an object sliced like one.

        A part of a packed parameter may come alone, as it stands in checkpoints that hold gate and up apart.
        """
        dim = self.dim % len(shape)
        ranges = self.ranges
        if shape[dim] != self.total:
            if shape[dim] * len(self.ranges) != self.total:
                raise CannotCut(
                    f"a tensor of shape {list(shape)} where dimension {dim} should be {self.total}"
                )
            ranges = self.ranges[:1]
        parts = [source[(slice(None),) * dim + (slice(start, stop),)] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


@dataclass
class CutModel:
    """The cuts made in a model."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """Cuts by the name of the parameter; all others are whole."""
    whole_experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Experts [first, stop) held whole, by the path of their experts module."""


def cut_model(model: Any, plan: Mapping[str, str], ranks: TensorRank) -> CutModel:
    """Cut a transformers causal language model for one rank.

    Args:
        model: on the meta device; changed in place.
        plan: pattern of a module's or parameter's path (``*`` is a number) -> style.

    Raises:
        CannotCut: a size does not divide, a style is not known, or an entry of the plan names a part of this
            model and would not be applied.
    """
    done = CutModel()
    cutter = _Cutter(model, plan, ranks, done)
    named = cutter.named_by_plan()
    for path, module in list(model.named_modules()):
        if (
            module is not model
            and path
            and cutter.style(path) is None
            and cutter.has_cut_children(path, module)
        ):
            cutter.cut_children(path, module)
    cutter.cut_vocabulary()
    cutter.check_applied(named)
    return done


class _Cutter:
    """Walks over a model's modules and cuts each by the tensor-parallel plan."""

    def __init__(self, model: Any, plan: Mapping[str, str], ranks: TensorRank, done: CutModel) -> None:
        self._model = model
        self._plan = plan
        self._ranks = ranks
        self._done = done
        self._config = model.config.get_text_config()
        self._vocabulary = model.get_input_embeddings(), model.get_output_embeddings()
        self._applied: set[str] = set()
        """Patterns of the plan that were followed, or ask for nothing."""

    def named_by_plan(self) -> set[str]:
        """Patterns of the plan that name an existing module or parameter of the model."""
        paths = [path for path, _ in self._model.named_modules()]
        paths += [path for path, _ in self._model.named_parameters()]
        return {pattern for path in paths if (pattern := _pattern(path)) in self._plan}

    def check_applied(self, named: set[str]) -> None:
        """Refuse a plan of which a part was left out.

        What that part would have cut is now summed as if it had been.

        Raises:
            CannotCut: ``named`` has patterns that were not applied.
        """
        left_out = sorted(named - self._applied)
        if left_out:
            entries = ", ".join(f"{pattern} ({self._plan[pattern]!r})" for pattern in left_out)
            raise CannotCut(f"these entries of its plan are not applied: {entries}. Use -tp 1")

    def style(self, path: str) -> str | None:
        """The plan's style for a path; None if it names none."""
        return self._plan.get(_pattern(path))

    def has_cut_children(self, path: str, module: Any) -> bool:
        names = [name for name, _ in module.named_children()]
        names += [name for name, _ in module.named_parameters(recurse=False)]
        return any(self.style(f"{path}.{name}") is not None for name in names)

    def cut_children(self, path: str, module: Any) -> None:
        """Cut what the plan names directly below ``path``."""
        styles = {name: self.style(f"{path}.{name}") for name, _ in module.named_children()}
        named = {name for name, style in styles.items() if style is not None}
        if QUERY_LIKE & named:
            self._cut_attention(path, module, styles)
        elif JOINED_QKV & named:
            self._cut_joined_attention(path, module, styles)
        elif {name: style for name, style in styles.items() if style is not None} == JOINED_MLP:
            self._cut_joined_mlp(path, module)
        else:
            for name, style in styles.items():
                if style is not None:
                    self._cut_child(path, module, name, style)
        for name, parameter in list(module.named_parameters(recurse=False)):
            style = self.style(f"{path}.{name}")
            if style is not None:
                self._cut_parameter(path, module, name, parameter, style)

    # ---- linear layers

    def _cut_child(self, path: str, parent: Any, name: str, style: str) -> None:
        child = getattr(parent, name)
        where = f"{path}.{name}"
        self._applied.add(_pattern(where))
        if child is None or style in REPLICATED or any(child is each for each in self._vocabulary):
            return
        if style == "colwise":
            self._colwise(where, parent, name, self._ranks.share(outputs_of(child), where))
        elif style in ("rowwise", "rowwise_split_input"):
            start, stop = self._ranks.share(inputs_of(child), where)
            self._rowwise(where, parent, name, start, stop, split_input=style == "rowwise_split_input")
        elif style == "colwise_gather_output":
            part = self._ranks.even(child.out_features)
            self._note(f"{where}.weight", -2, child.weight, part)
            if child.bias is not None:
                self._note(f"{where}.bias", -1, child.bias, part)
            setattr(parent, name, GatheredLinear(child, self._ranks))
        elif style == "moe_tp_experts":
            self._cut_experts(where, child)
        elif style == "whole_experts":
            self._keep_whole_experts(where, child)
        elif style == "moe_identity_expert":
            setattr(parent, name, FirstRankOnly(self._ranks))
        else:
            raise CannotCut(f"{where}: the plan's style {style!r} is not built: use -tp 1")

    def _colwise(self, where: str, parent: Any, name: str, *ranges: tuple[int, int]) -> None:
        """Keep these ranges of a linear layer's outputs."""
        whole = getattr(parent, name)
        self._note(f"{where}.weight", -1 if is_turned(whole) else -2, whole.weight, *ranges)
        inputs, outputs = inputs_of(whole), sum(stop - start for start, stop in ranges)
        if is_turned(whole):
            with torch.device("meta"):
                part = type(whole)(outputs, inputs)
            part.weight = empty_parameter(whole.weight, (inputs, outputs))
        else:
            part = torch.nn.Linear(1, 1, bias=False, device="meta")
            part.weight = empty_parameter(whole.weight, (outputs, inputs))
            part.in_features, part.out_features = inputs, outputs
        if whole.bias is not None:
            self._note(f"{where}.bias", -1, whole.bias, *ranges)
            part.bias = empty_parameter(whole.bias, (outputs,))
        setattr(parent, name, part)

    def _rowwise(
        self, where: str, parent: Any, name: str, start: int, stop: int, *, split_input: bool
    ) -> None:
        whole = getattr(parent, name)
        self._note(f"{where}.weight", -2 if is_turned(whole) else -1, whole.weight, (start, stop))
        setattr(parent, name, RowParallelLinear(whole, self._ranks, start, stop, split_input=split_input))

    def _note(self, name: str, dim: int, whole: torch.Tensor, *ranges: tuple[int, int]) -> None:
        self._done.cuts[name] = Cut(dim, whole.shape[dim], ranges)

    def _cut_joined_mlp(self, path: str, module: Any) -> None:
        """Cut an MLP whose gate and up are one layer: the same columns of both.

        So its middle need not be gathered, as its plan would.
        """
        joined, down = JOINED_MLP
        self._applied |= {_pattern(f"{path}.{name}") for name in JOINED_MLP}
        whole = getattr(module, joined)
        width = whole.out_features // 2
        start, stop = self._ranks.share(width, f"{path}.{joined}")
        self._colwise(f"{path}.{joined}", module, joined, (start, stop), (width + start, width + stop))
        self._rowwise(f"{path}.{down}", module, down, start, stop, split_input=False)

    # ---- attention

    def _cut_attention(self, path: str, module: Any, styles: Mapping[str, str | None]) -> None:
        """Cut attention by heads.

        Norms over all heads at once are computed together, so that they need no gathering.
        """
        gathers = "colwise_gather_output" in styles.values()
        by_heads = not gathers or (hasattr(module, "q_norm") and "k_proj" in styles and "v_proj" in styles)
        if not by_heads:
            for name, style in styles.items():
                if style is not None:
                    self._cut_child(path, module, name, style)
            return
        heads, kv_heads = self._heads(path, module)
        ranges = dict.fromkeys(KEY_LIKE, kv_heads_of(heads, kv_heads, self._ranks.rank, self._ranks.size))
        ranges |= dict.fromkeys(QUERY_LIKE, self._ranks.share(heads, path))
        units = dict.fromkeys(QUERY_LIKE, heads) | dict.fromkeys(KEY_LIKE, kv_heads)
        widths = {}
        for name, style in styles.items():
            child = getattr(module, name, None)
            if style is None:
                continue
            self._applied.add(_pattern(f"{path}.{name}"))
            if style in REPLICATED or child is None:
                continue
            if name in ranges:
                each = child.out_features // units[name]
                start, stop = ranges[name]
                widths[name] = child.out_features
                self._colwise(f"{path}.{name}", module, name, (start * each, stop * each))
            else:
                self._cut_child(path, module, name, "rowwise" if style == "rowwise_split_input" else style)
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            if projection in widths and units[projection] > 1:  # else it is of the one head, which all have
                self._cut_wide_norm(path, module, norm, projection, widths)
                self._cut_norm_of_each_head(path, module, norm, units[projection], ranges[projection])
        self._tell_heads(module, ranges["q_proj"], ranges["k_proj"])

    def _cut_joined_attention(self, path: str, module: Any, styles: Mapping[str, str | None]) -> None:
        """Cut attention whose queries, keys and values are one layer: the same heads of each."""
        heads, kv_heads = self._heads(path, module)
        joined = next(name for name in JOINED_QKV if styles.get(name) is not None)
        where, total = f"{path}.{joined}", heads + 2 * kv_heads
        outputs = outputs_of(getattr(module, joined))
        if outputs % total:
            raise CannotCut(f"{where}: {outputs} outputs are not {total} heads: use -tp 1")
        dim, own = outputs // total, self._ranks.share(heads, path)
        own_kv = kv_heads_of(heads, kv_heads, self._ranks.rank, self._ranks.size)
        parts = (0, own), (heads, own_kv), (heads + kv_heads, own_kv)
        self._applied.add(_pattern(where))
        ranges = [((before + first) * dim, (before + stop) * dim) for before, (first, stop) in parts]
        self._colwise(where, module, joined, *ranges)
        for name, style in styles.items():
            if name != joined and style is not None:
                self._cut_child(path, module, name, "rowwise" if style == "rowwise_split_input" else style)
        self._tell_heads(module, own, own_kv)
        # Some split what the joined layer gives by their configuration's numbers.
        module.config = OwnNumbers(
            module.config, num_attention_heads=own[1] - own[0], num_key_value_heads=own_kv[1] - own_kv[0]
        )
        if hasattr(module, "split_size"):
            module.split_size = (own[1] - own[0]) * dim

    def _heads(self, path: str, module: Any) -> tuple[int, int]:
        heads = int(self._config.num_attention_heads)
        kv_heads = self._kv_heads(module, heads)
        for names, count in ((QUERY_LIKE, heads), (KEY_LIKE, kv_heads)):
            for name in names:
                child = getattr(module, name, None)
                if child is not None and child.out_features % count:
                    raise CannotCut(
                        f"{path}.{name}: {child.out_features} outputs are not {count} heads: use -tp 1"
                    )
        return heads, kv_heads

    def _kv_heads(self, module: Any, heads: int) -> int:
        """KV heads of an attention module: some layers have another number than their model."""
        key, groups = getattr(module, "k_proj", None), getattr(module, "num_key_value_groups", None)
        if key is not None and isinstance(groups, int):
            return heads // groups
        return int(getattr(self._config, "num_key_value_heads", None) or heads)

    def _cut_wide_norm(
        self, path: str, module: Any, norm: str, projection: str, widths: Mapping[str, int]
    ) -> None:
        whole = getattr(module, norm, None)
        weight = getattr(whole, "weight", None)
        if weight is None or weight.shape[0] != widths.get(projection):
            return  # over one head: every rank has all of it
        cut = self._done.cuts[f"{path}.{projection}.weight"]
        copies = self._ranks.size * cut.size // cut.total
        self._done.cuts[f"{path}.{norm}.weight"] = Cut(-1, cut.total, cut.ranges)
        setattr(module, norm, ParallelRMSNorm(whole, self._ranks, cut.size, copies))

    def _cut_norm_of_each_head(
        self, path: str, module: Any, norm: str, heads: int, own: tuple[int, int]
    ) -> None:
        """Keep the weights of this rank's heads, where each head has its own."""
        part: Any = getattr(module, norm, None)
        weight = getattr(part, "weight", None)
        if weight is not None and weight.ndim == 2 and weight.shape[0] == heads:
            self._note(f"{path}.{norm}.weight", -2, weight, own)
            part.weight = empty_parameter(weight, (own[1] - own[0], weight.shape[1]))

    def _tell_heads(self, module: Any, own: tuple[int, int], own_kv: tuple[int, int]) -> None:
        """Set per-rank head counts on attention modules of families that read them."""
        local, local_kv = own[1] - own[0], own_kv[1] - own_kv[0]
        for names, count in (
            (("num_heads", "num_attention_heads"), local),
            (("num_kv_heads", "num_key_value_heads"), local_kv),
            (("num_key_value_groups",), local // local_kv),
        ):
            for name in names:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, count)

    # ---- experts and single parameters

    def _cut_experts(self, where: str, experts: Any) -> None:
        if getattr(experts, "has_bias", False) or getattr(experts, "is_transposed", False):
            raise CannotCut(f"{where}: experts with biases or transposed weights are not cut: use -tp 1")
        mix_in(SummedExperts, experts, self._ranks)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            style = self.style(f"{where}.{name}")
            if style is not None:
                self._cut_parameter(where, experts, name, parameter, style)
        for name, _ in list(experts.named_children()):
            style = self.style(f"{where}.{name}")
            if style is not None:
                self._cut_child(where, experts, name, style)

    def _keep_whole_experts(self, where: str, experts: Any) -> None:
        """Keep this rank's share of the experts whole; the ranks add up their sums."""
        total = int(experts.num_experts)
        first, stop = self._ranks.share(total, f"{where}: the experts")
        mix_in(SummedExperts, experts, self._ranks)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            self._applied.add(_pattern(f"{where}.{name}"))
            if parameter.shape[0] == total:
                self._done.cuts[f"{where}.{name}"] = Cut(0, total, ((first, stop),))
                setattr(experts, name, empty_parameter(parameter, (stop - first, *parameter.shape[1:])))
        experts.num_experts, experts.first_whole = stop - first, first
        self._done.whole_experts[where] = (first, stop)

    def _cut_parameter(self, path: str, module: Any, name: str, parameter: torch.Tensor, style: str) -> None:
        where = f"{path}.{name}"
        self._applied.add(_pattern(where))
        if where in self._done.cuts:
            return
        if style == "packed_colwise":
            total = parameter.shape[-2]
            start, stop = self._ranks.share(total // 2, where)
            cut = Cut(-2, total, ((start, stop), (total // 2 + start, total // 2 + stop)))
        elif style in ("colwise", "heads"):
            dim = -1 if style == "heads" else -2
            cut = Cut(dim, parameter.shape[dim], (self._ranks.share(parameter.shape[dim], where),))
        elif style == "rowwise":
            cut = Cut(-1, parameter.shape[-1], (self._ranks.share(parameter.shape[-1], where),))
        else:
            raise CannotCut(f"{where}: the plan's style {style!r} is not built: use -tp 1")
        shape = list(parameter.shape)
        shape[cut.dim] = cut.size
        self._done.cuts[where] = cut
        setattr(module, name, empty_parameter(parameter, tuple(shape)))

    # ---- vocabulary

    def cut_vocabulary(self) -> None:
        """Cut the rows of the embedding and the output layer, as equally as can be.

        Both the same if they are tied. In a pipeline a stage may have neither.
        """
        paths = {id(module): path for path, module in self._model.named_modules()}
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)
        if isinstance(embedding, torch.nn.Embedding):
            start, stop = self._ranks.even(embedding.weight.shape[0])
            self._note(f"{paths[id(embedding)]}.weight", -2, embedding.weight, (start, stop))
            embedding.weight = empty_parameter(embedding.weight, (stop - start, embedding.weight.shape[1]))
            embedding.num_embeddings, embedding.padding_idx = stop - start, None
            mix_in(VocabularyParallel, embedding, self._ranks)
            embedding.first = start
        if isinstance(head, torch.nn.Linear):
            path, _, name = paths[id(head)].rpartition(".")
            parent = self._model.get_submodule(path)
            start, stop = self._ranks.even(head.weight.shape[0])
            self._colwise(paths[id(head)], parent, name, (start, stop))
            getattr(parent, name).first = start
            if tied:
                getattr(parent, name).weight = embedding.weight


def _pattern(path: str) -> str:
    """A path as plans have it: ``*`` for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
