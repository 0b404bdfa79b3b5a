"""Layers cut over the ranks of a tensor-parallel group (Megatron-LM, Shoeybi et al. 2019).

A plan names for each module how it is cut: ``colwise`` keeps some outputs of a linear layer, the ``rowwise``
one after it the matching inputs, and one all-reduce after the pair adds up. Styles and patterns are those of
transformers' ``base_model_tp_plan``. Attention is cut by heads; KV heads fewer than ranks are held by
several. The embedding and the output layer are cut by the vocabulary.

:func:`cut_model` changes a model in place (made on the meta device, so that nothing is allocated), and says
what of each parameter remains, so that whoever fills them reads no more than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from parallel.communicators.arithmetic import even_sizes
from parallel.communicators.base import Communicator
from parallel.topology import CannotCut, kv_heads_of, sizes_that_divide

QUERY_LIKE = {"q_proj", "q_b_proj", "kv_b_proj"}
"""Children of attention modules that give something per query head (latent ones: keys and values, too)."""
KEY_LIKE = {"k_proj", "v_proj"}
"""Children that give something per KV head."""
REPLICATED = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
"""Styles that leave a module whole: what they add concerns training."""


@dataclass(frozen=True)
class Cut:
    """What one rank keeps of a parameter: ranges along one dimension."""

    dim: int
    """Counted from the end if negative: checkpoints may hold a stacked parameter's experts one by one."""
    total: int
    """Size of the whole parameter along it."""
    ranges: tuple[tuple[int, int], ...]
    """Several for a parameter packed from equal parts, as gate and up: the same range of each."""

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def take(self, source: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """The rank's part of a tensor, or of anything that is sliced like one, of ``shape``.

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
class TensorRank:
    """One rank of the group, as its layers see it."""

    rank: int
    size: int
    group: Communicator | None = None
    """None while shapes are looked at only."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks give."""
        if self.group is None or not partial.numel():
            return partial
        if partial.device.type == "cpu":
            return self.group.all_reduce(partial)
        return self.group.all_reduce(partial.cpu()).to(partial.device)

    def all_gather_columns(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """[..., widths[rank]] of all ranks, side by side: [..., sum(widths)]."""
        if self.group is None or not part.numel():
            return part.new_zeros(*part.shape[:-1], sum(widths))
        rows = part.numel() // part.shape[-1]
        flat = part.reshape(-1).cpu()
        gathered = self.group.all_gather_view(flat, [rows * width for width in widths])
        columns = [piece.view(rows, -1) for piece in gathered.split([rows * width for width in widths])]
        return torch.cat(columns, dim=1).view(*part.shape[:-1], -1).to(part.device)

    def all_gather_rows(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Rows [sizes[rank], ...] of all ranks, one below the other: [sum(sizes), ...]. Memory of the
        caller's own: layers of models write into what they are given."""
        if self.group is None or not sum(sizes):
            return part.new_zeros(sum(sizes), *part.shape[1:])
        if part.device.type == "cpu":
            return self.group.all_gather(part, sizes)
        return self.group.all_gather(part.cpu(), sizes).to(part.device)

    def even(self, total: int) -> tuple[int, int]:
        """This rank's range of ``total`` things, as equal as can be."""
        sizes = even_sizes(total, self.size)
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]

    def share(self, total: int, what: str) -> tuple[int, int]:
        """This rank's range of ``total`` things that must divide evenly."""
        if total % self.size:
            raise CannotCut(f"{what}: {total} cannot be divided by {self.size}. {sizes_that_divide(total)}")
        return total // self.size * self.rank, total // self.size * (self.rank + 1)


# ---- layers


class RowParallelLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer that has some of its inputs: partial sums, added up over the ranks, then the bias."""

    def __init__(
        self, whole: torch.nn.Linear, ranks: TensorRank, start: int, stop: int, *, split_input: bool
    ) -> None:
        super().__init__()
        self.weight = _parameter(whole.weight, (whole.out_features, stop - start))
        self.bias = whole.bias
        self.in_features, self.out_features = stop - start, whole.out_features
        self._ranks = ranks
        self._input = slice(start, stop) if split_input else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs of this rank, or all of them if it takes its own] -> [..., outputs]."""
        if self._input is not None:
            inputs = inputs[..., self._input]
        total = self._ranks.all_reduce(F.linear(inputs, self.weight))
        return total if self.bias is None else total + self.bias


class GatheredLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer that has some of its outputs and gathers the others."""

    def __init__(self, whole: torch.nn.Linear, ranks: TensorRank) -> None:
        super().__init__()
        start, stop = ranks.even(whole.out_features)
        self.weight = _parameter(whole.weight, (stop - start, whole.in_features))
        self.bias = None if whole.bias is None else _parameter(whole.bias, (stop - start,))
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self._ranks = ranks
        self._widths = even_sizes(whole.out_features, ranks.size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., all outputs]."""
        return self._ranks.all_gather_columns(F.linear(inputs, self.weight, self.bias), self._widths)


class ParallelRMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Root-mean-square norm over a width of which this rank has a part: the squares are added up."""

    def __init__(self, whole: Any, ranks: TensorRank, size: int, copies: int) -> None:
        """``copies``: on how many ranks each element stands."""
        super().__init__()
        self.weight = _parameter(whole.weight, (size,))
        self.variance_epsilon = float(whole.variance_epsilon)
        self._width = whole.weight.shape[0] * copies
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., part of the width] -> the same."""
        wide = hidden.float()
        squares = self._ranks.all_reduce(wide.pow(2).sum(-1, keepdim=True))
        wide = wide * torch.rsqrt(squares / self._width + self.variance_epsilon)
        normed: torch.Tensor = self.weight * wide.to(hidden.dtype)
        return normed


class _VocabularyParallel:
    """Mixed into an embedding that has some of its rows: a token's vector comes from the rank that has it."""

    _ranks: TensorRank
    _first: int
    num_embeddings: int

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        local = input_ids - self._first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found: torch.Tensor = super().forward(local.masked_fill(elsewhere, 0))  # type: ignore[misc]
        return self._ranks.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class _SummedExperts:
    """Mixed into a module of experts that gives partial sums."""

    _ranks: TensorRank

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._ranks.all_reduce(super().forward(*args, **kwargs))  # type: ignore[misc]


def _mix_in(mixin: type, module: Any, ranks: TensorRank) -> None:
    """Let a module go through ``mixin`` first: otherwise it stays of its own class, with all it does."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    module._ranks = ranks


def _parameter(like: torch.Tensor, shape: tuple[int, ...]) -> torch.nn.Parameter:
    return torch.nn.Parameter(like.new_empty(shape), requires_grad=False)


# ---- the model


@dataclass
class CutModel:
    """What was done to a model."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """By the name of the parameter; all others are whole."""
    whole_experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the path of an experts module that holds some experts whole: their numbers [first, stop)."""


def cut_model(model: Any, plan: Mapping[str, str], ranks: TensorRank) -> CutModel:
    """Cut a transformers causal language model for one rank.

    Args:
        model: on the meta device; changed in place.
        plan: pattern of a module's or parameter's path (``*`` is a number) -> style.

    Raises:
        CannotCut: sizes that do not divide, or a style that is not known.
    """
    done = CutModel()
    cutter = _Cutter(model, plan, ranks, done)
    for path, module in list(model.named_modules()):
        if (
            module is not model
            and path
            and cutter.style(path) is None
            and cutter.has_cut_children(path, module)
        ):
            cutter.cut_children(path, module)
    cutter.cut_vocabulary()
    return done


class _Cutter:
    """Goes through a model module by module."""

    def __init__(self, model: Any, plan: Mapping[str, str], ranks: TensorRank, done: CutModel) -> None:
        self._model = model
        self._plan = plan
        self._ranks = ranks
        self._done = done
        self._config = model.config.get_text_config()

    def style(self, path: str) -> str | None:
        """What the plan says of a path."""
        return self._plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path))

    def has_cut_children(self, path: str, module: Any) -> bool:
        names = [name for name, _ in module.named_children()]
        names += [name for name, _ in module.named_parameters(recurse=False)]
        return any(self.style(f"{path}.{name}") is not None for name in names)

    def cut_children(self, path: str, module: Any) -> None:
        """Cut what the plan names directly below ``path``."""
        styles = {name: self.style(f"{path}.{name}") for name, _ in module.named_children()}
        if QUERY_LIKE & {name for name, style in styles.items() if style is not None}:
            self._cut_attention(path, module, styles)
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
        if child is None or style in REPLICATED:
            return
        if style == "colwise":
            self._colwise(where, parent, name, *self._ranks.share(child.out_features, where))
        elif style in ("rowwise", "rowwise_split_input"):
            start, stop = self._ranks.share(child.in_features, where)
            self._rowwise(where, parent, name, start, stop, split_input=style == "rowwise_split_input")
        elif style == "colwise_gather_output":
            start, stop = self._ranks.even(child.out_features)
            self._note(f"{where}.weight", -2, child.weight, start, stop)
            if child.bias is not None:
                self._note(f"{where}.bias", -1, child.bias, start, stop)
            setattr(parent, name, GatheredLinear(child, self._ranks))
        elif style == "moe_tp_experts":
            self._cut_experts(where, child)
        elif style == "whole_experts":
            self._keep_whole_experts(where, child)
        else:
            raise CannotCut(f"{where}: the plan's style {style!r} is not built: use -tp 1")

    def _colwise(self, where: str, parent: Any, name: str, start: int, stop: int) -> None:
        whole = getattr(parent, name)
        self._note(f"{where}.weight", -2, whole.weight, start, stop)
        part = torch.nn.Linear(1, 1, bias=False, device="meta")
        part.weight = _parameter(whole.weight, (stop - start, whole.in_features))
        part.in_features, part.out_features = whole.in_features, stop - start
        if whole.bias is not None:
            self._note(f"{where}.bias", -1, whole.bias, start, stop)
            part.bias = _parameter(whole.bias, (stop - start,))
        setattr(parent, name, part)

    def _rowwise(
        self, where: str, parent: Any, name: str, start: int, stop: int, *, split_input: bool
    ) -> None:
        whole = getattr(parent, name)
        self._note(f"{where}.weight", -1, whole.weight, start, stop)
        setattr(parent, name, RowParallelLinear(whole, self._ranks, start, stop, split_input=split_input))

    def _note(self, name: str, dim: int, whole: torch.Tensor, start: int, stop: int) -> None:
        self._done.cuts[name] = Cut(dim, whole.shape[dim], ((start, stop),))

    # ---- attention

    def _cut_attention(self, path: str, module: Any, styles: Mapping[str, str | None]) -> None:
        """By heads. Norms over all heads at once are computed together, so that they need no gathering."""
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
            if style is None or style in REPLICATED or child is None:
                continue
            if name in ranges:
                each = child.out_features // units[name]
                start, stop = ranges[name]
                widths[name] = child.out_features
                self._colwise(f"{path}.{name}", module, name, start * each, stop * each)
            else:
                self._cut_child(path, module, name, "rowwise" if style == "rowwise_split_input" else style)
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            self._cut_wide_norm(path, module, norm, projection, widths)
        self._tell_heads(module, ranges)

    def _heads(self, path: str, module: Any) -> tuple[int, int]:
        heads = int(self._config.num_attention_heads)
        kv_heads = int(getattr(self._config, "num_key_value_heads", None) or heads)
        for names, count in ((QUERY_LIKE, heads), (KEY_LIKE, kv_heads)):
            for name in names:
                child = getattr(module, name, None)
                if child is not None and child.out_features % count:
                    raise CannotCut(
                        f"{path}.{name}: {child.out_features} outputs are not {count} heads: use -tp 1"
                    )
        return heads, kv_heads

    def _cut_wide_norm(
        self, path: str, module: Any, norm: str, projection: str, widths: Mapping[str, int]
    ) -> None:
        whole = getattr(module, norm, None)
        if whole is None or whole.weight.shape[0] != widths.get(projection):
            return  # over one head: every rank has all of it
        cut = self._done.cuts[f"{path}.{projection}.weight"]
        copies = self._ranks.size * cut.size // cut.total
        self._done.cuts[f"{path}.{norm}.weight"] = Cut(-1, cut.total, cut.ranges)
        setattr(module, norm, ParallelRMSNorm(whole, self._ranks, cut.size, copies))

    def _tell_heads(self, module: Any, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Attributes that some families compute with."""
        local, local_kv = (stop - start for start, stop in (ranges["q_proj"], ranges["k_proj"]))
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
        _mix_in(_SummedExperts, experts, self._ranks)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            style = self.style(f"{where}.{name}")
            if style is not None:
                self._cut_parameter(where, experts, name, parameter, style)

    def _keep_whole_experts(self, where: str, experts: Any) -> None:
        """Some experts, whole: what the others would add comes from their ranks."""
        total = int(experts.num_experts)
        first, stop = self._ranks.share(total, f"{where}: the experts")
        _mix_in(_SummedExperts, experts, self._ranks)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if parameter.shape[0] == total:
                self._done.cuts[f"{where}.{name}"] = Cut(0, total, ((first, stop),))
                setattr(experts, name, _parameter(parameter, (stop - first, *parameter.shape[1:])))
        experts.num_experts = stop - first
        self._done.whole_experts[where] = (first, stop)

    def _cut_parameter(self, path: str, module: Any, name: str, parameter: torch.Tensor, style: str) -> None:
        where = f"{path}.{name}"
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
        setattr(module, name, _parameter(parameter, tuple(shape)))

    # ---- vocabulary

    def cut_vocabulary(self) -> None:
        """Rows of the embedding and of the output layer, as equal as can be; both the same if they are tied.
        In a pipeline a stage may have neither."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)
        if isinstance(embedding, torch.nn.Embedding):
            start, stop = self._ranks.even(embedding.weight.shape[0])
            self._note(f"{paths[id(embedding)]}.weight", -2, embedding.weight, start, stop)
            embedding.weight = _parameter(embedding.weight, (stop - start, embedding.weight.shape[1]))
            embedding.num_embeddings, embedding.padding_idx = stop - start, None
            _mix_in(_VocabularyParallel, embedding, self._ranks)
            embedding._first = start
        if isinstance(head, torch.nn.Linear):
            path, _, name = paths[id(head)].rpartition(".")
            parent = self._model.get_submodule(path)
            self._colwise(paths[id(head)], parent, name, *self._ranks.even(head.weight.shape[0]))
            if tied:
                getattr(parent, name).weight = embedding.weight
