"""Rows of images, encoded beside the steps or when one first reaches them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.host.background import be_nicer
from engine.host.deep_thread import DeepThread
from engine.host.memory import is_out_of_memory
from engine.model.errors import first_line
from engine.prompt_images import PromptImage
from engine.vision.encoding_share import EncodingShare
from engine.vision.tower import ImageTower

logger = logging.getLogger(__name__)

NICENESS = 7
"""Niceness of the thread that encodes: a sixth of a core beside busy steps.

It cannot be taken back without rights that containers lack, and threads begin with that of the thread that
starts them. So a second thread runs layers that are late, started before the first is nicer.
"""
MOST_BYTES = 256 << 20
"""Bytes of rows that are kept; the image used least lately goes first."""


@dataclass(frozen=True)
class RowImages:
    """A row of a step whose request has images."""

    images: Sequence[PromptImage]
    token_ids: Int64s
    """The request's tokens from its beginning on."""
    start: int
    """Position of the row's first token."""
    at: int
    """Index of that token in the step."""
    count: int
    index: int
    """Index of the row in the step."""


class WrongRows(ValueError):
    """A number of rows that a prompt has no places for."""


class EncodedImages:
    """A tower, and the rows of images that it encoded lately.

    All are encoded in one thread of its own, also where a step waits for them: so none has the contexts of a
    step, and the rows have the same bits in every case.
    """

    def __init__(self, tower: ImageTower, placeholder: int, most_bytes: int = MOST_BYTES) -> None:
        """``placeholder``: the token that stands for each row."""
        self._placeholder = placeholder
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self._changing = threading.Lock()
        self._thread = DeepThread("images")
        self._in_thread = threading.local()
        self._share = EncodingShare()
        self._is_awaited = False
        """Whether a step waits for an image."""
        self.num_encoded = self.num_late = 0
        """Images that the tower was run for, and its layers at the priority of steps."""
        self._late_thread = ThreadPoolExecutor(1, "late-images")
        self._late_thread.submit(int).result()  # it starts here, at the priority of steps, and lives on
        self._take(tower)

    def __repr__(self) -> str:
        return f"<EncodedImages, {len(self._kept)} kept, {self.num_encoded} encoded>"

    def use(self, tower: ImageTower) -> None:
        """Encode by another version's tower from the next step on; what another made is dropped."""
        with self._changing:
            self._take(tower)
            self._kept.clear()
            self._bytes = 0

    def _take(self, tower: ImageTower) -> None:
        self.tower = tower
        if tower.device.type == "cpu":
            tower.run_layers_by(self._run_layer)

    def begin(self, image: PromptImage, num_rows: int, done: Callable[[str, bool], None]) -> None:
        """See :class:`engine.executor_contract.ImageEncoder`."""
        if self._find(image.digest, num_rows) is not None:
            done("", True)
        else:
            self._thread.submit(lambda: self._make(image, num_rows, done))

    def place(self, rows: Sequence[RowImages], input_ids: Int64s) -> tuple[torch.Tensor | None, list[bool]]:
        """Rows [planes, rows, hidden] for the placeholders of a step; None if it has none.

        ``input_ids``: the step's tokens; placeholders become -1 - (index of their row in the result). Also
        returned is which of ``rows`` have an image that cannot be encoded: zeros stand for it.
        """
        parts: list[torch.Tensor] = []
        failed = [False] * len(rows)
        placed = 0
        for index, row in enumerate(rows):
            for image in row.images:
                first, end = max(image.first, row.start), min(image.end, row.start + row.count)
                if first >= end:
                    continue
                before = int((row.token_ids[image.first : first] == self._placeholder).sum())
                here = np.flatnonzero(row.token_ids[first:end] == self._placeholder)
                if not len(here):
                    continue
                found = self._rows_of(image, row.token_ids)
                failed[index] |= found is None
                parts.append(
                    self.tower.no_rows(len(here)) if found is None else found[:, before : before + len(here)]
                )
                input_ids[row.at + first - row.start + here] = -1 - (placed + np.arange(len(here)))
                placed += len(here)
        return torch.cat(parts, dim=1) if parts else None, failed

    def _rows_of(self, image: PromptImage, token_ids: Int64s) -> torch.Tensor | None:
        """Rows of an image, encoded now if they are not kept; None if that fails."""
        wanted = int((token_ids[image.first : image.end] == self._placeholder).sum())
        if (found := self._find(image.digest, wanted)) is not None:
            return found
        self._is_awaited = True
        try:
            return self._thread.submit(lambda: self._encode(image, wanted)).result()
        except Exception:  # whatever an image does to transformers' code
            logger.warning("an image of a step cannot be encoded", exc_info=True)
            return None
        finally:
            self._is_awaited = False

    def _find(self, digest: bytes, num_rows: int) -> torch.Tensor | None:
        """Rows that are kept, if they are as many."""
        with self._changing:
            found = self._kept.get(digest)
            if found is None or found.shape[1] != num_rows:
                return None
            self._kept.move_to_end(digest)
            return found

    # ---- the thread

    def _make(self, image: PromptImage, num_rows: int, done: Callable[[str, bool], None]) -> None:
        before = self.num_encoded
        done(self._try(image, num_rows), self.num_encoded == before)

    def _try(self, image: PromptImage, num_rows: int) -> str:
        """Why an image cannot be encoded; empty if it is."""
        try:
            self._encode(image, num_rows)
        except WrongRows as error:
            return str(error)
        except Exception as error:  # whatever an image does to transformers' code
            if is_out_of_memory(error):
                return "there is no memory to encode an image"
            logger.warning("an image cannot be encoded", exc_info=True)
            return f"an image cannot be encoded by this model: {first_line(error)}"
        return ""

    def _encode(self, image: PromptImage, num_rows: int) -> torch.Tensor:
        """Rows of an image, kept if its prompt has as many places."""
        if not hasattr(self._in_thread, "is_nicer"):
            self._in_thread.is_nicer = True
            be_nicer(NICENESS)
        if (kept := self._find(image.digest, num_rows)) is not None:
            return kept
        tower = self.tower
        found = tower.encode(image)
        self.num_encoded += 1
        if found.shape[1] != num_rows:
            raise WrongRows(
                f"an image has {found.shape[1]} rows in this model's encoder and {num_rows} placeholders in "
                f"the prompt: the checkpoint's processor and its weights do not fit each other"
            )
        with self._changing:
            if tower is not self.tower:  # the weights changed meanwhile: a step encodes it again
                return found
            if (before := self._kept.pop(image.digest, None)) is not None:
                self._bytes -= before.nbytes
            self._kept[image.digest] = found
            self._bytes += found.nbytes
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _run_layer(self, layer: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        if self._is_awaited or self._share.is_late:
            self.num_late += 1
            result, used = self._late_thread.submit(lambda: _timed(layer)).result()
        else:
            result, used = _timed(layer)
        self._share.took(used, time.perf_counter() - began)
        return result


def _timed(layer: Callable[[], Any]) -> tuple[Any, float]:
    """A layer's result, and the CPU seconds of this thread for it."""
    with torch.inference_mode():
        began = time.thread_time()
        return layer(), time.thread_time() - began
