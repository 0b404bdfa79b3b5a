"""Places of prepared images in a prompt (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rpc.rpc import MAX_MESSAGE_BYTES
from engine.prompt_images import PromptImage
from router.errors import refuse
from router.images.messages import Prepared

MOST_BYTES = MAX_MESSAGE_BYTES - (4 << 20)
"""Bytes of a request's images as the model gets them.

The rest of its message is for text.
"""


def for_request(prepared: Sequence[Prepared]) -> list[Prepared]:
    """The images of one request: some models prepare several otherwise than one."""
    return [each.beside_others or each for each in prepared] if len(prepared) > 1 else [*prepared]


def check_size(prepared: Sequence[Prepared]) -> None:
    """Check that one message holds a request's images.

    Raises:
        ApiError: none does (400).
    """
    found = sum(len(tensor.data) for each in prepared for tensor in each.tensors)
    if found > MOST_BYTES:
        refuse(
            f"The request's {len(prepared)} images have {found} bytes as the model gets them, and at most "
            f"{MOST_BYTES} are taken: send fewer or smaller ones.",
            "messages",
        )


def with_images(text: str, mark: str, prepared: Sequence[Prepared]) -> str:
    """The prompt's text with what stands for each image in place of its mark.

    Raises:
        ApiError: the text has another number of marks: some that a message spells out, or too few.
    """
    pieces = text.split(mark)
    if len(pieces) - 1 != len(prepared):
        refuse(
            f"The prompt has {len(pieces) - 1} places for images ({mark}) and the request has "
            f"{len(prepared)}: messages must not spell them out, and the chat template must write one for "
            f"each.",
            "messages",
        )
    found = [pieces[0]]
    for each, piece in zip(prepared, pieces[1:], strict=True):
        found += [each.text, piece]
    return "".join(found)


def images_in(
    ids: Sequence[int], placeholder: int, text: str, prepared: Sequence[Prepared]
) -> tuple[PromptImage, ...]:
    """Images of a prompt's token ids: each from its first placeholder to its last.

    ``text``: of the placeholder.

    Raises:
        ApiError: the tokens have another number of placeholders than the text had.
    """
    places = [index for index, token in enumerate(ids) if token == placeholder]
    counts = [each.text.count(text) for each in prepared]
    if len(places) != sum(counts):
        refuse(
            f"The prompt has {len(places)} placeholders of images where {sum(counts)} are needed: it must "
            f"not be truncated, and messages must not spell them out.",
            "messages",
        )
    found, at = [], 0
    for each, count in zip(prepared, counts, strict=True):
        own = places[at : at + count]
        found.append(PromptImage(own[0], own[-1] + 1, each.digest, each.tensors))
        at += count
    return tuple(found)
