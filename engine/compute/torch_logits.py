"""Torch implementation of :class:`.LogitsBackend`, for any device.

Chance is a pure function of (seed, position, token): each token that may be chosen runs an exponential
race, its clock set by a hash of the three, at a speed of its probability, and the first one home is
chosen. The result is distributed as it should be, and when rounding shifts the probabilities by some
epsilon (another batch, another instance) the winner changes with a chance of that order only. Inverting
a cumulative sum with one number per row would be cheaper, but moves the border between any two tokens
by the errors of all tokens before them.

On a GPU all of it is only launched: nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import Int64s
from engine.attention.transfer import upload
from engine.compute.logits_backend import NEVER, SampleRow
from engine.compute.token_rules import TokenRules
from engine.gpu.product_choice import has_triton
from engine.sampling import SamplingParams

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements of a chunk of rows that are sampled or normalised together.

On CPU, as many as stay in the cache; on a GPU, top-p takes some hundred megabytes of them.
"""
LARGEST = float(np.finfo(np.float32).max)
NUCLEUS_WIDTH = 1024
"""Most likely tokens that top-p looks at before it sorts the whole vocabulary.

On the CPU only.
"""
LEAST_TEMPERATURE = 1e-30
"""Temperature that stands for all lower ones."""
BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 number below 1."""
CHECKED_RACES = 16
"""Rows whose winners a kernel must find before it is used."""
CHECKED_TOKENS = 2500
"""Tokens of the rows with top-k or top-p among them."""

Choose = Callable[[torch.Tensor, Sequence[SampleRow]], torch.Tensor]
"""Chooses a token [rows] for logits [rows, vocabulary]."""


class TorchLogits:
    """A :class:`.LogitsBackend` of torch's operators."""

    def __init__(self, *, row_by_row: bool = False, by_kernel: bool = False) -> None:
        """``row_by_row``: compute each row by itself, so that no other one decides its bits.

        ``by_kernel``: races are kernels of ours (:func:`is_race_right`).
        """
        self._row_by_row = row_by_row
        self._by_kernel = by_kernel

    def __repr__(self) -> str:
        return "TorchLogits()"

    def mask(
        self, shaped: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow], first: int
    ) -> None:
        """See :class:`.LogitsBackend`."""
        where = numbers(indices, shaped.device)
        forbidden = _forbidden([rows[i] for i in indices], first, shaped.shape[1], shaped.device)
        shaped[where] = shaped[where].masked_fill_(forbidden, NEVER)

    def penalise(
        self, shaped: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow], first: int
    ) -> None:
        """See :class:`.LogitsBackend`."""
        where = numbers(indices, shaped.device)
        shaped[where] = _penalise(shaped[where], [rows[i] for i in indices], first)

    def draw(self, shaped: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """See :class:`.LogitsBackend`."""
        chosen = torch.empty(len(rows), dtype=torch.int64, device=shaped.device)
        step = self._rows_per_chunk(shaped)
        for choose, indices in _ways(rows, shaped.device, self._by_kernel):
            for begin in range(0, len(indices), step):
                part = indices[begin : begin + step]
                where = numbers(part, shaped.device)
                picked = choose(shaped.index_select(0, where).float(), [rows[i] for i in part])
                chosen.index_copy_(0, where, picked)
        return chosen

    def contestants(
        self, shaped: torch.Tensor, rows: Sequence[SampleRow], first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`.LogitsBackend`."""
        device = shaped.device
        racing = [i for i, row in enumerate(rows) if row.races]
        values, columns = shaped.max(dim=-1)
        values, tokens = values.double(), columns + first
        if racing:
            where, entrants = numbers(racing, device), [rows[i] for i in racing]
            entered = shaped.index_select(0, where).float()
            entered_ids = torch.arange(first, first + entered.shape[1], dtype=torch.int32, device=device)
            speeds, winners = _speeds(_scale(entered, entrants), entered_ids[None], entrants).max(dim=-1)
            colder = 1.0 / _temperatures(device, entrants)[:, 0].double()
            best = values.index_select(0, where)
            raced = best.isfinite()  # without a token of this rank that may come there is no race
            scores = torch.where(raced, best * colder + speeds.double().log(), best)
            winners = torch.where(raced, winners + first, tokens.index_select(0, where))
            values.index_copy_(0, where, scores)
            tokens.index_copy_(0, where, winners)
        return values, tokens

    def logprob_table(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
        """See :class:`.LogitsBackend`."""
        step = self._rows_per_chunk(logits)
        return torch.cat(
            [
                _logprob_lines(logits[begin : begin + step], targets[begin : begin + step], num_top)
                for begin in range(0, logits.shape[0], step)
            ]
        )

    def _rows_per_chunk(self, logits: torch.Tensor) -> int:
        if self._row_by_row:
            return 1
        return max(CHUNK_ELEMENTS[logits.device.type] // int(logits.shape[1]), 1)


def _ways(rows: Sequence[SampleRow], device: torch.device, by_kernel: bool) -> list[tuple[Choose, list[int]]]:
    """Group rows by the way in which their token is chosen.

    On a GPU without our kernels rows with top-k do not share the full sort of those without: the former look
    at few tokens.
    """
    truncated = [i for i, row in enumerate(rows) if row.truncates]
    whole = [i for i, row in enumerate(rows) if not (row.params.greedy or row.truncates)]
    apart = [i for i in truncated if device.type == "cuda" and rows[i].params.top_k <= 0]
    greedy = [i for i, row in enumerate(rows) if row.params.greedy]
    if by_kernel:
        return [(most_likely, greedy), (race_by_kernel, whole), (race_of_nucleus, truncated)]
    return [
        (most_likely, greedy),
        (_draw, whole),
        (_draw_truncated, sorted({*truncated} - {*apart})),
        (_draw_truncated, apart),
    ]


def most_likely(logits: torch.Tensor, _rows: Sequence[SampleRow] = ()) -> torch.Tensor:
    """The best token [rows] int64 of each row, the first if several are equal."""
    if logits.device.type == "cpu":  # numpy searches in vectors: 12 times as fast, from bfloat16 three times
        return torch.from_numpy(logits.float().numpy().argmax(axis=1))
    best: torch.Tensor = logits.max(dim=-1).indices
    return best


def numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor [values] int64 of them on the device."""
    return upload(np.array(values, dtype=np.int64), device)


def _logprob_lines(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
    """Lines of a log-probability table for a chunk of rows."""
    target = targets[:, None]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, target)
    rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    best, best_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    columns = (target, own, rank, best_ids, best)
    return torch.cat([column.double() for column in columns], dim=-1)


def _forbidden(rows: Sequence[SampleRow], first: int, width: int, device: torch.device) -> torch.Tensor:
    """[rows, width], whether a row's mask forbids a token, from ``first`` on."""
    begin, end = first // 8, -(-(first + width) // 8)
    packed = np.stack([row.mask[begin:end] for row in rows if row.mask is not None])
    offset = first - begin * 8
    if device.type == "cpu":
        flags = np.unpackbits(packed, axis=1, bitorder="little")[:, offset : offset + width]
        return torch.from_numpy(flags).logical_not()
    bits = upload(packed, device)[:, :, None] >> torch.arange(8, device=device)
    return (bits & 1).flatten(1)[:, offset : offset + width] == 0


def _penalise(logits: torch.Tensor, rows: Sequence[SampleRow], first: int) -> torch.Tensor:
    """Repetition over prompt and output (multiplies), presence and frequency over output (subtract)."""
    device = logits.device
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
    width = logits.shape[1]
    seen[_history(device, [row.token_ids for row in rows], first, width)] = True
    counts = torch.zeros_like(logits)
    outputs = _history(device, [row.output_ids for row in rows], first, width)
    counts.index_put_(outputs, torch.ones((), device=device), accumulate=True)
    repetition = _column(device, [row.params.repetition_penalty for row in rows])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    logits -= _column(device, [row.params.frequency_penalty for row in rows]) * counts
    logits -= _column(device, [row.params.presence_penalty for row in rows]) * (counts > 0)
    return logits


def _history(
    device: torch.device, histories: Sequence[Int64s], first: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each token of the rows' histories that is here."""
    rows = np.repeat(np.arange(len(histories)), [len(tokens) for tokens in histories])
    columns = np.concatenate(histories) - first
    here = (columns >= 0) & (columns < width)
    if not here.all():
        rows, columns = rows[here], columns[here]
    return upload(rows, device), upload(columns, device)


def _column(device: torch.device, values: Sequence[float]) -> torch.Tensor:
    within = np.clip(np.array(values), -LARGEST, LARGEST)  # a client may write 1e300 for "very"
    return upload(within.astype(np.float32), device)[:, None]


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Draw from the whole vocabulary: forty operators that go over all of it."""
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    return _race(_scale(logits, rows), vocabulary, rows)


def race_by_kernel(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Draw from the whole vocabulary by one Triton kernel."""
    return _race_by_kernels(logits, rows, None)


def race_of_nucleus(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Draw as :func:`_draw_truncated` does, by two Triton kernels without sorting."""
    width = logits.shape[1]
    top_k = [min(row.params.top_k, width) if row.params.top_k > 0 else width for row in rows]
    # Nothing is cut by a top-p of 1, which all tokens together reach: but not by sums in float32.
    top_p = [row.params.top_p if row.params.top_p < 1.0 else 2.0 for row in rows]
    limits = upload(np.array(top_k, dtype=np.int32), logits.device), _column(logits.device, top_p)
    return _race_by_kernels(logits, rows, limits)


def _race_by_kernels(
    logits: torch.Tensor, rows: Sequence[SampleRow], limits: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    from engine.gpu import fused_launches

    device = logits.device
    return fused_launches.race(
        logits,
        logits.amax(dim=-1),
        _temperatures(device, rows),
        _column(device, [row.params.min_p for row in rows]).log(),
        upload(_row_keys([row.seed for row in rows], [row.position for row in rows]), device),
        limits,
    )


@cache
def is_race_right(device: torch.device) -> bool:
    """Whether the kernels choose as torch's operators do, but for near ties.

    The first call of a process compares them, and waits for the device.
    """
    if not has_triton():
        return False
    params = [SamplingParams(temperature=0.5 + 0.1 * i, min_p=0.01 * (i % 3)) for i in range(CHECKED_RACES)]
    limits = ((0, 0.5), (0, 0.95), (9, 1.0), (90, 0.8))
    limited = [SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p) for top_k, top_p in limits]
    nothing = np.zeros(0, dtype=np.int64)
    rows, limited_rows = (
        [SampleRow(each, i, 7 * i, nothing, 0, TokenRules(each)) for i, each in enumerate(kind)]
        for kind in (params, limited)
    )
    logits = torch.randn(CHECKED_RACES, 9000, generator=torch.Generator().manual_seed(6))
    try:
        logits = logits.to(device)
        same = int((race_by_kernel(logits, rows) == _draw(logits, rows)).sum())
        some = logits[: len(limited), :CHECKED_TOKENS]
        is_cut = torch.equal(race_of_nucleus(some, limited_rows), _draw_truncated(some, limited_rows))
    except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
        logger.debug("races by torch: %s: %s", type(error).__name__, error)
        return False
    return is_cut and same >= CHECKED_RACES - 1


def _draw_truncated(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Draw from the most likely tokens: top-k, then top-p of what is left."""
    scaled = _scale(logits, rows)
    vocab_size = scaled.shape[1]
    top_k = [row.params.top_k if row.params.top_k > 0 else vocab_size for row in rows]
    limits = numbers(top_k, logits.device)[:, None]
    top_p = upload(np.array([row.params.top_p for row in rows]), logits.device)[:, None]
    width, largest = vocab_size, max(row.params.top_k for row in rows)
    if all(row.params.top_k > 0 for row in rows):
        width = min(largest, vocab_size)
    elif logits.device.type == "cpu":
        width = min(max(NUCLEUS_WIDTH, largest), vocab_size)  # so that each top-k is looked at whole
    values, tokens, short = _truncate(scaled, limits, top_p, width)
    # Whether the tokens looked at hold enough: asked on CPU only, elsewhere the answer would have to be
    # waited for, and there the width is that of the vocabulary.
    if width < vocab_size and logits.device.type == "cpu" and bool(short.any()):
        values, tokens, _ = _truncate(scaled, limits, top_p, vocab_size)
    winner = _race(values, tokens.int(), rows)
    return tokens.gather(1, winner[:, None])[:, 0]


def _truncate(
    scaled: torch.Tensor, limits: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``width`` most likely tokens, those beyond top-k or top-p made impossible.

    Returns:
        Logits and token ids [rows, width], most likely first; [rows], whether more tokens would be needed.
    """
    if width == scaled.shape[1]:
        values, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    else:
        values, tokens = scaled.topk(width, dim=-1)
    ranks = torch.arange(width, device=scaled.device)
    values = values.masked_fill(ranks >= limits, NEVER)
    total = torch.where(
        limits < scaled.shape[1],
        torch.logsumexp(values, dim=-1, keepdim=True),
        torch.logsumexp(scaled, dim=-1, keepdim=True),
    )
    probabilities = (values - total).double().exp()
    covered = probabilities.cumsum(dim=-1)
    before = covered - probabilities
    values = values.masked_fill((before >= top_p) & (ranks > 0), NEVER)
    short = (limits[:, 0] > width) & (covered[:, -1] < top_p[:, 0])
    return values, tokens, short


def _scale(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Logits scaled by temperature, with min-p applied.

    The best token gets 0, so that no temperature overflows.
    """
    best = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - best) / _temperatures(logits.device, rows)
    if any(row.params.min_p > 0.0 for row in rows):
        shares = [row.params.min_p for row in rows]
        lowest = _column(logits.device, shares).log()
        scaled = scaled.masked_fill(scaled < lowest, NEVER)
    return scaled


def _temperatures(device: torch.device, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Temperatures [rows, 1], none of them 0 in float32."""
    return _column(device, [max(row.params.temperature, LEAST_TEMPERATURE) for row in rows])


def _race(scaled: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Sampled column [rows]: the winner of each row's exponential race.

    The scaled logits are [rows, n], the token ids [rows or 1, n] int32.
    """
    return _speeds(scaled, tokens, rows).argmax(dim=-1)


def _speeds(scaled: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Race speeds [rows, n]: probabilities over exponential random numbers; the greatest wins."""
    clocks = _exponentials(tokens, [row.seed for row in rows], [row.position for row in rows])
    return scaled.exp().div_(clocks)


def _exponentials(tokens: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Exponentially distributed numbers > 0, a function of (seed, position, token)."""
    keys = upload(_row_keys(seeds, positions), tokens.device)
    hashed = _mix(_mix(tokens * _GOLDEN_32 + keys[:, :1]) + keys[:, 1:])
    # 31 bits as a number in (0, 1), precise near 0: the first home is decided by the smallest ones.
    # The largest round up to 1, which would be a clock that never comes home.
    uniform = (hashed & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def _row_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """Two 32-bit keys [rows, 2] of (seed, position).

    They come from two rounds of SplitMix64 (Steele, Lea, Flood 2014).
    """
    key = _split_mix(np.array([seed % (1 << 64) for seed in seeds], dtype=np.uint64))
    key = _split_mix(key ^ np.array(positions, dtype=np.uint64))
    return key.view(np.int32).reshape(-1, 2)


def _split_mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


_GOLDEN_32 = 0x9E3779B9 - (1 << 32)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby 2011), in wrapping int32; changes ``bits`` in place."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x85EBCA6B - (1 << 32)
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= 0xC2B2AE35 - (1 << 32)
    bits ^= (bits >> 16) & 0xFFFF
    return bits
