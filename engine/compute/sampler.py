"""Chooses the next tokens of a step from the logits, all rows at once.

The order is vLLM's: log-probabilities come from the unmodified logits; then allowed tokens, bad words, logit
bias, minimum length, penalties, temperature, min-p, top-k, top-p, and the choice. Work that no row asks for
is not done.

Chance is a pure function of (seed, position, token): each token that may be chosen runs an exponential
race, its clock set by a hash of the three, at a speed of its probability, and the first one home is
chosen. The result is distributed as it should be, and when rounding shifts the probabilities by some
epsilon (another batch, another instance) the winner changes with a chance of that order only. Inverting
a cumulative sum with one number per row would be cheaper, but moves the border between any two tokens
by the errors of all tokens before them.

With the vocabulary cut over tensor-parallel ranks each looks at its own tokens, and only the best of each
are compared (:func:`sample_shard`): both argmax and the race allow that. Top-k, top-p and min-p look at whole
rows, each of them at one rank.

On a GPU all of it is only launched: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import Int64s
from engine.attention.transfer import upload
from engine.compute.reasoning_budget import forced_token
from engine.compute.token_rules import Columns, RuleTensors, TokenRules
from engine.kernels import library
from engine.kernels import logits as native
from engine.kernels.library import Library
from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams
from parallel.communicators.arithmetic import even_sizes
from parallel.tensor_parallel import TensorRank

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Rows are sampled and normalised in chunks of about this size: on CPU, what stays in the cache; on a GPU, of
which top-p takes some hundred megabytes."""
LARGEST = float(np.finfo(np.float32).max)
NUCLEUS_WIDTH = 1024
"""Top-p looks at this many of the most likely tokens before it sorts the whole vocabulary (CPU)."""
NEVER = float("-inf")
LEAST_TEMPERATURE = 1e-30
"""Below it is the same."""
BELOW_ONE = 1.0 - 2.0**-24
"""The largest such number of float32."""


@dataclass(frozen=True)
class SampleRow:
    """One token to choose."""

    params: SamplingParams
    seed: int
    position: int
    """Of the token to choose, in its request."""
    token_ids: Int64s
    """Prompt and output so far."""
    num_prompt: int
    rules: TokenRules
    mask: npt.NDArray[np.uint8] | None = None
    """Bits of the tokens that may be chosen, the lowest of a byte first; None: all may."""

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> Int64s:
        return self.token_ids[self.num_prompt :]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Choose a token for each row of logits [rows, vocabulary]; the logits are not changed.

    Returns:
        [rows] int64, on the device of the logits.
    """
    return _sample_shaped(shape_logits(logits, rows), rows)


def _sample_shaped(shaped: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """:func:`sample` behind :func:`shape_logits`."""
    if all(row.params.greedy for row in rows):
        return _greedy(shaped, rows)
    kernels = _kernels(shaped)
    if kernels is not None:
        how = native.draws([native.draw_of(row.params, row.seed) for row in rows])
        return torch.from_numpy(native.draw(kernels, shaped.float().contiguous(), how, _positions(rows)))
    chosen = torch.empty(len(rows), dtype=torch.int64, device=shaped.device)
    kinds: tuple[tuple[Callable[[torch.Tensor, Sequence[SampleRow]], torch.Tensor], list[int]], ...] = (
        (_greedy, [i for i, row in enumerate(rows) if row.params.greedy]),
        (_draw, [i for i, row in enumerate(rows) if not row.params.greedy and not _truncates(row.params)]),
        (
            _draw_truncated,
            [i for i, row in enumerate(rows) if not row.params.greedy and _truncates(row.params)],
        ),
    )
    step = _rows_per_chunk(shaped)
    for choose, indices in kinds:
        for begin in range(0, len(indices), step):
            part = indices[begin : begin + step]
            places = _numbers(part, shaped.device)
            picked = choose(shaped.index_select(0, places).float(), [rows[i] for i in part])
            chosen.index_copy_(0, places, picked)
    return chosen


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens of one tensor-parallel rank.

    What its calls return is the same on all ranks.
    """

    ranks: TensorRank
    vocab_size: int

    @property
    def first(self) -> int:
        return self.ranks.even(self.vocab_size)[0]

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, tokens of this rank] of all ranks: [rows, vocabulary]."""
        return self.ranks.all_gather_columns(logits, even_sizes(self.vocab_size, self.ranks.size))

    def best(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Of each rank's tokens [rows] those with the greatest scores [rows] float64, the lowest rank's if
        equal."""
        mine = torch.stack([scores, tokens.double()], dim=1)  # a double holds token ids exactly
        columns = self.ranks.all_gather_columns(mine, [2] * self.ranks.size).view(len(scores), -1, 2)
        winners = columns[:, :, 0].argmax(dim=1, keepdim=True)
        return columns[:, :, 1].gather(1, winners)[:, 0].long()


def sample_shard(
    logits: torch.Tensor, rows: Sequence[SampleRow], vocabulary: VocabularyShard
) -> torch.Tensor:
    """:func:`sample` with logits [rows, tokens of this rank], called on all ranks: the same tokens on all.
    Each is found by one rank, or compared by one number of each."""
    ranks, first = vocabulary.ranks, vocabulary.first
    shaped = shape_logits(logits, rows, first)
    chosen = vocabulary.best(*_contestants(shaped, rows, first))
    cut = [i for i, row in enumerate(rows) if _looks_at_all(row.params)]
    if cut:
        places = _numbers(cut, logits.device)
        whole = vocabulary.whole(shaped.index_select(0, places))
        begin, end = ranks.even(len(cut))
        picked = _sample_shaped(whole[begin:end], [rows[i] for i in cut[begin:end]])
        chosen.index_copy_(0, places, ranks.all_gather_rows(picked, even_sizes(len(cut), ranks.size)))
    return chosen


def _contestants(
    shaped: torch.Tensor, rows: Sequence[SampleRow], first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row a score [rows] float64 and the best token of this rank.

    Scores can be compared with other ranks': logits, or logs of speeds in a race. Rows that have to be looked
    at whole are greedy here.
    """
    racing = [i for i, row in enumerate(rows) if not (row.params.greedy or _looks_at_all(row.params))]
    kernels = _kernels(shaped)
    if kernels is not None:
        how = [native.GREEDY] * len(rows)
        for i in racing:
            how[i] = native.draw_of(rows[i].params, rows[i].seed)
        lines = shaped.float().contiguous()
        scores, tokens = native.contestants(kernels, lines, native.draws(how), _positions(rows), first)
        return torch.from_numpy(scores), torch.from_numpy(tokens)
    values, columns = shaped.max(dim=-1)
    values, tokens = values.double(), columns + first
    if racing:
        places, entrants = _numbers(racing, shaped.device), [rows[i] for i in racing]
        entered = shaped.index_select(0, places).float()
        numbers = torch.arange(first, first + entered.shape[1], dtype=torch.int32, device=shaped.device)[None]
        speeds, winners = _speeds(_scale(entered, entrants), numbers, entrants).max(dim=-1)
        colder = 1.0 / _temperatures(shaped.device, entrants)[:, 0].double()
        best = values.index_select(0, places)
        raced = best.isfinite()  # where no token of this rank may come, nor win, there is no race either
        scores = torch.where(raced, best * colder + speeds.double().log(), best)
        winners = torch.where(raced, winners + first, tokens.index_select(0, places))
        values.index_copy_(0, places, scores)
        tokens.index_copy_(0, places, winners)
    return values, tokens


def _kernels(logits: torch.Tensor) -> Library | None:
    """Those for rows of logits, where they are loaded: what comes of them is what is computed here, but for
    rounding, in a small part of the time."""
    return library.loaded() if logits.device.type == "cpu" else None


def _positions(rows: Sequence[SampleRow]) -> Int64s:
    return np.array([row.position for row in rows], dtype=np.int64)


def _rows_per_chunk(logits: torch.Tensor) -> int:
    return max(CHUNK_ELEMENTS[logits.device.type] // int(logits.shape[1]), 1)


def shape_logits(logits: torch.Tensor, rows: Sequence[SampleRow], first: int = 0) -> torch.Tensor:
    """Logits after all that precedes temperature: a changed copy in float32, or the same if none asks.
    Column 0 is token ``first``; what concerns tokens outside is left to whoever has them."""
    forbidding = [i for i, row in enumerate(rows) if row.rules.forbids]
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    banned = [i for i, row in enumerate(rows) if row.rules.has_bad_words]
    biased = [i for i, row in enumerate(rows) if row.rules.biases]
    too_short = [i for i, row in enumerate(rows) if _is_too_short(row)]
    penalised = [i for i, row in enumerate(rows) if row.params.shapes_logits_by_history]
    forced = _forced(rows)
    if not (forbidding or masked or banned or biased or too_short or penalised or forced):
        return logits
    shaped = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    kernels = _kernels(logits)
    device = logits.device
    columns = Columns(first, logits.shape[1], device)

    def rules(of: Sequence[int]) -> list[RuleTensors]:
        return [rows[i].rules.tensors(columns) for i in of]

    for i, each in zip(forbidding, rules(forbidding), strict=True):
        shaped[i].masked_fill_(each.forbidden, NEVER)
    if masked and kernels is not None:
        masks = [row.mask for row in rows if row.mask is not None]
        native.leave_out(kernels, shaped, masked, masks, first)
    elif masked:
        places = _numbers(masked, device)
        forbidden = _forbidden([rows[i] for i in masked], first, logits.shape[1], device)
        shaped[places] = shaped[places].masked_fill_(forbidden, NEVER)
    if banned:
        ends = (rows[i].rules.ends_of_bad_words(rows[i].output_ids) for i in banned)
        shaped[_pairs(columns, banned, ends)] = NEVER
    if biased:
        made = rules(biased)
        where = _places(biased, [each.biased for each in made])
        shaped[where] += torch.cat([each.biases for each in made])
    if too_short:
        shaped[_places(too_short, [each.barred for each in rules(too_short)])] = NEVER
    if penalised and kernels is not None:
        histories = [
            native.History(i, rows[i].token_ids, rows[i].num_prompt, rows[i].params) for i in penalised
        ]
        native.penalise(kernels, shaped, histories, first)
    elif penalised:
        places = _numbers(penalised, device)
        shaped[places] = _penalise(shaped[places], [rows[i] for i in penalised], first)
    if forced:
        shaped[_numbers(list(forced), device)] = NEVER
        shaped[_pairs(columns, list(forced), ([token] for token in forced.values()))] = 0.0
    return shaped


def _forced(rows: Sequence[SampleRow]) -> dict[int, int]:
    """By row: the only token that may come, where a budget of reasoning is used up. A grammar that does not
    let it come yet (in the middle of a character) is followed first."""
    tokens = {
        i: forced_token(row.output_ids, row.params.thinking)
        for i, row in enumerate(rows)
        if row.params.thinking is not None
    }
    return {i: token for i, token in tokens.items() if token is not None and _lets(rows[i].mask, token)}


def _lets(mask: npt.NDArray[np.uint8] | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


def _is_too_short(row: SampleRow) -> bool:
    """With a mask that is seen to there, where it is known what else could follow."""
    return row.num_output < row.rules.min_tokens and row.mask is None


def _forbidden(rows: Sequence[SampleRow], first: int, width: int, device: torch.device) -> torch.Tensor:
    """[rows, width] of the tokens from ``first`` on: whether a row's mask leaves them out."""
    begin, end = first // 8, -(-(first + width) // 8)
    packed = np.stack([row.mask[begin:end] for row in rows if row.mask is not None])
    offset = first - begin * 8
    if device.type == "cpu":
        flags = np.unpackbits(packed, axis=1, bitorder="little")[:, offset : offset + width]
        return torch.from_numpy(flags).logical_not()
    bits = upload(packed, device)[:, :, None] >> torch.arange(8, device=device)
    return (bits & 1).flatten(1)[:, offset : offset + width] == 0


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _looks_at_all(params: SamplingParams) -> bool:
    """Whether a token's chance depends on more than its own logit and the best one of a part of the row."""
    return not params.greedy and (_truncates(params) or params.min_p > 0.0)


def _pairs(
    columns: Columns, rows: Sequence[int], tokens: Iterable[Iterable[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column indices of the given tokens of each row."""
    found = [columns.of(each) for each in tokens]
    return _repeated(rows, found, columns.device), upload(np.concatenate(found), columns.device)


def _places(rows: Sequence[int], found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column indices of the columns of each row."""
    return _repeated(rows, found, found[0].device), torch.cat(list(found))


def _repeated(rows: Sequence[int], found: Sequence[Sized], device: torch.device) -> torch.Tensor:
    """Each row's number as often as something is found there."""
    return upload(np.repeat(np.asarray(rows, dtype=np.int64), [len(each) for each in found]), device)


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
    """Rows and columns of the tokens of each row, as far as they are among these columns."""
    rows = np.repeat(np.arange(len(histories)), [len(tokens) for tokens in histories])
    columns = np.concatenate(histories) - first
    here = (columns >= 0) & (columns < width)
    if not here.all():
        rows, columns = rows[here], columns[here]
    return upload(rows, device), upload(columns, device)


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return upload(np.array(values, dtype=np.int64), device)


def _column(device: torch.device, values: Sequence[float]) -> torch.Tensor:
    within = np.clip(np.array(values), -LARGEST, LARGEST)  # of a client who writes 1e300 for "very"
    return upload(within.astype(np.float32), device)[:, None]


def _greedy(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    if logits.device.type == "cpu":  # numpy searches in vectors: 12 times as fast, from bfloat16 three times
        return torch.from_numpy(logits.float().numpy().argmax(axis=1))
    best: torch.Tensor = logits.max(dim=-1).indices
    return best


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """From the whole vocabulary."""
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    return _race(_scale(logits, rows), vocabulary, rows)


def _draw_truncated(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """From the most likely tokens: top-k, then top-p of what is left."""
    scaled = _scale(logits, rows)
    vocab_size = scaled.shape[1]
    top_k = [row.params.top_k if row.params.top_k > 0 else vocab_size for row in rows]
    limits = _numbers(top_k, logits.device)[:, None]
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
    places = torch.arange(width, device=scaled.device)
    values = values.masked_fill(places >= limits, NEVER)
    total = torch.where(
        limits < scaled.shape[1],
        torch.logsumexp(values, dim=-1, keepdim=True),
        torch.logsumexp(scaled, dim=-1, keepdim=True),
    )
    probabilities = (values - total).double().exp()
    covered = probabilities.cumsum(dim=-1)
    before = covered - probabilities
    values = values.masked_fill((before >= top_p) & (places > 0), NEVER)
    short = (limits[:, 0] > width) & (covered[:, -1] < top_p[:, 0])
    return values, tokens, short


def _scale(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Temperature and min-p. The best token gets 0, so that no temperature overflows."""
    best = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - best) / _temperatures(logits.device, rows)
    if any(row.params.min_p > 0.0 for row in rows):
        shares = [row.params.min_p for row in rows]
        lowest = _column(logits.device, shares).log()
        scaled = scaled.masked_fill(scaled < lowest, NEVER)
    return scaled


def _temperatures(device: torch.device, rows: Sequence[SampleRow]) -> torch.Tensor:
    """[rows, 1], none of them 0 in float32."""
    return _column(device, [max(row.params.temperature, LEAST_TEMPERATURE) for row in rows])


def _race(scaled: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The column of the winner of each row: scaled logits [rows, n], token ids [rows or 1, n] int32."""
    return _speeds(scaled, tokens, rows).argmax(dim=-1)


def _speeds(scaled: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """How fast each is in the race, as [rows, n]."""
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
    """[rows, 2] 32-bit keys of (seed, position), by two rounds of SplitMix64 (Steele, Lea, Flood 2014)."""
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


def logprob_table(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
    """Log-probabilities of logits [rows, vocabulary] as they are; targets [rows] stand there.

    Returns:
        [rows, 3 + 2 * num_top] float64 (which holds token ids exactly): target, its log-probability, its
        rank, then the ``num_top`` best ids and their log-probabilities.
    """
    kernels = _kernels(logits)
    if kernels is not None:
        lines = logits.float().contiguous()
        return torch.from_numpy(
            native.logprobs(kernels, lines, targets.numpy(), min(num_top, logits.shape[1]))
        )
    step = _rows_per_chunk(logits)
    parts = []
    for begin in range(0, logits.shape[0], step):
        target = targets[begin : begin + step, None]
        logprobs = torch.log_softmax(logits[begin : begin + step].float(), dim=-1)
        own = logprobs.gather(1, target)
        rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
        best, best_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
        columns = (target, own, rank, best_ids, best)
        parts.append(torch.cat([column.double() for column in columns], dim=-1))
    return torch.cat(parts)


def rehearse(logits: torch.Tensor, vocabulary: VocabularyShard | None = None) -> None:
    """Do with all rows of logits [rows, vocabulary], or tokens of this rank, what takes the most memory:
    masks, penalties, top-p over the whole vocabulary, log-probabilities. What comes of it means nothing."""
    vocab_size = int(logits.shape[1]) if vocabulary is None else vocabulary.vocab_size
    params = SamplingParams(
        temperature=0.9,
        top_p=0.9,
        min_p=0.001,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
    )
    history = np.zeros(1, dtype=np.int64)
    mask = np.full(-(-vocab_size // 8), 255, dtype=np.uint8)
    rows = [SampleRow(params, 0, 1, history, 0, TokenRules(params), mask)] * len(logits)
    if vocabulary is None:
        logprob_table(logits, sample(logits, rows), 1)
    else:
        logprob_table(vocabulary.whole(logits), sample_shard(logits, rows, vocabulary), 1)


def read_logprobs(line: npt.NDArray[np.float64], num_top: int) -> TokenLogprobs:
    """One line of :func:`logprob_table`, of which the ``num_top`` best are wanted."""
    made = (len(line) - 3) // 2
    wanted = min(num_top, made)
    return TokenLogprobs(
        token_id=int(line[0]),
        logprob=float(line[1]),
        rank=int(line[2]),
        top_ids=[int(token) for token in line[3 : 3 + wanted]],
        top_logprobs=line[3 + made : 3 + made + wanted].tolist(),
    )
