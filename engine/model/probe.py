"""Probes a model's attention layers, and checks our attention against its own.

``probe_layers`` runs the model once on a few tokens with an attention function that only takes notes. It
notes what each layer would cache, and which mask transformers would have built for it. ``verify`` runs a
short scenario (prefill in chunks, decode, two requests packed) through the paged attention and compares with
transformers' eager attention. So a model whose layers mix tokens in a way that is unknown here is refused
rather than served wrong.

The scenario is short. Both sides compute far positions by the same code from the same ``position_ids``, so
they would agree there. They do not show a layer that counts the tokens of a call instead. Such layers are
looked for when the model is probed.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention import make_attention
from engine.attention.base import (
    BIASES_KEYWORD,
    IMPLEMENTATION,
    INDEXER_ATTRIBUTE,
    LAYER_ATTRIBUTE,
    PLAN_KEYWORD,
    REACH_KEYWORD,
    WHOLE_CONTEXT,
    Int64s,
    KeyReach,
    LayerShape,
    LayersInTurn,
    PackedRows,
    PagedAttention,
)
from engine.attention.indexers import IndexedAttention, choosing_few
from engine.attention.own_attention import set_implementation
from engine.model.checkpoint import CheckpointError
from engine.model.model_sources import ALONE_LAYER_TYPES, LAYER_TYPES, NOT_THROUGH_INTERFACE
from engine.model.sharding.shard import PassThrough, Stage
from engine.states.held import StateRows
from engine.states.layers import StateLayers
from parallel.communicators.base import CollectiveError

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position) -> whether the query sees the key."""

PROBE_IMPLEMENTATION = "lockstep-probe"
PROBE_TOKENS = 3
OTHER = KeyReach(window=-1)
"""Stands for masks that are neither causal, nor a window, nor chunks."""
MASK_CODE = 64
"""Number that fills the masks of the probe, with those after it.

They are exact in bfloat16, too.
"""

COUNTS = (
    "counts the tokens of a call instead of using position_ids, so tokens of several requests, or of a later "
    "chunk, would be computed as if they stood elsewhere"
)
NOT_CAUSAL = (
    "uses a mask that is neither causal, nor a causal window, nor causal chunks, or builds it in its own way"
)

BLOCK_SIZE = 4
FIRST, SECOND = 11, 6
"""Lengths of the two requests of ``verify``."""
TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Relative difference of a token's logits, median over tokens.

Coarse: a wrong mask or a lost position gives 1; in 16 bits, a near-tie between experts may give a few tenths
on some tokens.
"""


def probe_layers(
    module: Any, name: str, context_length: int, stage: Stage, states: StateLayers | None = None
) -> tuple[int, tuple[LayerShape, ...]]:
    """Width of the stage's output, and each attention layer's shape, in call order.

    This numbers the attention modules (``LAYER_ATTRIBUTE``) and leaves the model on our implementation.

    Raises:
        CheckpointError: a layer does something that the paged attention does not do.
        CollectiveError: another worker of the stage does not follow.
    """
    probe, outputs = _run_probe(module, name, context_length, stage)
    if not probe.shapes and states is None:
        raise CheckpointError(f"{name}: {NOT_THROUGH_INTERFACE}")
    mixing = set(probe.seen) | (set() if states is None else states.identities)
    _check_all_layers_attend(module, name, mixing, _token_by_token(module.config.get_text_config()))
    if any(_may_count(attention) for attention in probe.seen.values()):
        _check_none_counts(probe, lambda: _run_probe(module, name, context_length, stage)[0])
    return outputs.shape[-1], tuple(probe.shapes)


def _check_none_counts(probe: _Probe, run_again: Callable[[], _Probe]) -> None:
    """Refuse layers whose queries and keys depend on where a range of numbers begins."""
    attentions = [probe.seen[identity] for identity in probe.callers]
    try:
        with _Renumbered(probe.far, probe.seen.values()):
            again = run_again()
    except CheckpointError:  # numbers that index something: positions do not
        return
    for attention, before, now in zip(attentions, probe.given, again.given, strict=True):
        if not torch.allclose(before, now, equal_nan=True):
            raise probe.refuse(attention, COUNTS)


def _run_probe(module: Any, name: str, context_length: int, stage: Stage) -> tuple[_Probe, torch.Tensor]:
    """Observations of one run of a stage, and its output."""
    probe = _Probe(module, name, far=2 * max(context_length, 1 << 14))
    implementation = f"{PROBE_IMPLEMENTATION}-{threading.get_ident()}"  # workers may be threads
    AttentionInterface.register(implementation, probe.attention)
    AttentionMaskInterface.register(implementation, probe.mask)
    set_implementation(module, implementation)
    try:
        tokens = torch.arange(PROBE_TOKENS, device=module.device)
        return probe, run_stage(module, stage, tokens, tokens, **{PLAN_KEYWORD: None})
    except (CheckpointError, CollectiveError):  # another worker has failed, not this one
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{name}: a first run on {PROBE_TOKENS} tokens failed: {error}") from error
    finally:
        set_implementation(module, IMPLEMENTATION)


def _may_count(attention: Any) -> bool:
    """Whether an attention module's code makes a range of numbers, for positions or otherwise."""
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    return code is not None and "arange" in code.co_names


class _Renumbered(TorchFunctionMode):  # type: ignore[misc]
    """Context in which ranges of numbers inside attention modules begin far away."""

    def __init__(self, far: int, attentions: Iterable[Any]) -> None:
        super().__init__()
        self._far = far
        self._attentions = list(attentions)
        self._inside = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> _Renumbered:
        for attention in self._attentions:
            self._hooks.append(attention.register_forward_pre_hook(lambda *_: self._step(1)))
            self._hooks.append(attention.register_forward_hook(lambda *_: self._step(-1), always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _step(self, change: int) -> None:
        self._inside += change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + self._far if func is torch.arange and self._inside else result


class _Probe:
    """Attention and mask functions that take notes instead of computing."""

    def __init__(self, module: Any, name: str, far: int) -> None:
        self.name = name
        self.device = module.device
        self.far = far
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.reaches: list[KeyReach] = []
        """What the masks built so far let queries see."""
        self.shapes: list[LayerShape] = []
        self.seen: dict[int, Any] = {}
        """Attention modules by identity, in the order of calls."""
        self.callers: list[int] = []
        """Identity of the module of each call."""
        self.given: list[torch.Tensor] = []
        """Queries and keys of each call, one behind the other."""

    def refuse(self, attention: Any, problem: str) -> CheckpointError:
        path = self.paths.get(id(attention), type(attention).__name__)
        return CheckpointError(f"{self.name}: {path} {problem}")

    def mask(self, *, mask_function: MaskFunction, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
        """Called by transformers in place of building a mask.

        Its result goes to the layers.
        """
        self.reaches.append(_reach(mask_function, self.far))
        code = MASK_CODE + len(self.reaches) - 1
        return torch.full((1, 1, q_length, kv_length), code, device=self.device)

    def attention(
        self,
        attention: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if options.get("position_bias") is not None:
            raise self.refuse(attention, "adds a position bias, which is not built")
        reach = options.get(REACH_KEYWORD) or self._reach_of(attention, attention_mask)
        self.callers.append(id(attention))
        self.given.append(torch.cat([query.flatten(), key.flatten()]))
        self._number(attention)
        indexer: IndexedAttention | None = vars(attention).get(INDEXER_ATTRIBUTE)
        if indexer is not None and indexer.num_groups not in (1, key.shape[1]):
            problem = (
                f"chooses keys {indexer.num_groups} times for {key.shape[1]} KV heads, which is not built"
            )
            raise self.refuse(attention, problem)
        shape = LayerShape(
            key.shape[1],
            key.shape[3],
            value.shape[3],
            reach.window,
            chunk=reach.chunk,
            index_dim=0 if indexer is None else indexer.key_dim,
            bias_numbers=options.get(BIASES_KEYWORD, 0),
        )
        self.shapes.append(shape)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def _number(self, attention: Any) -> None:
        """Give a module the number of its next cached layer."""
        number = len(self.shapes)
        if id(attention) not in self.seen:
            self.seen[id(attention)] = attention
            setattr(attention, LAYER_ATTRIBUTE, number)
            return
        before = getattr(attention, LAYER_ATTRIBUTE)
        if not isinstance(before, LayersInTurn):
            setattr(attention, LAYER_ATTRIBUTE, before := LayersInTurn(before))
        before.layers.append(number)

    def _reach_of(self, attention: Any, mask: torch.Tensor | None) -> KeyReach:
        if mask is None:
            raise self.refuse(attention, NOT_CAUSAL)
        first = float(mask.flatten()[0])
        index = int(first) - MASK_CODE if abs(first) < 2 * MASK_CODE else -1
        if not 0 <= index < len(self.reaches) or not bool((mask == mask.flatten()[0]).all()):
            raise self.refuse(attention, NOT_CAUSAL)  # a mask that is not, or not only, one of ours
        if self.reaches[index] == OTHER:
            raise self.refuse(attention, NOT_CAUSAL)
        return self.reaches[index]


def _reach(mask_function: MaskFunction, far: int) -> KeyReach:
    """What a mask function lets queries see; OTHER for any other mask.

    Mask functions work on indices, so they can be asked about positions far beyond the probe.
    """
    positions: Int64s = np.array([far, far - far // 3 - 1])
    firsts = [_first_key(mask_function, position) for position in positions.tolist()]
    first, other = firsts
    if first is None or other is None:
        return OTHER
    window = far - first + 1
    guesses = [WHOLE_CONTEXT, KeyReach(window=window)]
    if first:
        before = _first_key(mask_function, first - 1)
        chunk = first - (before or 0)
        guesses.append(KeyReach(chunk=chunk))
        positions = np.append(positions, [first - 1, first, first - chunk // 2])
        firsts += [_first_key(mask_function, position) for position in positions[2:].tolist()]
    return next((guess for guess in guesses if guess.first_key(positions).tolist() == firsts), OTHER)


def _first_key(mask_function: MaskFunction, query: int) -> int | None:
    """First key that a query sees; None for a mask with gaps.

    None, too, if the query sees later keys, or not its own.
    """
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(query + 2)
    visible = mask_function(zero, zero, torch.tensor(query), keys).expand(len(keys))
    first = query - int(visible.sum()) + 1
    return first if first >= 0 and bool(visible[first : query + 1].all()) else None


def _check_all_layers_attend(
    module: Any, name: str, attention_ids: set[int], alone: Sequence[bool] = ()
) -> None:
    """Check that each decoder layer has a module that attended, or one with a state.

    ``alone``: by layer, whether it mixes no tokens; empty where that is unknown.
    """
    for path, stack in module.named_modules():
        if not isinstance(stack, torch.nn.ModuleList):
            continue
        own = [index for index, layer in enumerate(stack) if not isinstance(layer, PassThrough)]
        idle = [
            index for index in own if not any(id(part) in attention_ids for part in stack[index].modules())
        ]
        if len(idle) == len(own):
            continue  # a list of something else
        if len(alone) == len(stack):
            idle = [index for index in idle if not alone[index]]
        if idle:
            raise CheckpointError(
                f"{name}: {len(idle)} of {len(own)} layers did not call the attention function, first "
                f"{path}.{idle[0]} ({type(stack[idle[0]]).__name__}): what it keeps between tokens is unknown"
            )


def _token_by_token(config: Any) -> list[bool]:
    """By layer, whether it mixes no tokens by its configuration; empty if that is silent."""
    types = next((types for name in LAYER_TYPES if (types := getattr(config, name, None))), ())
    return [each in ALONE_LAYER_TYPES for each in types]


def verify(
    module: Any,
    name: str,
    layers: tuple[LayerShape, ...],
    vocab_size: int,
    dtype: torch.dtype,
    stage: Stage,
    states: StateLayers | None = None,
) -> None:
    """Compare packed, chunked, paged steps with transformers' eager attention on whole sequences.

    Indexers choose few of the tokens meanwhile.

    Raises:
        CheckpointError: they disagree.
    """
    ids = (torch.arange(FIRST + SECOND, device=module.device) * 7919 + 13) % vocab_size
    cache = make_attention(layers, num_blocks=8, block_size=BLOCK_SIZE, dtype=dtype, device=module.device)
    with choosing_few(module):
        set_implementation(module, "eager")
        try:
            expected = torch.cat([_alone(module, stage, ids[:FIRST]), _alone(module, stage, ids[FIRST:])])
        finally:
            set_implementation(module, IMPLEMENTATION)
        if not bool(expected.isfinite().all()):
            raise CheckpointError(
                f"{name}: on a few tokens its output is not finite in {dtype}: broken weights, or a type "
                "too small for it (try --dtype bfloat16 or float32)"
            )
        found = _in_steps(module, stage, ids, cache, states)
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    difference = float(((found - expected).norm(dim=-1) / spread.clamp(min=1e-6)).median())
    if not difference <= TOLERANCE.get(dtype, 0.3):
        raise CheckpointError(
            f"{name}: with paged attention its output differs from transformers' own by {difference:.0%}. It "
            "seems to mix tokens in a way that is not built; it would be served wrong"
        )


def _in_steps(
    module: Any, stage: Stage, ids: torch.Tensor, cache: PagedAttention, states: StateLayers | None
) -> torch.Tensor:
    """[tokens, width] outputs of two requests, packed, chunked and paged."""
    tables = np.array([[5, 1, 6, 0], [2, 7, 3, 0]], dtype=np.int32)
    found: dict[int, torch.Tensor] = {}
    first, second = 0, FIRST  # where each request's tokens begin in ids
    steps = [  # [(request, start, count)]: chunked prefill, then decode beside prefill
        [(1, 0, 2), (0, 0, 5)],
        [(1, 2, 1), (0, 5, 5)],
        [(0, 10, 1), (1, 3, 3)],
    ]
    for rows in steps:
        places = np.concatenate(
            [np.arange(start, start + count) + (first, second)[request] for request, start, count in rows]
        )
        starts = np.array([start for _, start, _ in rows])
        counts = np.array([count for _, _, count in rows])
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
        packed = PackedRows(
            starts, counts, tables[[request for request, _, _ in rows]], positions, int(counts[0] == 1)
        )
        indices = torch.from_numpy(places).to(module.device)
        places_in_request = torch.from_numpy(positions).to(module.device)
        plan = {PLAN_KEYWORD: cache.plan(packed)}
        requests = StateRows([request for request, _, _ in rows], starts.tolist(), counts.tolist())
        with contextlib.nullcontext() if states is None else states.step(requests):
            outputs = run_stage(module, stage, ids[indices], places_in_request, **plan).float()
        found |= dict(zip(places.tolist(), outputs, strict=True))
    if states is not None:
        states.running.clear()
    return torch.stack([found[place] for place in range(len(ids))])


def _alone(module: Any, stage: Stage, ids: torch.Tensor) -> torch.Tensor:
    return run_stage(module, stage, ids, torch.arange(len(ids), device=ids.device)).float()


def run_stage(
    module: Any, stage: Stage, ids: torch.Tensor, positions: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """Run tokens at positions [tokens]; returns [tokens, width of the stage's output].

    A later stage gets a made-up hidden state for each token id.
    """
    hidden = None
    if not stage.shard.is_first:
        config = module.config.get_text_config()
        places = torch.arange(int(config.hidden_size), device=ids.device, dtype=torch.float32)
        hidden = torch.sin((ids[:, None] + 1) * (places + 1) * 0.61803).to(module.dtype).unsqueeze(0) * 2**0.5
    output = stage.forward(
        module,
        hidden,
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        **arguments,
    )
    return output if output.dim() == 2 else output[0]
