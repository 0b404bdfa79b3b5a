"""Conversations with images beside others that have none."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.rpc.rpc import MAX_MESSAGE_BYTES
from engine.prompt_images import ImageTensor
from router.errors import ApiError
from router.http.large_bodies import BoundedThreads
from router.images import placing
from router.images.conversation import ModelImages, taken_by
from router.images.fetching import MediaFetcher
from router.images.messages import Prepared
from router.images.parts import SentImage
from router.images.preparation import ImagePreparation
from router.media_rules import MediaRules
from tests.waiting import until

pytest.importorskip("PIL")

MARK = "<image>"


class SlowPreparation(ImagePreparation):
    """Prepares images in this process; some take until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__(Path(), 1)
        self.go, self.busy = threading.Event(), threading.Event()

    def _start(self) -> None:
        self.mark = self.placeholder = MARK

    def _ask(self, image: SentImage) -> Prepared:
        if image.data == b"slow":
            self.busy.set()
            assert self.go.wait(60)
        return Prepared(image.data.decode(), (), image.data)


def messages(data: str) -> list[Any]:
    url = f"data:image/png;base64,{base64.b64encode(data.encode()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_slow_images_keep_no_place_of_requests_without_any() -> None:
    preparation = SlowPreparation()
    images = ModelImages(preparation, 1, 16, MediaFetcher(MediaRules.of((), None), 1), 1)
    lane = BoundedThreads("test", at_once=1, most_waiting=1, most_elsewhere=1)

    def render(_: Sequence[Any]) -> str:
        """The prompt of the request whose image is there, once another one is being decoded."""
        until(preparation.busy.is_set)
        return MARK

    async def run() -> None:
        quick = asyncio.create_task(lane.run(lambda: taken_by(images, messages("quick"), render)))
        await asyncio.to_thread(until, lambda: preparation._kept)
        slow = asyncio.create_task(asyncio.to_thread(preparation.prepare, SentImage(b"slow", "")))
        try:
            async with asyncio.timeout(20):
                assert (await quick)[0] == "quick"
                assert await lane.run(lambda: "text") == "text"
            assert not slow.done()
        finally:
            preparation.go.set()
        assert (await slow).text == "slow"

    asyncio.run(run())


def test_images_that_no_message_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent to an instance, which would hang up."""
    assert placing.MOST_BYTES < MAX_MESSAGE_BYTES
    monkeypatch.setattr(placing, "MOST_BYTES", 7)
    pixels = ImageTensor("pixel_values", "uint8", (4,), b"1234")
    preparation = SlowPreparation()
    monkeypatch.setattr(preparation, "_ask", lambda image: Prepared("", (pixels,), image.data))
    images = ModelImages(preparation, 1, 16, MediaFetcher(MediaRules.of((), None), 1), 1)
    assert len(images.take(messages("one"))[1]) == 1
    with pytest.raises(
        ApiError, match="2 images have 8 bytes as the model gets them, and at most 7"
    ) as caught:
        images.take(messages("one") + messages("two"))
    assert caught.value.status == 400
