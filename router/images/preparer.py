"""Process that decodes images and runs a model's processor: ``python -m router.images.preparer``.

It gets encoded images on its standard input, one message each, and answers on its standard output. It has no
secrets in its environment and bounds on its memory; its router ends it when an image takes too long.
"""

from __future__ import annotations

import inspect
import os
import resource
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.model.model_files import read_json
from engine.prompt_images import DIGEST_BYTES, ImageTensor, image_token
from router.images.messages import LENGTH_BYTES, FromPreparer, NoProcessor, Prepared, ProcessorRead, Refused

BESIDE = (
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "text_replacement_offsets",
    "num_crops",
    "token_type_ids",
    "rows",
    "cols",
    "num_patches",
    "num_soft_tokens_per_image",
)
"""What a processor returns beside what the encoder takes."""
OTHER_PARTS = ("_processor", "_extractor")
"""Ends of the names of a processor's parts beside its tokenizer."""
NUM_IMAGES = "batch_num_images"
"""What a processor returns that prepares an image by the number of those beside it."""

FAULTS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


def main(directory: str, most_pixels: int, most_bytes: int) -> None:
    """Answer images until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        processor = load_processor(directory)
        mark = str(processor.image_token)
        token = image_token(read_json(Path(directory) / "config.json"))
        placeholder = mark if token is None else str(processor.tokenizer.convert_ids_to_tokens(token))
    except FAULTS as error:  # whatever a model's files do to transformers' code
        _send(answers, NoProcessor(str(error)[:500]))
        return
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    _send(answers, ProcessorRead(mark, placeholder, _packages()))
    while True:
        head = sys.stdin.buffer.read(LENGTH_BYTES)
        if len(head) < LENGTH_BYTES:
            return
        _send(answers, _answer(processor, sys.stdin.buffer.read(int.from_bytes(head, "little")), most_pixels))


def _answer(processor: Any, data: bytes, most_pixels: int) -> FromPreparer:
    from router.images.decoding import BadImage, decode

    try:
        image = decode(data, most_pixels)
        return prepare(processor, image)
    except BadImage as error:
        return Refused(str(error))
    except MemoryError:
        return Refused("takes too much memory")
    except FAULTS as error:  # sizes that a processor cannot take
        return Refused(f"cannot be taken by this model: {str(error)[:200]}")


def prepare(processor: Any, image: Any) -> Prepared:
    """An image in RGB as the model takes it."""
    made = _processed(processor, [image], 1)
    if made.pop(NUM_IMAGES, None) is None:
        return _prepared(made)
    several = _processed(processor, [[image, image]], 2)  # LLaVA-OneVision cuts an image that is alone
    several |= {"pixel_values": several["pixel_values"][:1], "image_sizes": several["image_sizes"][:1]}
    return msgspec.structs.replace(_prepared(made), beside_others=_prepared(several))


def _processed(processor: Any, images: list[Any], count: int) -> dict[str, Any]:
    """What a processor makes of so many images of a prompt."""
    return dict(
        processor(
            images=images,
            text=[processor.image_token * count],
            return_tensors="np",
            return_text_replacement_offsets=True,
        )
    )


def _prepared(made: dict[str, Any]) -> Prepared:
    """The first of the images."""
    text = made["text_replacement_offsets"][0][0]["replacement"]
    tensors = tuple(
        ImageTensor(name, str(value.dtype), tuple(value.shape), value.tobytes())
        for name, value in sorted(made.items())
        if name not in BESIDE
    )
    digest = blake2b(msgspec.msgpack.encode((text, tensors)), digest_size=DIGEST_BYTES).digest()
    return Prepared(text, tensors, digest)


def load_processor(directory: str) -> Any:
    """A model's processor of transformers, without the part for videos, which needs torchvision."""
    from transformers import AutoProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    leave_videos_out()
    return AutoProcessor.from_pretrained(directory, backend="pil", local_files_only=True)


def leave_videos_out() -> None:
    """Make processors without parts for videos and audio from now on, in this process."""
    import transformers

    mixin: Any = transformers.ProcessorMixin
    if mixin.get_attributes.__func__ is _attributes:
        return
    initialise, read_parts = mixin.__init__, mixin._get_arguments_from_pretrained.__func__

    def initialise_without(self: Any, *parts: Any, **named: Any) -> None:
        """Also without settings of parts that are left out, which processor_config.json has."""
        own = _attributes(type(self))
        left_out = [name for name in named if name.endswith(OTHER_PARTS) and name not in own]
        initialise(self, *parts, **{name: part for name, part in named.items() if name not in left_out})

    def read_images_and_text(processor_class: Any, *given: Any, **named: Any) -> list[Any]:
        """Arguments by place, None for each part that is left out and has no default."""
        found = dict(
            zip(_attributes(processor_class), read_parts(processor_class, *given, **named), strict=True)
        )
        names = [*inspect.signature(processor_class.__init__).parameters.values()][1:]
        first = [each.name for each in names if each.name in found or each.default is each.empty]
        return [found.get(each) for each in first]

    mixin.__init__ = initialise_without
    mixin._get_arguments_from_pretrained = classmethod(read_images_and_text)
    mixin.get_attributes = classmethod(_attributes)


def _attributes(processor_class: Any) -> list[str]:
    """Names of the parts of a processor that images and text need."""
    names = inspect.signature(processor_class.__init__).parameters
    return [name for name in names if name in ("image_processor", "tokenizer")]


def _packages() -> str:
    import PIL
    import transformers

    return f"transformers {transformers.__version__}, Pillow {PIL.__version__}"


def _send(answers: BinaryIO, message: FromPreparer) -> None:
    data = msgspec.msgpack.encode(message)
    answers.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
