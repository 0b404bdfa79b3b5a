"""Images in the messages of a conversation (pure)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import refuse

DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<more>(?:;[\w.+=-]+)*?);base64,", re.ASCII)
KINDS = ("image_url", "input_image")
"""Types of parts that are images, in chats and in responses."""
OTHER_MEDIA = {
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "input_video": "video", "video": "video",
}  # fmt: skip
"""Types of parts that are refused by name."""
SCHEME = re.compile(r"(?!data:)[A-Za-z][A-Za-z0-9+.-]{0,19}:", re.ASCII)
DETAILS = ("auto", "low", "high", None)
PLACED = {"type": "image"}
"""The part that chat templates write a placeholder for."""


class LocatedPart(dict[str, Any]):
    """A part of a message with the JSON path that its client knows it by."""

    def __init__(self, part: Mapping[str, Any], path: str) -> None:
        super().__init__(part)
        self.path = path


def located(content: Any, path: str) -> Any:
    """Content whose images have paths below ``path``; anything else as it is."""
    if not isinstance(content, list):
        return content
    return [
        LocatedPart(part, f"{path}[{index}]") if _is_medium(part) else part
        for index, part in enumerate(content)
    ]


def path_of(part: Any, message: int, index: int) -> str:
    """JSON path of a part of a message's content."""
    return part.path if isinstance(part, LocatedPart) else f"messages[{message}].content[{index}]"


@dataclass(frozen=True)
class SentImage:
    """An image as it came, and its place in the request."""

    data: bytes
    """Encoded, in a format that is still to be found out."""
    path: str
    """JSON path of its part, like ``messages[0].content[1]``."""
    url: str = ""
    """Where it is still to be fetched from; empty: ``data`` has it."""


def has_images(messages: Sequence[Any]) -> bool:
    """Whether any message has a part that is an image, or another medium."""
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    return any(_is_medium(part) for content in contents if isinstance(content, list) for part in content)


def take_images(messages: Sequence[Any], most: int) -> tuple[list[Any], list[SentImage]]:
    """The messages with :data:`PLACED` for each image, and the images in their order.

    Raises:
        ApiError: there are more than ``most``, or one is no URL, or audio or video.
    """
    found: list[SentImage] = []
    taken = []
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            taken.append(message)
            continue
        parts = list(content)
        for index, part in enumerate(content):
            path = path_of(part, at, index)
            if _is_medium(part) and (other := OTHER_MEDIA.get(part["type"])):
                refuse(f"{path} is {other}, which is not supported: this model takes texts and images.", path)
            if _is_image(part):
                if len(found) == most:
                    refuse(f"{path} is one image more than the {most} that a request may have.", path)
                found.append(_read(part, path))
                parts[index] = PLACED
        taken.append(message | {"content": parts})
    return taken, found


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _is_medium(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and (kind in KINDS or kind in OTHER_MEDIA)


def _read(part: dict[str, Any], path: str) -> SentImage:
    given = part.get("image_url")
    detail = part.get("detail")
    if isinstance(given, dict):
        detail = given.get("detail", detail)
        given = given.get("url")
    if detail not in DETAILS:
        refuse(f"{path} has the detail {detail!r}, which is none of auto, low and high.", path)
    if detail == "low":
        refuse(f'{path} asks for the detail "low": this model sees an image in one resolution only.', path)
    if not isinstance(given, str):
        refuse(f"{path} has no URL of an image.", path)
    found = DATA_URL.match(given)
    if found is None:
        if SCHEME.match(given):
            return SentImage(b"", path, given)
        refuse(f"{path} is no URL, and no data URL in base64, like data:image/png;base64,....", path)
    text = given[found.end() :]
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        refuse(f"{path} is a data URL whose base64 is not valid.", path)
    if not data:
        refuse(f"{path} is an empty image.", path)
    return SentImage(data, path)
