"""Adapters of attention modules with an indexer: their keys are chosen over paged contexts.

The indexer's own code makes its queries, weights and keys. It is called with a cache that takes the keys,
and watched until it multiplies queries by keys, and scores by weights. The rest is done by
:mod:`engine.attention.key_choice`. Calls without an attention plan compute as before, but for equal scores:
of these the lower position wins there, too.

Where no request is longer than what an indexer chooses, it is taken out: its layer attends to whole contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.attention.base import INDEXER_ATTRIBUTE, LAYER_ATTRIBUTE, NO_MASK, PLAN_KEYWORD, KeyChoice
from engine.attention.key_choice import BestBlocks, BestKeys, ChoiceRule, Question, best

TOKEN_PARTS = "wq_b", "wk", "k_norm", "weights_proj", "index_topk"
"""Attributes of an indexer that chooses single keys."""
BLOCK_PARTS = "q_proj", "k_proj", "topk_blocks", "block_size", "local_blocks"
"""Attributes of an indexer that chooses blocks of keys."""
CACHES = frozenset({"past_key_values", "cache"})
"""Names that transformers has for the cache."""
FEW = {"index_topk": 3, "topk_blocks": 2, "block_size": 2}
"""Numbers that make a choice of a context of a few tokens."""


class UnknownIndexer(Exception):
    """Error: a module has an indexer of a kind that is not built."""


class IndexedAttention:
    """Adapter of one attention module, called in place of its indexer's ``forward``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._indexer = module.indexer
        self._forward = self._indexer.forward
        self._plan: Any = None
        self._is_paged = False
        self._by_blocks = all(hasattr(self._indexer, name) for name in BLOCK_PARTS)
        if not self._by_blocks and not all(hasattr(self._indexer, name) for name in TOKEN_PARTS):
            raise UnknownIndexer(type(self._indexer).__name__)
        self._indexer.forward = self
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        setattr(module, INDEXER_ATTRIBUTE, self)

    @property
    def key_dim(self) -> int:
        """Numbers of a key of the indexer."""
        return int(self._indexer.head_dim)

    @property
    def num_groups(self) -> int:
        """Number of choices of a query: KV heads are grouped by them."""
        return self.rule.num_groups(getattr(self._indexer, "num_heads", 1))

    @property
    def rule(self) -> ChoiceRule:
        """Which keys are chosen."""
        indexer = self._indexer
        if self._by_blocks:
            return BestBlocks(indexer.topk_blocks, indexer.block_size, indexer.local_blocks)
        return BestKeys(indexer.index_topk)

    @contextmanager
    def choosing_few(self) -> Iterator[None]:
        """Context in which the indexer chooses a few tokens only."""
        before = {name: getattr(self._indexer, name) for name in FEW if hasattr(self._indexer, name)}
        for name in before:
            setattr(self._indexer, name, FEW[name])
        try:
            yield
        finally:
            for name, number in before.items():
                setattr(self._indexer, name, number)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Keys chosen for a step's tokens; without a plan, the indexer's own result."""
        if not self._is_paged:
            with _LowerPositions():
                return self._forward(*args, **options)
        if self._plan is None:  # of a probe
            return KeyChoice([])
        taken = _TakenKeys()
        watch = _Watch(1 if self._by_blocks else 2)
        args = tuple(taken if each is None else each for each in args)
        options |= dict.fromkeys(CACHES & options.keys(), taken)
        try:
            with watch:
                self._forward(*args, **options)
        except _Seen:
            pass
        queries = watch.seen[0][0]
        if self._by_blocks:
            queries = queries.transpose(0, 1)
            weights = queries.new_ones(queries.shape[:2])
        else:
            weights = watch.seen[1][0, :, 0]
        question = Question(queries, weights, taken.keys.flatten(0, -2), self.rule)
        return self._plan.choose(getattr(self._module, LAYER_ATTRIBUTE), question)

    def _begin(self, _: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Note the plan of a call of the attention module."""
        self._is_paged = PLAN_KEYWORD in options
        self._plan = options.get(PLAN_KEYWORD)
        if self._plan is not None and not self._by_blocks:
            options = {**options, "attention_mask": NO_MASK}  # it is cut before the indexer is called
        return args, options


class WholeContexts:
    """Stand-in for an indexer that chooses single keys, and would choose all of every context."""

    def __init__(self, module: Any) -> None:
        """Takes the indexer of an attention module out."""
        self._is_paged = False
        del module.indexer
        module.indexer = self
        module.register_forward_pre_hook(self._begin, with_kwargs=True)

    def __call__(self, hidden: torch.Tensor, *others: Any, **_: Any) -> Any:
        """All keys; without a plan, their numbers [1, queries, keys]."""
        if self._is_paged:
            return KeyChoice([])
        mask: torch.Tensor = others[2]
        keys = torch.arange(mask.shape[-1], dtype=torch.int32, device=hidden.device)
        return keys.expand(1, hidden.shape[1], -1)

    def _begin(self, _: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._is_paged = PLAN_KEYWORD in options
        if self._is_paged and options.get("attention_mask") is None:
            options = {**options, "attention_mask": NO_MASK}
        return args, options


class _TakenKeys:
    """Stand-in for transformers' cache: takes an indexer's keys, and has one of them."""

    def __init__(self) -> None:
        self.keys = torch.empty(0)

    @property
    def layers(self) -> _TakenKeys:
        """Itself, as the cache of each layer."""
        return self

    def __getitem__(self, _: int) -> _TakenKeys:
        return self

    def update_indexer(self, keys: torch.Tensor, _: int) -> torch.Tensor:
        """Takes keys [1, tokens, dim]."""
        return self.update_index(keys)

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Takes keys [1, ..., tokens, dim]."""
        self.keys = keys
        return keys[..., :1, :]


class _Seen(Exception):
    """An indexer has made all that is wanted of it."""


class _Watch(TorchFunctionMode):  # type: ignore[misc]
    """Context that keeps the left sides of an indexer's first products."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            self.seen.append(args[0])
            if len(self.seen) == self._wanted:
                raise _Seen
        return func(*args, **(kwargs or {}))


class _LowerPositions(TorchFunctionMode):  # type: ignore[misc]
    """Context in which the highest numbers are chosen with a fixed rule for equal ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        numbers, count = args
        chosen = best(numbers, count)
        indices = chosen.nonzero()[:, -1].view(*numbers.shape[:-1], count)
        return torch.return_types.topk((numbers.gather(-1, indices), indices))


def choose_over_pages(module: Any, longest: int) -> None:
    """Have the layers of a model that have an indexer choose keys over paged contexts.

    ``longest``: tokens of the longest request.

    Raises:
        UnknownIndexer: an indexer is of a kind that is not built.
    """
    parts = [part for part in module.modules() if hasattr(part, "indexer")]
    for part in parts:
        if longest <= getattr(part.config, "index_topk", 0):
            WholeContexts(part)
        elif part.indexer is not None:  # else the keys are those of a layer before
            IndexedAttention(part)


@contextmanager
def choosing_few(module: Any) -> Iterator[None]:
    """Context in which a model's indexers choose few keys, for short runs."""
    with _all_few([adapter for part in module.modules() if (adapter := vars(part).get(INDEXER_ATTRIBUTE))]):
        yield


@contextmanager
def _all_few(adapters: list[IndexedAttention]) -> Iterator[None]:
    if not adapters:
        yield
        return
    with adapters[0].choosing_few(), _all_few(adapters[1:]):
        yield
