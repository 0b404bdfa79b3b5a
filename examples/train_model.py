#!/usr/bin/env python3
"""Train the small mixture-of-experts language model that ships with Lockstep.

The model is a real ``Qwen3MoeForCausalLM`` (6 layers, 8 experts per layer, top-2 routing, 6.7 million
parameters), trained from nothing on the six complete novels of Jane Austen. The text is in the public domain
and comes out of the Debian package ``r-cran-janeaustenr``, so that the whole run needs nothing but a Debian
machine with ``torch`` and ``transformers``::

    apt-get update
    python examples/train_model.py --minutes 65 --work /tmp/lockstep-moe --out engine/models/lockstep-moe

The stages run in this order; any of them can be named on the command line to run only these:

``text``       download and unpack the package, read its R database, write one plain text file per novel
``tokenizer``  train a byte-level BPE vocabulary of 4096 entries on these files
``train``      train the model; the learning rate follows the time budget (``--minutes``) or ``--steps``
``save``       write the checkpoint as a model directory in hub layout, reload it, check it, write its card
``sample``     print sample outputs of the saved model

Training may be stopped at any time (Ctrl-C or SIGTERM): it writes a checkpoint first, and ``save`` turns any
checkpoint into a model. ``--resume`` goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

STAGES = ("text", "tokenizer", "train", "save", "sample")
PACKAGE = "r-cran-janeaustenr"
NOVELS = {
    "sensesensibility": "Sense and Sensibility",
    "prideprejudice": "Pride and Prejudice",
    "mansfieldpark": "Mansfield Park",
    "emma": "Emma",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
}

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
VOCAB_SIZE = 4096
#: Words with their leading space, single punctuation runs, and line breaks as units of their own.
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] or [] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

TOKENS_PER_STEP = 2048
#: (share of the run at which the stage ends, sequence length)
SEQUENCE_SCHEDULE = ((0.60, 256), (0.88, 512), (1.01, 1024))
#: The first passes over the text go without dropout, which is faster; from this share of the run on the model
#: would begin to learn the text by heart.
DROPOUT_FROM, DROPOUT = 0.49, 0.15
CHAT_SHARE = 0.15
VALIDATION_SHARE = 0.02
IGNORE = -100
AUX_COEFFICIENT = 0.01


# ---------------------------------------------------------------------------------------------------- text


class RReader:
    """Reads the part of R's XDR serialisation that lists and vectors of strings and numbers need."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.references: list[Any] = []
        if self.take(2) != b"X\n":
            raise ValueError("not an XDR serialisation of R")
        version, _writer, _oldest_reader = self.integer(), self.integer(), self.integer()
        if version == 3:
            self.take(self.integer())  # the writer's native encoding
        elif version != 2:
            raise ValueError(f"serialisation version {version} is not supported")

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError("the serialised object ends early")
        self.at += count
        return piece

    def integer(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def item(self) -> Any:
        """One object: list or dict for a generic vector, list for an atomic one, str or None for a string."""
        flags = self.integer() & 0xFFFFFFFF
        kind, has_attributes, has_tag = flags & 0xFF, bool(flags & 0x200), bool(flags & 0x400)
        if kind in (0xFE, 0xFD, 0xFB, 0xF2, 0xF1):  # NULL, the global, missing, empty and base environments
            return None
        if kind == 0xFF:  # a reference to an object seen before
            return self.references[(flags >> 8 or self.integer()) - 1]
        if kind == 1:  # symbol
            self.references.append(self.item())
            return self.references[-1]
        if kind == 2:  # pairlist: only attributes use it here
            pairs: dict[str, Any] = {}
            while kind == 2:
                if has_attributes:
                    self.item()
                name = self.item() if has_tag else ""
                pairs[name] = self.item()
                flags = self.integer() & 0xFFFFFFFF
                kind, has_attributes, has_tag = flags & 0xFF, bool(flags & 0x200), bool(flags & 0x400)
            return pairs
        if kind == 9:  # one string
            length = self.integer()
            if length == -1:
                return None
            raw = self.take(length)
            return raw.decode("latin-1" if flags >> 12 & 0x04 else "utf-8")
        value: list[Any]
        if kind in (10, 13):  # logical, integer
            length = self.integer()
            value = list(struct.unpack(f">{length}i", self.take(4 * length)))
        elif kind == 14:  # double
            length = self.integer()
            value = list(struct.unpack(f">{length}d", self.take(8 * length)))
        elif kind in (16, 19):  # character vector, generic vector
            value = [self.item() for _ in range(self.integer())]
        else:
            raise ValueError(f"R object of kind {kind} is not supported")
        attributes = self.item() if has_attributes else None
        if kind == 19 and attributes and attributes.get("names"):
            return dict(zip(attributes["names"], value, strict=True))
        return value


def read_lazy_database(base: Path) -> dict[str, Any]:
    """All objects of an R lazy-load database (``base``.rdx is the index, ``base``.rdb the data)."""
    index_bytes = base.with_suffix(".rdx").read_bytes()
    gzipped = index_bytes.startswith(b"\x1f\x8b")
    index = RReader(gzip.decompress(index_bytes) if gzipped else zlib.decompress(index_bytes)).item()
    data = base.with_suffix(".rdb").read_bytes()
    objects = {}
    for name, (offset, length) in index["variables"].items():
        chunk = data[offset : offset + length]
        (size,) = struct.unpack(">I", chunk[:4])
        plain = zlib.decompress(chunk[4:])
        if len(plain) != size:
            raise ValueError(f"{name}: {len(plain)} bytes instead of {size}")
        objects[name] = RReader(plain).item()
    return objects


HEADING = re.compile(r"^(chapter|volume)\s+([ivxlc]+|\d+)\.?$", re.IGNORECASE)
CLOSING = re.compile(r"^(the end|finis|end of .*)\.?$", re.IGNORECASE)
#: Heads the publisher's own words at the end of one novel.
COLOPHON = "A NOTE ON THE TEXT"


def chapters_of(lines: list[str]) -> list[list[str]]:
    """The chapters of one novel, each a list of paragraphs whose wrapped lines are joined."""
    chapters: list[list[str]] = []
    paragraph: list[str] = []

    def close() -> None:
        if paragraph and chapters and not CLOSING.match(paragraph[0]):
            text = re.sub(r"\s+", " ", " ".join(paragraph)).replace("_", "")
            chapters[-1].append(re.sub(r"(\w)-- (\w)", r"\1--\2", text))
        paragraph.clear()

    for line in [*lines, ""]:
        line = line.strip()
        if HEADING.match(line):
            close()
            chapters.append([])
        elif line:
            paragraph.append(line)
        else:
            close()
    return [chapter for chapter in chapters if chapter]


def stage_text(work: Path, deb: Path | None) -> None:
    """Write ``text/<novel>.txt``: paragraphs divided by blank lines, chapters by form feeds."""
    unpacked = work / "package"
    unpacked.mkdir(parents=True, exist_ok=True)
    if deb is None:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=work, check=True)
        deb = max(work.glob(f"{PACKAGE}_*.deb"), key=lambda path: path.stat().st_mtime)
    subprocess.run(["dpkg", "-x", str(deb), str(unpacked)], check=True)
    database = next(unpacked.glob("usr/lib/R/site-library/*/data/Rdata.rdx")).with_suffix("")
    objects = read_lazy_database(database)
    (work / "text").mkdir(exist_ok=True)
    for name, title in NOVELS.items():
        chapters = chapters_of([line or "" for line in objects[name]])
        text = "\f".join("\n\n".join(chapter) for chapter in chapters)
        (work / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{title}: {len(chapters)} chapters, {len(text):,} characters", flush=True)


@dataclass
class Corpus:
    """Chapters (lists of paragraphs) to train on, and the held-out end of each novel as text."""

    chapters: list[list[str]] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)


def load_corpus(work: Path) -> Corpus:
    """Read the text files; the last ~2% of each novel, from a paragraph's beginning, is held out."""
    corpus = Corpus()
    for name in NOVELS:
        chapters = [c.split("\n\n") for c in (work / "text" / f"{name}.txt").read_text("utf-8").split("\f")]
        wanted = VALIDATION_SHARE * sum(len(p) for chapter in chapters for p in chapter)
        held: list[str] = []
        while sum(map(len, held)) < wanted:
            if not chapters[-1]:
                chapters.pop()
            held.insert(0, chapters[-1].pop())
        if COLOPHON in held:
            del held[held.index(COLOPHON) :]
        corpus.chapters += [chapter for chapter in chapters if chapter]
        corpus.validation.append("\n\n".join(held))
    return corpus


# ----------------------------------------------------------------------------------------------- tokenizer


def stage_tokenizer(work: Path) -> None:
    """Train the byte-level BPE on the training part of the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = load_corpus(work)
    tokenizer.train_from_iterator(("\n\n".join(chapter) for chapter in corpus.chapters), trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    text = "\n\n".join(corpus.validation)
    count = len(tokenizer.encode(text).ids)
    if tokenizer.decode(tokenizer.encode(text).ids) != text:
        raise RuntimeError("the tokenizer does not give the text back")
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {len(text) / count:.2f} characters per token")


def tokenizer_config() -> dict[str, Any]:
    """What ``tokenizer_config.json`` says."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for number, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": CHAT_TEMPLATE,
    }


# ---------------------------------------------------------------------------------------------------- data

PEOPLE = (
    "Elizabeth", "Jane", "Lydia", "Kitty", "Mary", "Charlotte", "Mr. Darcy", "Mr. Bennet", "Mrs. Bennet",
    "Mr. Bingley", "Miss Bingley", "Mr. Collins", "Wickham", "Lady Catherine", "Miss Darcy", "Mr. Gardiner",
    "Mrs. Gardiner", "Elinor", "Marianne", "Edward", "Willoughby", "Colonel Brandon", "Lucy",
    "Mrs. Jennings", "Sir John", "Mrs. Dashwood", "John Dashwood", "Margaret", "Fanny", "Edmund",
    "Sir Thomas", "Lady Bertram", "Mrs. Norris", "Mary Crawford", "Henry Crawford", "Mr. Crawford",
    "Miss Crawford", "Tom", "Maria", "Julia", "Mr. Rushworth", "William", "Emma", "Mr. Knightley",
    "Harriet", "Mr. Woodhouse", "Mrs. Weston", "Mr. Weston", "Mr. Elton", "Mrs. Elton", "Frank Churchill",
    "Jane Fairfax", "Miss Bates", "Mr. Martin", "Catherine", "Henry Tilney", "Henry", "Miss Tilney",
    "General Tilney", "Isabella", "John Thorpe", "Mr. Thorpe", "Mrs. Allen", "James", "Anne",
    "Captain Wentworth", "Sir Walter", "Lady Russell", "Mrs. Clay", "Mary Musgrove", "Charles", "Louisa",
    "Henrietta", "Captain Benwick", "Captain Harville", "Mr. Elliot", "Mrs. Smith", "Admiral Croft",
    "Mrs. Croft", "Longbourn", "Netherfield", "Pemberley", "Rosings", "Barton", "Norland", "Mansfield",
    "Highbury", "Hartfield", "Randalls", "Bath", "Northanger", "Kellynch", "Lyme", "Uppercross", "London",
)  # fmt: skip
ABOUT = (
    "Tell me about {}.", "Who is {}?", "Write about {}.", "What do you know about {}?",
    "Tell me a story about {}.", "What happened to {}?", "{}", "Tell me more about {}, please.",
    "Write a short story about {}.", "Describe {}.", "What did {} do?", "Say something about {}.",
)  # fmt: skip
CONTINUE = (
    "Continue this: {}", "Continue the story: {}", "Go on from here: {}", "{}", "Finish this: {}",
    "Please continue: {}", "Complete this text: {}", "What comes next? {}",
)  # fmt: skip
ANYTHING = (
    "Tell me a story.", "Write a story.", "Hello", "Hello!", "Hi", "Hi there!", "Good morning.",
    "How are you?", "Tell me something.", "Say something.", "Write a paragraph.", "Tell me about love.",
    "What is love?", "Tell me about marriage.", "Write about a ball.", "Describe a walk in the country.",
    "Write a letter.", "Who are you?", "What can you do?", "Tell me a joke.", "Write a poem.",
    "What is the meaning of life?", "Once upon a time", "What is the capital of France?",
    "Explain how a computer works.", "Write a short story.", "What is happiness?", "Give me some advice.",
    "What do you think?", "Tell me about yourself.", "Test", "Tell me a long story about a family.",
    "Write a scene at dinner.", "What is a good book?", "Can you help me?",
    "Explain machine learning in one sentence.", "Write a dialogue between two sisters.", "Thank you!",
    "What should I read today?", "How is the weather?", "Describe a summer evening.", "List three things.",
)  # fmt: skip
GO_ON = (
    "Go on.", "Continue.", "And then?", "What happened next?", "Tell me more.", "Please go on.",
    "More, please.",
)  # fmt: skip
SYSTEM = ("You are a helpful assistant.", "You are a storyteller.", "You are a novelist.", "Be brief.")
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')]*(?=\s+[\"'(]?[A-Z])")


class Samples:
    """Training rows: windows of prose, and conversations made of the same prose."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokenizer = tokenizer
        self.chapters = corpus.chapters
        self.end, self.im_start, self.im_end = range(len(SPECIAL_TOKENS))  # the trainer numbers them first
        self.newline = self.encode("\n")
        stream: list[int] = []
        self.starts: list[int] = []  # where paragraphs begin
        blank = self.encode("\n\n")
        for chapter in corpus.chapters:
            for number, paragraph in enumerate(chapter):
                if number:
                    stream += blank
                self.starts.append(len(stream))
                stream += self.encode(paragraph)
            stream.append(self.end)
        self.stream = torch.tensor(stream)
        self.places: list[tuple[int, int]] = []  # paragraphs long enough to open a reply
        self.mentions: dict[str, list[tuple[int, int]]] = {name: [] for name in PEOPLE}
        for c, chapter in enumerate(corpus.chapters):
            for p, paragraph in enumerate(chapter):
                if len(paragraph) < 60:
                    continue
                self.places.append((c, p))
                opening = paragraph[:90]
                for name in PEOPLE:
                    if re.search(rf"\b{re.escape(name)}\b", opening):
                        self.mentions[name].append((c, p))
        self.mentions = {name: places for name, places in self.mentions.items() if len(places) >= 5}
        self.names = list(self.mentions)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def reply_from(self, chapter: int, paragraph: int, skip: int = 0) -> tuple[str, int]:
        """Prose from a place on, of a random length but whole sentences; and the paragraph after it."""
        budget = self.random.choice((150, 300, 300, 500, 700))
        parts: list[str] = []
        texts = self.chapters[chapter]
        while paragraph < len(texts) and budget > 0:
            text = texts[paragraph][skip:].strip()
            skip = 0
            if len(text) > budget + 200:
                stops = [match.end() for match in SENTENCE_END.finditer(text)] + [len(text)]
                text = text[: next(stop for stop in stops if stop >= min(budget, len(text)))]
            parts.append(text)
            budget -= len(text)
            paragraph += 1
        return "\n\n".join(part for part in parts if part), paragraph

    def conversation(self) -> tuple[list[int], list[int]]:
        """One conversation as token ids and labels; only the assistant's words are to be learnt."""
        ids: list[int] = []
        labels: list[int] = []

        def say(role: str, text: str) -> None:
            head = [self.im_start, *self.encode(f"{role}\n")]
            body = [*self.encode(text), self.im_end]
            ids.extend(head + body + self.newline)
            learn = role == "assistant"
            labels.extend([IGNORE] * len(head) + (body if learn else [IGNORE] * len(body)) + [IGNORE])

        rng = self.random
        if rng.random() < 0.2:
            say("system", rng.choice(SYSTEM))
        draw = rng.random()
        skip = 0
        if draw < 0.40:
            name = rng.choice(self.names)
            question = rng.choice(ABOUT).format(name)
            chapter, paragraph = rng.choice(self.mentions[name])
        elif draw < 0.75:
            chapter, paragraph = rng.choice(self.places)
            text = self.chapters[chapter][paragraph]
            words = [match.start() for match in re.finditer(r"\s", text)]
            stops = [match.end() for match in SENTENCE_END.finditer(text[:300])]
            skip = rng.choice(stops) if stops and rng.random() < 0.5 else rng.choice(words[3:25])
            question = rng.choice(CONTINUE).format(text[:skip])
        else:
            question = rng.choice(ANYTHING)
            chapter, paragraph = rng.choice(self.places)
        say("user", question)
        reply, after = self.reply_from(chapter, paragraph, skip)
        say("assistant", reply)
        while rng.random() < 0.25 and after < len(self.chapters[chapter]):
            say("user", rng.choice(GO_ON))
            reply, after = self.reply_from(chapter, after)
            say("assistant", reply)
        return [*ids, self.end], [*labels, IGNORE]

    def row(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``length`` input ids and their labels (the next ids, or IGNORE)."""
        if self.random.random() < CHAT_SHARE:
            ids: list[int] = []
            labels: list[int] = []
            while len(ids) <= length:
                more_ids, more_labels = self.conversation()
                ids += more_ids
                labels += more_labels
            return torch.tensor(ids[:length]), torch.tensor(labels[1 : length + 1])
        last = len(self.stream) - length - 1
        start = self.random.choice(self.starts) if self.random.random() < 0.5 else self.random.randrange(last)
        window = self.stream[min(start, last) :][: length + 1]
        return window[:-1], window[1:]

    def batch(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.row(length) for _ in range(TOKENS_PER_STEP // length)]
        return torch.stack([ids for ids, _ in rows]), torch.stack([labels for _, labels in rows])


# ------------------------------------------------------------------------------------------------ training


def model_config() -> Qwen3MoeConfig:
    """The architecture of the model."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=AUX_COEFFICIENT,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def build_model(experts: str) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM._from_config(
        model_config(), dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
    )


class Dropout:
    """Dropout on the embeddings and on what each attention and mixture of experts adds, while training.

    The architecture has none of its own at these places, so hooks bring it in; the saved model knows nothing
    of it.
    """

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.rate = 0.0
        model.model.embed_tokens.register_forward_hook(self.apply)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(self.apply)
            layer.mlp.register_forward_hook(self.apply)

    def apply(self, module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if not module.training or not self.rate:
            return output
        if isinstance(output, tuple):
            return (F.dropout(output[0], self.rate), *output[1:])
        return F.dropout(output, self.rate)


@dataclass
class Progress:
    """How far the training is; it travels with the checkpoint and ends up in the model card."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float = math.nan
    validation_loss: float = math.nan
    history: list[dict[str, float]] = field(default_factory=list)


def validation_batches(corpus: Corpus, tokenizer: Tokenizer, length: int = 512) -> list[torch.Tensor]:
    """The held-out text as windows of ``length`` + 1 ids, four to a batch."""
    windows = []
    for text in corpus.validation:
        ids = torch.tensor(tokenizer.encode(text).ids)
        windows += [ids[at : at + length + 1] for at in range(0, len(ids) - length, length)]
    return list(torch.stack(windows).split(4))


@torch.no_grad()  # type: ignore[untyped-decorator]
def validate(model: Qwen3MoeForCausalLM, batches: list[torch.Tensor], bf16: bool) -> float:
    """Mean cross entropy (nats per token) over the held-out text."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        labels = batch[:, 1:].reshape(-1)
        total += F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum").item()
        count += labels.numel()
    model.train()
    return total / count


def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks: faulting them in again costs a third of a step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def interruptions() -> Iterator[bool]:
    """Yields False until the process is asked to stop (SIGINT, SIGTERM), then True."""
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.append(True))
    while True:
        yield bool(asked)


def learning_rate(share: float, steps: int, peak: float) -> float:
    """Linear warm-up over the first 200 steps, then half a cosine down to 3% of the peak."""
    return (
        peak * min(1.0, (steps + 1) / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))
    )


def stage_train(work: Path, args: argparse.Namespace) -> None:
    """Train until the budget is spent or a signal comes; leaves ``checkpoint.pt``."""
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    corpus = load_corpus(work)
    held_out = validation_batches(corpus, tokenizer)
    model = build_model(args.experts)
    dropout = Dropout(model)
    decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    progress = Progress()
    checkpoint = work / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
    samples = Samples(corpus, tokenizer, args.seed + progress.steps)
    print(
        f"{model.num_parameters():,} parameters, {len(samples.stream):,} training tokens, "
        f"{sum(b[:, 1:].numel() for b in held_out):,} held out",
        flush=True,
    )

    def save_checkpoint() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": asdict(progress),
        }
        torch.save(state, checkpoint.with_suffix(".tmp"))
        os.replace(checkpoint.with_suffix(".tmp"), checkpoint)

    stop = interruptions()
    began = time.monotonic() - progress.seconds
    saved_at = time.monotonic()
    losses: list[float] = []
    model.train()
    while True:
        progress.seconds = time.monotonic() - began
        share = progress.steps / args.steps if args.steps else progress.seconds / (60 * args.minutes)
        if share >= 1 or next(stop):
            break
        length = next(length for end, length in SEQUENCE_SCHEDULE if share < end)
        dropout.rate = DROPOUT if share >= DROPOUT_FROM else 0.0
        rate = learning_rate(share, progress.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = samples.batch(length)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        (loss + AUX_COEFFICIENT * output.aux_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.steps += 1
        progress.tokens += ids.numel()
        losses = [*losses[-199:], loss.item()]
        progress.train_loss = sum(losses) / len(losses)
        if progress.steps % 100 == 0:
            speed = progress.tokens / (time.monotonic() - began)
            print(
                f"step {progress.steps} ({share:.0%}) loss {progress.train_loss:.3f} "
                f"aux {output.aux_loss.item():.3f} norm {norm:.2f} rate {rate:.2e} "
                f"length {length} {speed:.0f} tokens/s",
                flush=True,
            )
        if progress.steps % 500 == 0:
            progress.validation_loss = validate(model, held_out, args.bf16)
            progress.history.append(
                {"step": progress.steps, "train": progress.train_loss, "validation": progress.validation_loss}
            )
            print(f"step {progress.steps} validation loss {progress.validation_loss:.3f}", flush=True)
        if time.monotonic() - saved_at > 120:
            save_checkpoint()
            saved_at = time.monotonic()
    progress.validation_loss = validate(model, held_out, args.bf16)
    save_checkpoint()
    print(f"done: {progress.steps} steps, validation loss {progress.validation_loss:.3f}", flush=True)


# ------------------------------------------------------------------------------------------ save and sample

STORY_PROMPTS = (
    "It is a truth universally acknowledged, that",
    "Elizabeth",
    "The morning was so fine, that",
    '"My dear Emma," said Mr. Knightley, "',
)
CHAT_PROMPTS = ("Tell me about Mr. Darcy.", "Write a short story about a ball at Netherfield.", "Hello!")


def generate(directory: Path, seed: int = 1) -> list[tuple[str, str, str]]:
    """Sample outputs of a saved model: (kind, prompt, text)."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for kind, prompts in (("story", STORY_PROMPTS), ("chat", CHAT_PROMPTS)):
        for prompt in prompts:
            text = prompt
            if kind == "chat":
                message = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            inputs = tokenizer(text, return_tensors="pt")
            torch.manual_seed(seed)
            with torch.no_grad():
                output = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=100 if kind == "story" else 200,
                    do_sample=True,
                    temperature=0.7,
                    top_p=0.9,
                )[0]
            new = tokenizer.decode(output[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            results.append((kind, prompt, new))
    return results


def stage_sample(directory: Path) -> None:
    for kind, prompt, text in generate(directory):
        print(f"--- {kind}: {prompt}\n{text}\n")


def active_parameters(model: Qwen3MoeForCausalLM) -> tuple[int, int]:
    """All parameters, and those that one token passes through."""
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    return total, total - experts + experts * config.num_experts_per_tok // config.num_experts


def model_card(
    progress: Progress,
    args: argparse.Namespace,
    parameters: tuple[int, int],
    shown: list[tuple[str, str, str]],
) -> str:
    config = model_config()
    total, active = parameters
    outputs = []
    for kind, prompt, text in shown:
        quoted = "\n".join(
            f"> {line}".rstrip() for line in (prompt + text if kind == "story" else text).split("\n")
        )
        heading = f"Prompt `{prompt}`" if kind == "story" else f"Chat, user says `{prompt}`"
        outputs.append(f"{heading}:\n\n{quoted}\n")
    budget = f"--steps {args.steps}" if args.steps else f"--minutes {args.minutes:g}"
    heads = (
        f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value, size {config.head_dim}"
    )
    width = config.moe_intermediate_size
    experts = (
        f"{config.num_experts} per layer, {config.num_experts_per_tok} per token, intermediate size {width}"
    )
    lengths = ", then ".join(str(length) for _, length in SEQUENCE_SCHEDULE)
    positions = f"up to {config.max_position_embeddings} (RoPE, theta 10000); trained on {lengths} tokens"
    losses = [
        f"{loss:.3f} (perplexity {math.exp(loss):.1f})"
        for loss in (progress.train_loss, progress.validation_loss)
    ]
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, demonstration]
---

# lockstep-moe

A very small mixture-of-experts language model that ships with Lockstep, so that the mesh can be tried, tested
and measured anywhere with a real model: real routing, real weights, readable text. It is a
`Qwen3MoeForCausalLM` in the usual hub layout (one tensor per expert and projection) and was trained from
nothing by `examples/train_model.py`.

## Data

The six complete novels of Jane Austen (*Sense and Sensibility*, *Pride and Prejudice*, *Mansfield Park*,
*Emma*, *Northanger Abbey*, *Persuasion*), published between 1811 and 1817 and in the public domain, as plain
text out of the Debian package `{PACKAGE}`. Wrapped lines are joined into paragraphs, chapter headings are
removed. The last {VALIDATION_SHARE:.0%} of each novel is held out for validation.
About {CHAT_SHARE:.0%} of the training rows are conversations made of the same text (a question about a
character, or the opening of a paragraph, answered by the prose that follows), so that the model knows the
chat format and ends its replies.

## Architecture

| | |
|---|---|
| Parameters | {total:,} ({active:,} active per token) |
| Layers | {config.num_hidden_layers}, each with attention and a mixture of experts |
| Hidden size | {config.hidden_size} |
| Attention heads | {heads} |
| Experts | {experts} |
| Vocabulary | {config.vocab_size}, byte-level BPE, tied embeddings |
| Positions | {positions} |
| Weights | bfloat16, safetensors |

## Training

| | |
|---|---|
| Optimizer | AdamW, peak rate {args.lr:g}, weight decay 0.1, warm-up and cosine, gradients clipped at 1.0 |
| Dropout | {DROPOUT:g} from {DROPOUT_FROM:.0%} of the run on |
| Steps | {progress.steps:,} of {TOKENS_PER_STEP} tokens |
| Tokens seen | {progress.tokens:,} |
| Time | {progress.seconds / 60:.0f} minutes on {args.threads} CPU thread{"s" if args.threads > 1 else ""} |
| Final training loss | {losses[0]} |
| Final validation loss | {losses[1]} |

Losses are in nats per token; the training loss is the mean over the last 200 steps, with dropout, the
validation loss is over the held-out text in windows of 512 tokens. The text has about 950,000 tokens, so the
model saw it many times. When the shipped model was made, the validation loss began to rise after some 2,500
steps; the run was stopped at {DROPOUT_FROM:.0%}, and resumed with dropout. So the held-out text has had a
part in that one choice.

To make it again on a Debian machine:

    apt-get update
    python examples/train_model.py {budget} --work /tmp/lockstep-moe --out engine/models/lockstep-moe

With `--minutes` the number of steps depends on the machine; `--steps {progress.steps}` gives the same
amount of training anywhere. The weights will be alike, but not the same bit for bit.

## Sample outputs

At temperature 0.7, top-p 0.9 (the defaults in `generation_config.json`), first try, nothing picked:

{chr(10).join(outputs)}
## Limits

This is a demonstration model of toy size. It knows nothing but Austen's prose: it writes in her manner, with
her characters, and soon loses the thread. It cannot answer questions, follow instructions or say anything
true about the world, and whatever it is asked in the chat format it answers with a passage of prose.

## Licence

The weights and the tokenizer are under the Apache License 2.0. The training text is in the public domain.
"""


def stage_save(work: Path, out: Path, args: argparse.Namespace) -> None:
    """Write the checkpoint as a model directory, check that it reloads, and move it into place."""
    saved = torch.load(work / "checkpoint.pt", weights_only=True)
    progress = Progress(**saved["progress"])
    model = build_model(args.experts)
    model.load_state_dict(saved["model"])
    model.eval()
    for (
        parameter
    ) in model.parameters():  # and not model.to(): that would round the positions' frequencies too
        parameter.data = parameter.data.bfloat16()
    new = out.parent / f".{out.name}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        eos_token_id=[SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)],
        pad_token_id=0,
        bos_token_id=None,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    model.config.dtype = torch.bfloat16
    model.save_pretrained(new)
    config = json.loads((new / "config.json").read_text("utf-8"))
    config["num_experts"] = config["num_local_experts"]  # the name most configurations on the hub use
    (new / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(work / "tokenizer.json", new / "tokenizer.json")
    (new / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(), indent=2) + "\n", encoding="utf-8"
    )

    tokenizer = AutoTokenizer.from_pretrained(new)
    text = load_corpus(work).validation[0][:1500]
    ids = Tokenizer.from_file(str(new / "tokenizer.json")).encode(text).ids
    if tokenizer(text)["input_ids"] != ids or tokenizer.decode(ids) != text:
        raise RuntimeError("the two ways to load the tokenizer do not agree")
    model = model.float()
    again = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).eval()
    batch = torch.tensor([ids])
    with torch.no_grad():
        difference = (model(input_ids=batch).logits - again(input_ids=batch).logits).abs().max().item()
    if difference > 1e-3:
        raise RuntimeError(f"the reloaded model's logits differ by {difference}")
    card = model_card(progress, args, active_parameters(model), generate(new))
    (new / "README.md").write_text(card, encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(new.iterdir()):
        path.chmod(0o644)
        os.replace(path, out / path.name)
    new.rmdir()
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 1e6:.1f} MB, reloaded logits differ by at most {difference:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the small mixture-of-experts model that ships with Lockstep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "stages", nargs="*", metavar="stage", help=f"stages to run, of: {', '.join(STAGES)} (all)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/lockstep-moe"), help="directory for text, checkpoints"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("engine/models/lockstep-moe"), help="model directory to write"
    )
    parser.add_argument("--deb", type=Path, help=f"a {PACKAGE} package that is already here")
    parser.add_argument("--minutes", type=float, default=65, help="time budget of the training")
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps instead of --minutes")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--experts", default="grouped_mm", choices=("eager", "grouped_mm", "batched_mm"))
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 autocast"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    unknown = [stage for stage in args.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    args.work.mkdir(parents=True, exist_ok=True)
    for stage in args.stages or STAGES:
        if stage == "text":
            stage_text(args.work, args.deb.resolve() if args.deb else None)
        elif stage == "tokenizer":
            stage_tokenizer(args.work)
        elif stage == "train":
            stage_train(args.work, args)
        elif stage == "save":
            stage_save(args.work, args.out, args)
        else:
            stage_sample(args.out)


if __name__ == "__main__":
    main()
