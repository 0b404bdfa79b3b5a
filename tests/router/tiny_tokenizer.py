"""A small byte-level BPE tokenizer with a chat template, as a model directory holds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = range(4)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Lockstep serves one language model from many instances behind one endpoint.",
    "Hello world! How are you today? I am fine, thank you very much.",
    "stop STOP Observation: Human: one two three four five six seven eight nine ten",
]

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(special: Sequence[str] = ()) -> Tokenizer:
    """BOS before every text, no normaliser; ``special`` tokens in addition."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens([*special])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Tokenizer like Llama 2's: spaces as U+2581, unknown characters as bytes, leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"Helowrd!", "▁Hello", "▁world", "!"]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_model(directory: Path, special: Sequence[str] = (), **config: object) -> Path:
    """The text files of a model. ``config`` goes into tokenizer_config.json; None takes a key out."""
    byte_level(special).save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE} | config
    kept = {key: value for key, value in settings.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))
    return directory
