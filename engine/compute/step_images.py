"""Rows of a step that reach images, and those that failed, on all workers alike."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.attention.base import PackedRows
from engine.compute.request_slots import RequestSlot
from engine.step import Step, StepResult
from engine.vision.encoded_images import RowImages
from parallel.communicators.base import Communicator


def rows_with_images(step: Step, held: Sequence[RequestSlot], packed: PackedRows) -> list[RowImages]:
    """Rows of a step that have tokens of images; every worker finds the same ones."""
    if not any(each.admit.images for each in held):
        return []
    rows = []
    offsets = np.cumsum(packed.counts) - packed.counts
    for index, (each, start, count) in enumerate(zip(held, step.starts, step.counts, strict=True)):
        if any(image.first < start + count and start < image.end for image in each.admit.images):
            rows.append(
                RowImages(each.admit.images, each.token_ids, start, int(offsets[index]), count, index)
            )
    return rows


def agreed(failed: list[bool], ranks: Communicator | None) -> list[bool]:
    """Whether each row failed on any rank of a stage.

    One may lack memory where others have it.
    """
    if ranks is None:
        return failed
    return [any(each) for each in zip(*ranks.all_gather_ints(failed), strict=True)]


def with_failed(result: StepResult, rows: Sequence[RowImages], failed: Sequence[bool]) -> StepResult:
    """The result of a step with the rows of it that failed."""
    if not any(failed):
        return result
    indices = [row.index for row, is_failed in zip(rows, failed, strict=True) if is_failed]
    return msgspec.structs.replace(result, failed_images=indices)
