"""Sampler: chooses the next tokens of a step from logits, all rows at once.

The order is vLLM's: log-probabilities come from the unmodified logits; then allowed tokens, bad words, logit
bias, minimum length, penalties, temperature, min-p, top-k, top-p, and the choice. Work that no row asks for
is not done. The arithmetic on rows is that of a :class:`.LogitsBackend`, chosen once.

With the vocabulary cut over tensor-parallel ranks, each rank looks at its own tokens, and only the best of
each are compared. Both argmax and the race (:mod:`engine.compute.torch_logits`) allow that. Top-k, top-p and
min-p look at whole rows, each of them at one rank.

On a GPU all of it is only launched: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.transfer import upload
from engine.compute.logits_backend import NEVER, LogitsBackend, SampleRow
from engine.compute.native_logits import NativeLogits
from engine.compute.reasoning_budget import forced_token
from engine.compute.token_rules import Columns, RuleTensors, TokenRules
from engine.compute.torch_logits import TorchLogits, is_race_right, most_likely, numbers
from engine.kernels.core import library
from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams
from parallel.rounds.arithmetic import even_sizes
from parallel.tensor_parallel import TensorRank


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens of one tensor-parallel rank.

    Its calls return the same on all ranks.
    """

    ranks: TensorRank
    vocab_size: int

    @property
    def first(self) -> int:
        return self.ranks.even(self.vocab_size)[0]

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather [rows, tokens of this rank] of all ranks into [rows, vocabulary]."""
        return self.ranks.all_gather_columns(logits, even_sizes(self.vocab_size, self.ranks.size))

    def best(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The best of all ranks' tokens [rows] by their scores [rows] float64.

        The lowest rank's token wins if scores are equal.
        """
        mine = torch.stack([scores, tokens.double()], dim=1)  # a double holds token ids exactly
        columns = self.ranks.all_gather_columns(mine, [2] * self.ranks.size).view(len(scores), -1, 2)
        winners = columns[:, :, 0].argmax(dim=1, keepdim=True)
        return columns[:, :, 1].gather(1, winners)[:, 0].long()


class Sampler:
    """Chooses tokens of one model on one device.

    Where the vocabulary is cut over ranks, every call is made on all of them with the same rows and their own
    columns, and returns the same on all.
    """

    def __init__(
        self, device: torch.device, vocabulary: VocabularyShard | None = None, *, row_by_row: bool = False
    ) -> None:
        """A sampler on a device; ``row_by_row``: see :class:`.TorchLogits`.

        ``vocabulary``: the tokens of this rank; None if it has all.
        """
        self._vocabulary = vocabulary
        self.backend = backend_on(device, row_by_row=row_by_row)

    def __repr__(self) -> str:
        return f"Sampler({self.backend!r}, {self._vocabulary})"

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Choose a token for each row of logits [rows, tokens of this rank].

        The logits are not changed.

        Returns:
            [rows] int64, on the device of the logits.
        """
        if self._vocabulary is None:
            return self._choose(self.shape(logits, rows), rows)
        return self._sample_shard(self._vocabulary, logits, rows)

    def _choose(self, shaped: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Tokens of shaped whole rows."""
        if all(row.params.greedy for row in rows):
            return most_likely(shaped)
        return self.backend.draw(shaped, rows)

    def _sample_shard(
        self, vocabulary: VocabularyShard, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> torch.Tensor:
        """Tokens of rows whose vocabulary is cut over ranks.

        Each token is found by one rank, or by comparing one number of each rank.
        """
        ranks, first = vocabulary.ranks, vocabulary.first
        shaped = self.shape(logits, rows, first)
        chosen = vocabulary.best(*self.backend.contestants(shaped, rows, first))
        cut = [i for i, row in enumerate(rows) if row.needs_whole_row]
        if cut:
            where = numbers(cut, logits.device)
            whole = vocabulary.whole(shaped.index_select(0, where))
            begin, end = ranks.even(len(cut))
            picked = self._choose(whole[begin:end], [rows[i] for i in cut[begin:end]])
            chosen.index_copy_(0, where, ranks.all_gather_rows(picked, even_sizes(len(cut), ranks.size)))
        return chosen

    def shape(self, logits: torch.Tensor, rows: Sequence[SampleRow], first: int = 0) -> torch.Tensor:
        """Logits after all that precedes temperature: a changed copy in float32, or the same.

        Column 0 is token ``first``; tokens outside these columns are left to the ranks that have them.
        """
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
        columns = Columns(first, logits.shape[1], logits.device)

        def rules(of: Sequence[int]) -> list[RuleTensors]:
            return [rows[i].rules.tensors(columns) for i in of]

        for i, each in zip(forbidding, rules(forbidding), strict=True):
            shaped[i].masked_fill_(each.forbidden, NEVER)
        if masked:
            self.backend.mask(shaped, masked, rows, first)
        if banned:
            ends = (rows[i].rules.ends_of_bad_words(rows[i].output_ids) for i in banned)
            shaped[_pairs(columns, banned, ends)] = NEVER
        if biased:
            made = rules(biased)
            where = _cells(biased, [each.biased for each in made])
            shaped[where] += torch.cat([each.biases for each in made])
        if too_short:
            shaped[_cells(too_short, [each.barred for each in rules(too_short)])] = NEVER
        if penalised:
            self.backend.penalise(shaped, penalised, rows, first)
        if forced:
            shaped[numbers(list(forced), logits.device)] = NEVER
            shaped[_pairs(columns, list(forced), ([token] for token in forced.values()))] = 0.0
        return shaped

    def logprob_table(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
        """See :meth:`.LogitsBackend.logprob_table`; logits [rows, tokens of this rank]."""
        whole = logits if self._vocabulary is None else self._vocabulary.whole(logits)
        return self.backend.logprob_table(whole, targets, num_top)

    def rehearse(self, logits: torch.Tensor) -> None:
        """Rehearse the sampling that takes most memory, on given logits.

        That is masks, penalties, top-p over the whole vocabulary, log-probabilities. Nothing of it is kept.
        """
        vocab_size = int(logits.shape[1]) if self._vocabulary is None else self._vocabulary.vocab_size
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
        self.logprob_table(logits, self.sample(logits, rows), 1)


def backend_on(device: torch.device, *, row_by_row: bool = False) -> LogitsBackend:
    """The native kernels on a CPU where they are loaded, else torch's operators.

    On a GPU a kernel of ours runs the races, if it is right.
    """
    kernels = library.loaded() if device.type == "cpu" else None
    if kernels is not None:
        return NativeLogits(kernels)
    return TorchLogits(row_by_row=row_by_row, by_kernel=device.type == "cuda" and is_race_right(device))


def _forced(rows: Sequence[SampleRow]) -> dict[int, int]:
    """Forced tokens by row, where a reasoning budget is used up.

    A grammar that does not let it come yet (in the middle of a character) is followed first.
    """
    tokens = {
        i: forced_token(row.output_ids, row.params.thinking)
        for i, row in enumerate(rows)
        if row.params.thinking is not None
    }
    return {i: token for i, token in tokens.items() if token is not None and _lets(rows[i].mask, token)}


def _lets(mask: npt.NDArray[np.uint8] | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


def _is_too_short(row: SampleRow) -> bool:
    """Whether a row without a mask is below its minimum length.

    Masks take care of the minimum length themselves, knowing what else could follow.
    """
    return row.num_output < row.rules.min_tokens and row.mask is None


def _pairs(
    columns: Columns, rows: Sequence[int], tokens: Iterable[Iterable[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column indices of the given tokens of each row."""
    found = [columns.of(each) for each in tokens]
    return _repeated(rows, found, columns.device), upload(np.concatenate(found), columns.device)


def _cells(rows: Sequence[int], found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column indices of the columns of each row."""
    return _repeated(rows, found, found[0].device), torch.cat(list(found))


def _repeated(rows: Sequence[int], found: Sequence[Sized], device: torch.device) -> torch.Tensor:
    """Each row's number as often as it has columns."""
    return upload(np.repeat(np.asarray(rows, dtype=np.int64), [len(each) for each in found]), device)


def read_logprobs(line: Sequence[float], num_top: int) -> TokenLogprobs:
    """Log-probabilities from one line of the table, with the ``num_top`` best."""
    made = (len(line) - 3) // 2
    wanted = min(num_top, made)
    return TokenLogprobs(
        token_id=int(line[0]),
        logprob=line[1],
        rank=int(line[2]),
        top_ids=[int(token) for token in line[3 : 3 + wanted]],
        top_logprobs=list(line[3 + made : 3 + made + wanted]),
    )
