"""Images of families as their own processors place them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model.model_files import read_json
from engine.prompt_images import image_merge, image_token, problem_with, problem_with_grids
from router.images.placing import for_request, images_in, with_images
from router.images.preparer import load_processor, prepare
from tests.engine.vision.tiny_chat_models import (
    make_tiny_gemma4_chat_model,
    make_tiny_gemma_chat_model,
    make_tiny_onevision_chat_model,
    make_tiny_qwen_chat_model,
)

Image = pytest.importorskip("PIL.Image")


MAKERS = [
    make_tiny_qwen_chat_model,
    make_tiny_gemma_chat_model,
    make_tiny_gemma4_chat_model,
    make_tiny_onevision_chat_model,
]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_prompts_are_those_of_the_whole_processor(
    make: Callable[[Path], Path], count: int, tmp_path: Path
) -> None:
    directory = make(tmp_path / "model")
    processor = load_processor(str(directory))
    pictures = [Image.new("RGB", size, colour) for size, colour in (((40, 30), "red"), ((20, 60), "blue"))]
    pictures = pictures[:count]
    content = [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}][: 2 * count - 1]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    expected = processor(text=[text], images=[pictures], return_tensors="np", add_special_tokens=False)

    config = read_json(directory / "config.json")
    placeholder = image_token(config)
    assert placeholder is not None
    prepared = for_request([prepare(processor, each) for each in pictures])
    tokenizer = processor.tokenizer
    whole = with_images(text, processor.image_token, prepared)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids == expected["input_ids"][0].tolist()
    found = images_in(ids, placeholder, tokenizer.convert_ids_to_tokens(placeholder), prepared)
    assert problem_with(found, ids, placeholder) is None
    assert problem_with_grids(found, image_merge(config)) is None
    tensors = {each.name: each.shape for each in prepared[0].tensors}
    if make is make_tiny_gemma4_chat_model:
        alone = processor.image_processor(images=[pictures[0]], return_tensors="np")
        assert tensors.keys() == {"pixel_values", "image_position_ids"}
        assert all(each.data == alone[each.name].tobytes() for each in prepared[0].tensors)
    elif make is not make_tiny_onevision_chat_model:
        assert tensors.keys() <= {"pixel_values", "image_grid_thw", "image_position_ids"}
    elif count == 1:
        assert tensors == {"pixel_values": expected["pixel_values"].shape, "image_sizes": (1, 2)}
    else:
        assert tensors == {"batch_num_images": (1,), "image_sizes": (1, 2), "pixel_values": (1, 1, 3, 16, 16)}
