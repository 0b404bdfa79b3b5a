"""Tiny vision-language models with tokenizer, chat template and processor, for a router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers as hf

from router.images.preparer import leave_videos_out
from tests.engine.vision import tiny_gemma4_models
from tests.engine.vision.tiny_axes_models import MERGE, PATCH, config_of
from tests.engine.vision.tiny_vision_models import CHAT_TEMPLATE, TEXT, TOWER, save_vision_model
from tests.router.tiny_tokenizer import byte_level

PAD, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SOFT, BEGIN_SOFT, END_SOFT = "<image_soft_token>", "<start_of_image>", "<end_of_image>"


def _tokenizer(**names: str) -> tuple[Any, int]:
    """A tokenizer with named special tokens, and the number of its tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([*names.values()])
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", extra_special_tokens=names
    )
    return fast, tokenizer.get_vocab_size()


def make_tiny_qwen_chat_model(directory: Path, family: str = "qwen3_vl_moe") -> Path:
    """A Qwen-VL of this family; images have up to 16 rows."""
    leave_videos_out()
    names = {"image_token": PAD, "video_token": VIDEO, "vision_start_token": BEGIN, "vision_end_token": END}
    fast, vocab_size = _tokenizer(**names)
    text = TEXT | {"vocab_size": vocab_size, "max_position_embeddings": 1024}
    config = config_of(family, text, fast.convert_tokens_to_ids(PAD))
    config.vision_start_token_id = fast.convert_tokens_to_ids(BEGIN)
    config.vision_end_token_id = fast.convert_tokens_to_ids(END)
    save_vision_model(directory, config)
    sizes = {"shortest_edge": 256, "longest_edge": 1024}
    processor = hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=sizes),
        tokenizer=fast,
        chat_template=CHAT_TEMPLATE.replace("<image>", BEGIN + PAD + END),
    )
    processor.save_pretrained(directory)
    return directory


def make_tiny_gemma_chat_model(directory: Path) -> Path:
    """A Gemma 3; images have 16 rows."""
    leave_videos_out()
    fast, vocab_size = _tokenizer(image_token=SOFT, boi_token=BEGIN_SOFT, eoi_token=END_SOFT)
    text = TEXT | {"vocab_size": vocab_size, "max_position_embeddings": 1024, "num_hidden_layers": 4}
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=4),
        text_config=hf.Gemma3TextConfig(**text, head_dim=16, sliding_window=24, tie_word_embeddings=False),
        image_token_id=fast.convert_tokens_to_ids(SOFT),
        mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )
    save_vision_model(directory, config)
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer=fast,
        image_seq_length=16,
        chat_template=CHAT_TEMPLATE.replace("<image>", BEGIN_SOFT),
    )
    processor.save_pretrained(directory)
    return directory


def make_tiny_onevision_chat_model(directory: Path) -> Path:
    """A LLaVA-OneVision; an image that is alone is cut in up to four."""
    leave_videos_out()
    names = {"image_token": "<image>", "video_token": "<video>"}
    fast, vocab_size = _tokenizer(**names)
    text = TEXT | {"vocab_size": vocab_size, "max_position_embeddings": 1024}
    points = [[16, 16], [16, 32], [32, 16], [32, 32]]
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, image_size=16, patch_size=4, vision_use_head=False),
        text_config=hf.Qwen2Config(**text),
        image_token_index=fast.convert_tokens_to_ids("<image>"),
        video_token_index=fast.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=points,
    )
    save_vision_model(directory, config)
    sizes = {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": points}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessorPil(**sizes),
        tokenizer=fast,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
    return directory


def make_tiny_gemma4_chat_model(directory: Path, kind: str = "gemma4") -> Path:
    """A Gemma 4 of this kind; images have up to 70 rows."""
    leave_videos_out()
    names = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    fast, vocab_size = _tokenizer(**names)
    fast.pad_token = "<eos>"
    text = TEXT | {"vocab_size": vocab_size + 1, "max_position_embeddings": 1024}
    config = tiny_gemma4_models.config_of(kind, text, fast.convert_tokens_to_ids("<|image|>"), window=80)
    save_vision_model(directory, config)
    image_processor = hf.Gemma4ImageProcessorPil(
        patch_size=tiny_gemma4_models.PATCH, pooling_kernel_size=tiny_gemma4_models.POOLED, max_soft_tokens=70
    )
    template = CHAT_TEMPLATE.replace("<image>", "<|image|>")
    hf.Gemma4Processor(None, image_processor, fast, None, template, 70).save_pretrained(directory)
    path = directory / "processor_config.json"
    parts = {
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))  # as usual checkpoints have them
    return directory
