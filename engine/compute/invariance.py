"""Trial of a loaded model: whether a row's bits depend on the rows beside it.

A request is computed alone and at once, then in pieces beside another one and by another number of threads.
It runs on the model itself, for a library chooses how it sums by the shapes of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, PackedRows, PagedAttention
from engine.compute.fixed_blocks import FixedBlocks, UnknownOperator
from engine.model.checkpoint import CheckpointError
from engine.model.probe import run_stage
from engine.model.weights import LoadedModel
from engine.states.held import StateRows

COUNT = 40
"""Length of the test request in tokens: two and a part blocks of rows."""
START = 490
"""Position of its first token: its context passes the end of a tile of keys.

What stands before is an empty cache, alike in both runs.
"""
OTHER_COUNT = 26
"""Tokens of the request beside it."""


def check(
    model: LoadedModel, blocks: FixedBlocks, make_cache: Callable[[int], PagedAttention], block_size: int
) -> None:
    """Check that a row's bits in this model do not depend on other rows.

    ``make_cache`` makes a cache of so many blocks. All workers of a model run this together.

    Raises:
        CheckpointError: its bits depend on what is computed beside, or may do so.
    """
    name, threads = type(model.module).__name__, torch.get_num_threads()
    start = min(START, max(model.context_length - COUNT, 0))
    count = min(COUNT, model.context_length)
    pages = -(-(start + count) // block_size)
    cache = make_cache(2 * pages)
    tables = np.arange(2 * pages, dtype=np.int32).reshape(2, pages)

    def run(rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """Outputs of the rows (request, first token, how many) of the first request."""
        requests, begins, counts = (np.array(column) for column in zip(*rows, strict=True))
        begins = begins + start
        positions = np.concatenate(
            [np.arange(begin, begin + each) for begin, each in zip(begins, counts, strict=True)]
        )
        packed = PackedRows(begins, counts, tables[requests], positions, int((counts == 1).sum()))
        of_token = np.repeat(requests, counts)
        ids = (positions * 7919 + of_token * 13) % model.vocab_size
        plan = {PLAN_KEYWORD: cache.plan(packed)}
        tokens, places = (torch.from_numpy(each).to(model.device) for each in (ids, positions))
        with _states(model, StateRows(requests.tolist(), (begins - start).tolist(), counts.tolist())):
            output = run_stage(model.module, model.stage, tokens, places, **plan)
        return output[torch.from_numpy((of_token == 0).nonzero()[0]).to(model.device)].clone()

    blocks.is_strict = True
    try:
        with torch.inference_mode(), blocks:
            alone = run([(0, 0, count)])
            _forget(model)
            torch.set_num_threads(threads + 2)
            beside = torch.cat([run(rows) for rows in _pieces(count)])
    except UnknownOperator as error:
        raise CheckpointError(
            f"--batch-invariant: {name} uses the operator {error}, of which it is not known whether it "
            "computes each row by itself: leave the flag out"
        ) from error
    finally:
        blocks.is_strict = False
        _forget(model)
        torch.set_num_threads(threads)
    if differ := int((alone != beside).any(dim=-1).sum()):
        raise CheckpointError(
            f"--batch-invariant: in a trial of {name} in {model.dtype}, {differ} of {count} tokens have "
            "other bits beside another request: leave the flag out, or try another --dtype"
        )


def _pieces(count: int) -> list[list[tuple[int, int, int]]]:
    """Steps of the first request's ``count`` tokens in pieces, beside another one."""
    other = min(OTHER_COUNT, count - 1)
    return [
        [(0, 0, count // 5), (1, 0, other - 2)],
        [(0, count // 5, 1), (1, other - 2, 2)],
        [(1, other, 1), (0, count // 5 + 1, count - count // 5 - 2)],
        [(0, count - 1, 1), (1, 0, 1)],
    ]


def _states(model: LoadedModel, rows: StateRows) -> AbstractContextManager[None]:
    """Context in which layers with a recurrent state compute these rows."""
    return nullcontext() if model.states is None else model.states.step(rows)


def _forget(model: LoadedModel) -> None:
    """Drop what such layers keep of the trial's requests."""
    if model.states is not None:
        model.states.running.clear()
