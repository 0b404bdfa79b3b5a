"""A vision-language model for benchmarks: the shape of SmolVLM-256M, random weights, its real processor."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

from examples.benchmarks.make_bench_models import for_older_readers, write_tokenizer

NUM_TOKENS = 49_280
LONGEST_EDGE = 512
"""Pixels of an image's longer side once it is scaled: one tile of 64 rows."""
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %} {{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_seeing_model(directory: Path, seed: int = 0) -> Path:
    """Write the model unless it is there."""
    if (directory / "preprocessor_config.json").exists() or (directory / "processor_config.json").exists():
        return directory
    import torch
    import transformers as hf

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, NUM_TOKENS - len(SPECIAL))
    tokenizer = hf.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    tokenizer.chat_template = TEMPLATE
    config = hf.Idefics3Config(
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
        },
        text_config=hf.LlamaConfig(
            vocab_size=NUM_TOKENS, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
            bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4, tie_word_embeddings=False, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "text_model" in path and weight.ndim > 1:  # wide enough that the likeliest token is clear
                weight.normal_(std=1.0 if "embed_tokens" in path else weight.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(directory)
    for_older_readers(directory / "config.json")
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessorPil(
            size={"longest_edge": LONGEST_EDGE}, max_image_size={"longest_edge": LONGEST_EDGE}
        ),
        tokenizer=tokenizer,
        image_seq_len=64,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(directory)
    return directory


def picture(number: int, side: int = 1024) -> str:
    """A JPEG of a megapixel as a data URL; each number another one."""
    from PIL import Image

    chance = random.Random(number)
    small = Image.frombytes("RGB", (16, 16), chance.randbytes(768))
    into = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(into, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(into.getvalue()).decode()}"


def question(numbers: list[int]) -> list[Any]:
    """A user's turn with these pictures."""
    parts = [{"type": "image_url", "image_url": {"url": picture(number)}} for number in numbers]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
