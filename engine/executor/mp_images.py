"""Images encoded by worker processes: the engine's side (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.executor.ends import WorkerEnd
from engine.executor.messages import EncodeImage, ImageEncoded
from engine.executor.worker_channels import WorkerChannels
from engine.prompt_images import PromptImage


@dataclass
class _UnderWay:
    """An image that some workers have not encoded yet."""

    left: int
    done: Callable[[str, bool], None]
    was_there: bool = True
    """Whether all of them had its rows before."""
    problems: list[str] = field(default_factory=list)


class MpImages:
    """An :class:`engine.executor_contract.ImageEncoder` of the workers that begin the stream."""

    def __init__(self, channels: WorkerChannels, workers: Sequence[WorkerEnd]) -> None:
        """``workers``: all ranks of the first stage."""
        self._channels = channels
        self._workers = workers
        self._number = 0
        self._under_way: dict[int, _UnderWay] = {}

    def __repr__(self) -> str:
        return f"<MpImages, {len(self._under_way)} images under way>"

    def begin(self, image: PromptImage, num_rows: int, done: Callable[[str, bool], None]) -> None:
        """See :class:`.ImageEncoder`."""
        self._number += 1
        self._under_way[self._number] = _UnderWay(len(self._workers), done)
        for worker in self._workers:
            self._channels.send(worker, EncodeImage(self._number, image, num_rows))

    def take_in(self, answer: ImageEncoded) -> None:
        """Take in a worker's answer; the last one of an image ends it."""
        found = self._under_way[answer.number]
        found.left -= 1
        found.problems += [answer.problem] * bool(answer.problem)
        found.was_there &= answer.was_there
        if not found.left:
            del self._under_way[answer.number]
            found.done(min(found.problems, default=""), found.was_there)
