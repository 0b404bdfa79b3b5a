"""Results of a step, from the tokens and log-probabilities that were fetched from its device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine.compute.request_slots import RequestSlot, WantedLogits
from engine.compute.sampler import read_logprobs
from engine.kernels.experts.kept_choices import KeptChoices
from engine.messages import RoutedExperts, TokenLogprobs
from engine.step import ExtraTokens, Step, StepResult


def result_with_logprobs(
    step: Step,
    held: Sequence[RequestSlot],
    wanted: WantedLogits,
    fetched: npt.NDArray[np.float64],
    shape: tuple[int, ...],
    with_logprobs: list[int],
) -> StepResult:
    """Result from tokens and, behind them, a table of that ``shape``.

    Its lines are of the sampled tokens ``with_logprobs``, then of prompt tokens.
    """
    num_sampled = len(wanted.sampled)
    tokens = [int(token) for token in fetched[:num_sampled]]
    lines = fetched[num_sampled:].reshape(shape).tolist()
    logprobs = {}
    for line, index in zip(lines, with_logprobs, strict=False):
        logprobs[index] = read_logprobs(line, held[wanted.sampled[index]].admit.params.logprobs or 0)
    prompt_logprobs, begin = {}, len(with_logprobs)
    for index, _, count in wanted.prompt_rows:
        num_top = held[index].admit.params.prompt_logprobs or 0
        prompt_logprobs[index] = [read_logprobs(line, num_top) for line in lines[begin : begin + count]]
        begin += count
    return result_of(step, held, wanted, tokens, logprobs, prompt_logprobs)


def with_experts(
    result: StepResult, step: Step, held: Sequence[RequestSlot], kept: KeptChoices
) -> StepResult:
    """The same result with the experts of those rows that keep them."""
    by_token = kept.by_token
    _, num_layers, top_k = by_token.shape
    ends = np.cumsum(step.counts)
    found = {
        index: RoutedExperts(start, num_layers, top_k, by_token[end - count : end].tobytes())
        for index, (each, start, count, end) in enumerate(
            zip(held, step.starts, step.counts, ends, strict=True)
        )
        if each.admit.keeps_experts
    }
    return msgspec.structs.replace(result, routed_experts=found)


def result_of(
    step: Step,
    held: Sequence[RequestSlot],
    wanted: WantedLogits,
    tokens: list[int],
    logprobs: dict[int, TokenLogprobs],
    prompt_logprobs: dict[int, list[TokenLogprobs]],
) -> StepResult:
    """The result of a step, whose tokens go to their slots.

    ``held``: the slots of its rows. ``logprobs`` are by index into ``tokens``, which are those that were
    sampled.
    """
    by_row: list[int | None] = [None] * len(step.slots)
    if step.drafts:
        row_logprobs, further = _take_drafts(step, held, wanted, tokens, logprobs, by_row)
        return StepResult(by_row, row_logprobs, prompt_logprobs, further)
    for index, end, token in zip(wanted.sampled, wanted.ends, tokens, strict=True):
        by_row[index] = token
        held[index].put_one(end, token)
    row_logprobs = {wanted.sampled[index]: each for index, each in logprobs.items()}
    return StepResult(by_row, row_logprobs, prompt_logprobs)


def _take_drafts(
    step: Step,
    held: Sequence[RequestSlot],
    wanted: WantedLogits,
    tokens: list[int],
    logprobs: dict[int, TokenLogprobs],
    by_row: list[int | None],
) -> tuple[dict[int, TokenLogprobs], dict[int, ExtraTokens]]:
    """Put each row's first token into ``by_row``, and the accepted ones into its slot.

    Returned are log-probabilities of the first tokens by row, and the tokens behind them.
    """
    row_logprobs: dict[int, TokenLogprobs] = {}
    further: dict[int, ExtraTokens] = {}
    begin = 0
    while begin < len(tokens):
        index = wanted.sampled[begin]
        draft = step.drafts.get(index, [])
        end = begin + 1 + num_taken(draft, tokens[begin : begin + 1 + len(draft)])
        by_row[index] = tokens[begin]
        held[index].put(wanted.ends[begin], *tokens[begin:end])
        if begin in logprobs:
            row_logprobs[index] = logprobs[begin]
        if end > begin + 1:
            behind = range(begin + 1, end)
            further[index] = ExtraTokens(
                tokens[begin + 1 : end], [logprobs[each] for each in behind if each in logprobs]
            )
        begin += len(draft) + 1
    return row_logprobs, further


def num_taken(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Leading tokens of a draft that equal those sampled at the same positions.

    ``sampled`` has one more.
    """
    for count, (drafted, token) in enumerate(zip(draft, sampled, strict=False)):
        if drafted != token:
            return count
    return len(draft)
