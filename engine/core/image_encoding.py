"""Requests whose images are being encoded, beside the steps of others.

A request waits here until the rows of all its images are there, or one of them turns out to have none. So a
long image stops no decode, and one that cannot be encoded costs its own request only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.executor_contract import ImageEncoder
from engine.messages import ImageCounters
from engine.prompt_images import PromptImage
from engine.scheduling.request import Request, RequestKey


@dataclass(eq=False)
class _Waiting:
    """A request, and its images without rows: the encoder has the first."""

    request: Request
    images: deque[PromptImage]


class ImageEncoding:
    """Requests that wait for rows of their images.

    All calls come from the thread of the steps.
    """

    def __init__(self, placeholder: int | None) -> None:
        """``placeholder``: token that stands for a row; None: the model takes no images."""
        self.encoder: ImageEncoder | None = None
        """None: nothing is encoded beforehand."""
        self._placeholder = placeholder
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._answers: deque[tuple[_Waiting, str, bool]] = deque()
        self._encoded = self._kept = self._cached = self._failed = 0
        self._num_under_way = 0
        self.on_done: Callable[[], None] = lambda: None
        """Called from another thread when an image is done."""

    def __repr__(self) -> str:
        return f"<ImageEncoding {len(self)} waiting>"

    def __len__(self) -> int:
        """Requests that wait for rows."""
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    @property
    def num_under_way(self) -> int:
        """Requests that wait, and images that the encoder still has of forgotten ones."""
        return max(len(self._waiting), self._num_under_way)

    @property
    def counters(self) -> ImageCounters | None:
        """None: the model takes no images."""
        if self._placeholder is None:
            return None
        return ImageCounters(self._encoded, self._kept, self._cached, self._failed)

    @property
    def requests(self) -> list[Request]:
        return [each.request for each in self._waiting.values()]

    @property
    def num_tokens(self) -> int:
        """Tokens of the waiting requests."""
        return sum(len(each.request.token_ids) for each in self._waiting.values())

    def takes(self, request: Request, num_cached: int) -> bool:
        """Whether a request waits here; else it needs no rows.

        ``num_cached``: leading tokens whose keys and values are in the cache.
        """
        if self.encoder is None:
            return False
        images = deque(each for each in request.images if each.end > num_cached)
        self._cached += len(request.images) - len(images)
        if not images:
            return False
        waiting = self._waiting[request.key] = _Waiting(request, images)
        self._begin(waiting)
        return True

    def forget(self, key: RequestKey) -> bool:
        """Stop waiting with a request; False if it does not wait here."""
        return self._waiting.pop(key, None) is not None

    def take(self) -> list[tuple[Request, str]]:
        """Requests that wait no longer, each with the problem of an image.

        An empty one: all have rows.
        """
        ready = []
        while self._answers:
            waiting, problem, was_there = self._answers.popleft()
            self._num_under_way -= 1
            self._failed += bool(problem)
            self._kept += not problem and was_there
            self._encoded += not problem and not was_there
            key = waiting.request.key
            if self._waiting.get(key) is not waiting:
                continue
            waiting.images.popleft()
            if waiting.images and not problem:
                self._begin(waiting)
            else:
                del self._waiting[key]
                ready.append((waiting.request, problem))
        return ready

    def _begin(self, waiting: _Waiting) -> None:
        assert self.encoder is not None
        image = waiting.images[0]
        placed = waiting.request.token_ids[image.first : image.end].count(self._placeholder or 0)
        self._num_under_way += 1
        self.encoder.begin(image, placed, lambda *outcome: self._done(waiting, *outcome))

    def _done(self, waiting: _Waiting, problem: str, was_there: bool) -> None:
        self._answers.append((waiting, problem, was_there))
        self.on_done()
