"""Tiny vision-language models with random weights, and prompts with images for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from engine.prompt_images import ImageTensor, PromptImage
from tests.engine.vision import tiny_axes_models, tiny_gemma4_models
from tests.router.tiny_tokenizer import byte_level

PLACEHOLDER, VOCAB = 300, 320
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class VisionFamily:
    """A tiny model of a family, and what its processor makes of an image."""

    config: Callable[[], Any]
    num_rows: int | None
    """Placeholders of an image that is alone; None: by its grid."""
    tensors: Callable[[torch.Generator], Tensors]
    has_marks: bool = True
    """Whether text may stand between the rows of an image."""
    beside_others: tuple[int, Callable[[Tensors], Tensors]] | None = None
    """Placeholders and tensors of an image that is not alone; None: the same."""


def _pixels(*shape: int) -> Callable[[torch.Generator], Tensors]:
    return lambda numbers: {"pixel_values": torch.randn(*shape, generator=numbers)}


def _split(numbers: torch.Generator) -> Tensors:
    """An image that is split into two."""
    mask = torch.ones(1, 2, 32, 32, dtype=torch.int64)
    return {"pixel_values": torch.randn(1, 2, 3, 32, 32, generator=numbers), "pixel_attention_mask": mask}


def _sized(numbers: torch.Generator) -> Tensors:
    """An image with its size beside it."""
    return {
        "pixel_values": torch.randn(1, 3, 32, 48, generator=numbers),
        "image_sizes": torch.tensor([[32, 48]]),
    }


def _unpadded(numbers: torch.Generator) -> Tensors:
    """An image of 8 x 6 patches."""
    return {
        "pixel_values": torch.randn(1, 48, 48, generator=numbers),
        "spatial_shapes": torch.tensor([[8, 6]]),
        "pixel_attention_mask": torch.ones(1, 48, dtype=torch.int64),
    }


def _cut(numbers: torch.Generator) -> Tensors:
    """An image in parts of a larger size, behind it as a whole."""
    return {
        "pixel_values": torch.randn(1, 5, 3, 16, 16, generator=numbers),
        "image_sizes": torch.tensor([[28, 20]]),
    }


def _uncut(tensors: Tensors) -> Tensors:
    """The same image beside another one."""
    whole = tensors["pixel_values"][:, :1]
    return tensors | {"pixel_values": whole, "batch_num_images": torch.tensor([2])}


def _idefics(config_class: type) -> VisionFamily:
    """Idefics3, or another of its form."""
    return VisionFamily(
        lambda: config_class(
            vision_config=TOWER | {"image_size": 32, "patch_size": 4},
            text_config=hf.LlamaConfig(**TEXT),
            image_token_id=PLACEHOLDER,
            scale_factor=2,
        ),
        32,
        _split,
    )


BY_TORCH = ("llama4",)
"""Families that the native kernels do not compute."""
VISION_FAMILIES = (
    {
        "llava": VisionFamily(
            lambda: hf.LlavaConfig(
                vision_config=hf.CLIPVisionConfig(**TOWER, image_size=30, patch_size=6),
                text_config=hf.LlamaConfig(**TEXT),
                image_token_id=PLACEHOLDER,
            ),
            25,
            _pixels(1, 3, 30, 30),
        ),
        "llava_onevision": VisionFamily(
            lambda: hf.LlavaOnevisionConfig(
                vision_config=hf.SiglipVisionConfig(
                    **TOWER, image_size=16, patch_size=4, vision_use_head=False
                ),
                text_config=hf.Qwen2Config(**TEXT),
                image_token_index=PLACEHOLDER,
                image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
            ),
            72,
            _cut,
            beside_others=(17, _uncut),
        ),
        "internvl": VisionFamily(
            lambda: hf.InternVLConfig(
                vision_config=TOWER | {"image_size": [32, 32], "patch_size": [4, 4]},
                text_config=hf.Qwen2Config(**TEXT),
                image_token_id=PLACEHOLDER,
                downsample_ratio=0.5,
            ),
            16,
            _pixels(1, 3, 32, 32),
        ),
        "idefics3": _idefics(hf.Idefics3Config),
        "smolvlm": _idefics(hf.SmolVLMConfig),
        "mistral3": VisionFamily(
            lambda: hf.Mistral3Config(
                vision_config=hf.PixtralVisionConfig(**TOWER, image_size=32, patch_size=4),
                text_config=hf.MistralConfig(**TEXT),
                image_token_id=PLACEHOLDER,
                spatial_merge_size=2,
            ),
            24,
            _sized,
        ),
        "cohere2_vision": VisionFamily(
            lambda: hf.Cohere2VisionConfig(
                vision_config=hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=4),
                text_config=hf.Cohere2Config(**TEXT, sliding_window=16),
                image_token_id=PLACEHOLDER,
                alignment_intermediate_size=64,
            ),
            16,
            _pixels(1, 3, 32, 32),
        ),
        "lfm2_vl": VisionFamily(
            lambda: hf.Lfm2VlConfig(
                vision_config=hf.Siglip2VisionConfig(**TOWER, num_patches=64, patch_size=4),
                text_config=hf.Lfm2Config(
                    **TEXT, block_ff_dim=96, layer_types=["conv", "full_attention", "conv"], pad_token_id=0
                ),
                image_token_id=PLACEHOLDER,
                projector_hidden_size=48,
            ),
            12,
            _unpadded,
        ),
        "llama4": VisionFamily(
            lambda: hf.Llama4Config(
                vision_config=hf.Llama4VisionConfig(
                    **TOWER | {"intermediate_size": 128},
                    image_size=32,
                    patch_size=4,
                    vision_output_dim=32,
                    projector_input_dim=32,
                    projector_output_dim=32,
                ),
                text_config=hf.Llama4TextConfig(
                    **TEXT,
                    head_dim=16,
                    intermediate_size_mlp=96,
                    num_local_experts=4,
                    attention_chunk_size=64,
                    pad_token_id=0,
                ),
                image_token_index=PLACEHOLDER,
            ),
            16,
            _pixels(1, 3, 32, 32),
        ),
        "gemma3": VisionFamily(
            lambda: hf.Gemma3Config(
                vision_config=hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=4),
                text_config=hf.Gemma3TextConfig(
                    **TEXT | {"num_hidden_layers": 4},
                    head_dim=16,
                    sliding_window=12,
                    layer_types=[
                        "sliding_attention",
                        "sliding_attention",
                        "full_attention",
                        "sliding_attention",
                    ],
                    tie_word_embeddings=False,
                ),
                image_token_id=PLACEHOLDER,
                mm_tokens_per_image=16,
                tie_word_embeddings=False,
            ),
            16,
            _pixels(1, 3, 32, 32),
            has_marks=False,
        ),
    }
    | {
        family: VisionFamily(
            partial(tiny_axes_models.config_of, family, TEXT, PLACEHOLDER), None, tiny_axes_models.patches
        )
        for family in (
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "glm4v",
            "glm4v_moe",
        )
    }
    | {
        kind: VisionFamily(
            partial(tiny_gemma4_models.config_of, kind, TEXT, PLACEHOLDER),
            12,
            tiny_gemma4_models.patches,
            has_marks=False,
        )
        for kind in tiny_gemma4_models.KINDS
    }
)


def make_tiny_vision_model(directory: Path, family: str) -> Path:
    """A checkpoint whose weights are large enough that an image changes the answer."""
    save_vision_model(directory, VISION_FAMILIES[family].config())
    return directory


def save_vision_model(directory: Path, config: Any) -> None:
    """Random weights of this configuration."""
    torch.manual_seed(0)
    model: Any = hf.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with images: for the engine, and for transformers."""

    ids: list[int]
    images: tuple[PromptImage, ...]
    tensors: Tensors
    """Those of all images, as the family's processor puts them together."""


def seen_prompt(family: str, seed: int, num_images: int = 1, num_text: int = 9) -> SeenPrompt:
    """Text, an image, text, and so on; marks stand within rows where they may."""
    numbers, made = random.Random(seed), VISION_FAMILIES[family]
    ids, images, tensors = _text(numbers, num_text), [], []
    for index in range(num_images):
        own, num_rows = made.tensors(torch.Generator().manual_seed(1000 * seed + index)), made.num_rows
        if num_images > 1 and made.beside_others is not None:
            num_rows, own = made.beside_others[0], made.beside_others[1](own)
        first = len(ids)
        if num_rows is None or not made.has_marks:
            ids += [PLACEHOLDER] * (num_rows or tiny_axes_models.num_rows(own))
        else:
            half = num_rows // 2
            ids += [PLACEHOLDER] * half + [7] + [PLACEHOLDER] * (num_rows - half)
        images.append(image_of(own, first, len(ids), bytes([seed, index]) * 8))
        ids += _text(numbers, num_text)
        tensors.append(own)
    names = tensors[0] if tensors else ()
    together = {name: torch.cat([each[name] for each in tensors], dim=_along(family)) for name in names}
    return SeenPrompt(ids, tuple(images), together)


def image_of(tensors: Tensors, first: int, end: int, digest: bytes) -> PromptImage:
    """An image of a request with what its encoder reads."""
    parts = tuple(
        ImageTensor(name, str(each.numpy().dtype), tuple(each.shape), each.numpy().tobytes())
        for name, each in tensors.items()
    )
    return PromptImage(first, end, digest, parts)


def _along(family: str) -> int:
    """Dimension of images: families that split them have one for prompts before it."""
    return 1 if family in ("idefics3", "smolvlm") else 0


def _text(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(10, 290) for _ in range(count)]


MARK = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_chat_model(directory: Path) -> Path:
    """A LLaVA with tokenizer, chat template and processor, for a router."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([MARK])
    placeholder = tokenizer.token_to_id(MARK)
    text = TEXT | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1024}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, image_size=30, patch_size=6),
        text_config=hf.LlamaConfig(**text),
        image_token_id=placeholder,
    )
    save_vision_model(directory, config)
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": MARK},
    )
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessorPil(
            size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}
        ),
        tokenizer=fast,
        patch_size=6,
        vision_feature_select_strategy="default",
        image_token=MARK,
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
    return directory
