#!/usr/bin/env python3
"""Embeddings per second against transformers and sentence-transformers, in one run.

    python examples/benchmarks/pooled/bench_pooled.py --realtime
    python examples/benchmarks/pooled/bench_pooled.py --models bge-base --layers 6 --batches 1 32

Models have the shapes of known ones and random weights. Texts are made-up words, about 40 tokens each, from
4 to 512. Each contender gets the same texts, turns them into tokens, and gives normalised vectors in float32;
all compute in this process, on --threads threads, in turn. The best of --rounds counts. transformers
(attention sdpa) and sentence-transformers compute batches of 32 texts of similar length, as the latter does
by itself. It is left out where it is not installed; --site names a folder that has it. --peers names a folder
of examples/benchmarks/install_peers.sh: vLLM and llama.cpp, where they are there, compute BERTs beside, each
in a process of its own that gets token ids.
--realtime: measure with real-time priority on the last core, for a busy machine; needs the right to.
"""

from __future__ import annotations

import argparse
import atexit
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from coordinator.pooled_model import PoolingTask
from engine.config.pooling import PoolingConfig
from engine.model.checkpoint import read_model_info
from engine.pooling.detection import as_pooling, find_pooling
from engine.pooling.pooling_model import PooledInput, PoolingModel
from engine.pooling_params import PoolingParams
from tests.engine.pooling.shapes import add_sentence_files

Contender = Callable[[list[str]], Any]

BERT = {"max_position_embeddings": 512, "vocab_size": 30522, "num_hidden_layers": 12}
SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
QWEN3 = {
    "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 32768,
    "pad_token_id": 0,
}  # fmt: skip
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bge-small": ("bert", "cls", BERT | SMALL),
    "bge-base": ("bert", "cls", BERT | BASE),
    "qwen3-embedding-0.6b": ("qwen3", "last", QWEN3),
}
"""Model type, pooling and settings of each shape; the last one's vocabulary is smaller."""
PADDED = 32
"""Texts that are padded to one length by the contenders that pad."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="layers of each model (default: all)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--median", type=float, default=32, help="median of the texts' tokens")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--peers", type=Path, nargs="+", default=[], help="folders with vllm, llama.cpp")
    parser.add_argument("--site", type=Path, help="folder with sentence-transformers")
    args = parser.parse_args()
    if args.site:
        sys.path.append(str(args.site))
    torch.set_num_threads(args.threads)
    print(
        f"{_cpu()}, {args.threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    print("texts/s                      batch   tokens  " + "  ".join(f"{name:>22}" for name in NAMES))
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            directory = make_model(Path(folder), name, args.layers)
            contenders = {each: made(directory, SHAPES[name][1]) for each, made in MAKERS.items()}
            if SHAPES[name][0] == "bert":
                contenders |= with_peers(directory, args.peers, args.threads)
            for batch in args.batches:
                texts = texts_of(batch, args.median)
                print_row(name, batch, texts, measured(contenders, texts, args))


def make_model(directory: Path, name: str, layers: int | None) -> Path:
    """Write a checkpoint with a tokenizer and the files of sentence-transformers."""
    kind, pooling, settings = SHAPES[name]
    config = transformers.AutoConfig.for_model(
        kind, **settings | ({"num_hidden_layers": layers} if layers else {})
    )
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(directory)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words |= {f"w{number}": number for number in range(len(words), settings["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    side = "left" if pooling == "last" else "right"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        padding_side=side,
        model_max_length=512,
    ).save_pretrained(directory)
    add_sentence_files(directory, pooling, normalizes=True, dimensions=settings["hidden_size"])
    return directory


def texts_of(count: int, median: float) -> list[str]:
    """Texts of made-up words, with lengths as those of questions and paragraphs."""
    draw = np.random.default_rng(count)
    lengths = np.clip(np.exp(draw.normal(np.log(median), 0.8, count)), 4, 512).astype(int) - 2
    return [" ".join(f"w{word}" for word in draw.integers(4, 30522, length)) for length in lengths]


def lockstep(directory: Path, pooling: str) -> Contender:
    info = as_pooling(read_model_info(directory), find_pooling(directory, PoolingConfig()))
    model = PoolingModel(info, torch.float32)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    params = PoolingParams(PoolingTask.EMBED)
    print(f"    lockstep: {model.way}", file=sys.stderr)

    def run(texts: list[str]) -> Any:
        found = tokenizer.encode_batch_fast(texts)
        return np.stack(model.answers([PooledInput(each.ids, params) for each in found]))

    return run


def with_transformers(directory: Path, pooling: str) -> Contender:
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def run(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        vectors = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)
        for begin in range(0, len(texts), PADDED):
            some = order[begin : begin + PADDED]
            given = tokenizer([texts[each] for each in some], padding=True, return_tensors="pt")
            given.pop("token_type_ids", None)
            with torch.inference_mode():
                states = model(**given).last_hidden_state
                rows = states[:, -1] if pooling == "last" else states[:, 0]
                vectors[some] = torch.nn.functional.normalize(rows, dim=-1).numpy()
        return vectors

    return run


def sentence_transformers(directory: Path, pooling: str) -> Contender | None:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        print(f"    sentence-transformers: {error}", file=sys.stderr)
        return None
    model = SentenceTransformer(str(directory), device="cpu")
    return lambda texts: model.encode(texts, batch_size=PADDED, show_progress_bar=False)


MAKERS: dict[str, Callable[[Path, str], Contender | None]] = {
    "lockstep": lockstep,
    "transformers sdpa": with_transformers,
    "sentence-transformers": sentence_transformers,
}
PEERS = ("vllm", "llama.cpp")
NAMES = [*MAKERS, *PEERS]


def with_peers(directory: Path, folders: list[Path], threads: int) -> dict[str, Contender]:
    """Contenders with a process of their own, of those that are installed."""
    found = [(name, folder / name / "bin" / "python") for name in PEERS for folder in folders]
    return {name: in_process(name, python, directory, threads) for name, python in found if python.exists()}


def in_process(name: str, python: Path, directory: Path, threads: int) -> Contender:
    script = Path(__file__).with_name("peer_embedder.py")
    process = subprocess.Popen(
        [str(python), str(script), name, str(directory), str(threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    atexit.register(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if process.stdout.readline() != "ready\n":
        sys.exit(f"{name} did not start: run {' '.join(map(str, process.args))}")  # type: ignore[arg-type]

    def run(texts: list[str]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        ids = [each.ids for each in tokenizer.encode_batch_fast(texts)]
        process.stdin.write(json.dumps(ids) + "\n")
        process.stdin.flush()
        vectors = np.frombuffer(base64.b64decode(process.stdout.readline()), np.float32)
        return vectors.reshape(len(texts), -1)

    return run


def measured(
    contenders: dict[str, Contender | None], texts: list[str], args: argparse.Namespace
) -> dict[str, float]:
    """Texts per second of each contender, whose vectors are the same."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    wanted = None
    for turn in range(args.rounds + 1):
        for name, run in contenders.items():
            if run is None or (turn == 0 and len(texts) > PADDED):  # long enough to need no first round
                continue
            with _priority(args.realtime):
                began = time.perf_counter()
                found = run(texts)
                times[name].append(time.perf_counter() - began)
            wanted = found if wanted is None else wanted
            assert (np.einsum("id,id->i", found, wanted) > 1 - 1e-4).all(), f"{name} has other vectors"
    return {name: len(texts) / min(each) for name, each in times.items() if each}


def print_row(name: str, batch: int, texts: list[str], found: dict[str, float]) -> None:
    best = max((each for other, each in found.items() if other != "lockstep"), default=float("nan"))
    tokens = sum(len(text.split()) + 2 for text in texts)
    cells = "  ".join(f"{found[each]:>22.2f}" if each in found else f"{'-':>22}" for each in NAMES)
    print(f"{name:<26} {batch:>7} {tokens:>8}  {cells}  {found['lockstep'] / best:.2f}x", flush=True)


@contextlib.contextmanager
def _priority(is_realtime: bool) -> Iterator[None]:
    """Real-time priority on the last core, if asked for."""
    if not is_realtime:
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-torch.get_num_threads() :])
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return f"{name} ({'AVX-512' if 'avx512f' in flags else 'AVX2' if 'avx2' in flags else 'no AVX2'})"


if __name__ == "__main__":
    main()
