"""The KV cache of a device, as other instances and files reach it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.compute.runner import Pending
from engine.gpu.block_copies import BlockCopies
from engine.gpu.copy_stream import CopyStream
from engine.step import StepResult
from engine.transfers.staged_memory import StagedMemory

logger = logging.getLogger(__name__)


class CacheStaging:
    """Copies of KV blocks from and to a device, in order behind its steps."""

    def __init__(self, stream: CopyStream, parts: Sequence[torch.Tensor]) -> None:
        """``parts``: bytes [blocks, bytes of a block] of each tensor of the cache."""
        self._stream = stream
        self.memory = StagedMemory(BlockCopies(parts, stream))
        logger.info("KV blocks are copied through host memory: %r", self.memory)

    def __repr__(self) -> str:
        return f"<CacheStaging of {self.memory!r}>"

    def marked(self, pending: Pending) -> Pending:
        """Function that waits for a step that was just launched.

        Copies that come after its result wait for all that was launched by now.
        """
        end = self._stream.mark()

        def finish() -> StepResult:
            result = pending()
            end()
            return result

        return finish
