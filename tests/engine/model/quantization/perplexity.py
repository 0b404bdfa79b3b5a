"""``python -m tests.engine.model.quantization.perplexity``: the shipped model in all formats, on held-out text.

Each format is written by its own library, or in numpy from its document. The model that is served is compared with
the weights that the library widens it to, run by torch in float32 (:mod:`reference`). The text is that of the
training's validation: ``python examples/training/train_model.py text --work DIRECTORY``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.config import SHIPPED_MODEL
from engine.config.quantization import OnlineName
from engine.model.finding import MODELS_DIRECTORY
from examples.benchmarks.bench_lockstep import print_table
from examples.training.corpus import load_corpus
from examples.training.held_out_loss import WINDOW, loss_of, windows
from tests.engine.model.gguf.writer import letters, write_gguf
from tests.engine.model.quantization import reference, writers
from tests.engine.model.quantization.writers import Layout, compressed, compressed_with, write_copies

SHIPPED = MODELS_DIRECTORY / SHIPPED_MODEL
GROUP = 64
"""Inputs that share a scale: they divide the 192 of the shipped model."""
CALIBRATION = 8
"""Windows of the training's text that static scales of activations are found on."""
WIDE = 256
"""Width of the padded model: rows of whole blocks of GGUF's K types."""
EVERY_TOKEN = QuantizationArgs(num_bits=8, type="int", strategy="tensor", dynamic=False)

LIMIT = 0.01
"""Largest part by which a perplexity may differ from the library's."""

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Written:
    """A format's two sides."""

    served: str
    """What is served."""
    widened: Path
    """Its weights, widened by the library."""
    inputs: reference.Inputs | None = None
    """How the library rounds activations."""
    online: OnlineName | None = None
    """``--quantization``."""


@dataclass(frozen=True)
class Work:
    """What formats are written from."""

    directory: Path
    """Empty, for one format."""
    training: Windows
    """Text that the model was trained on."""


Write = Callable[[Work], Written]


def _static_scales(training: Windows) -> dict[str, torch.Tensor]:
    """Scales of the inputs of each matrix.

    An expert that no token chose has the largest.
    """
    largest = reference.largest_inputs(SHIPPED, training)
    scales = {}
    for name in load_file(SHIPPED / "model.safetensors"):
        if writers.LINEAR.search(name):
            owner = name.removesuffix(".weight")
            found = largest.get(owner.replace("gate_proj", "up_proj"), max(largest.values()))
            scales[owner] = torch.tensor([found / 127])
    return scales


def _of_layout(layout: Callable[[], Layout], inputs: QuantizationArgs | None = None) -> Write:
    """A checkpoint in this layout; ``inputs``: how activations are rounded."""

    def write(work: Work) -> Written:
        quantized, wide = work.directory / "quantized", work.directory / "wide"
        scales: dict[str, torch.Tensor] = {}
        if inputs is not None and not inputs.dynamic:
            scales = _static_scales(work.training[:CALIBRATION])
        write_copies(
            SHIPPED,
            layout(),
            quantized,
            wide,
            lambda name: {"input_scale": scales[name]} if name in scales else {},
        )
        rounded = None if inputs is None else reference.rounded_by_library(inputs, scales)
        return Written(str(quantized), wide, rounded)

    return write


def _online(name: OnlineName, layout: Callable[[], Layout], inputs: QuantizationArgs | None = None) -> Write:
    """The shipped checkpoint with ``--quantization``, beside the library's layout of the same kind."""

    def write(work: Work) -> Written:
        library = _of_layout(layout, inputs)(work)
        return Written(str(SHIPPED), library.widened, library.inputs, name)

    return write


def _gguf(kind: str) -> Write:
    def write(work: Work) -> Written:
        source = SHIPPED
        if kind.endswith("_K"):
            source = work.directory / "padded"
            write_padded(source)
        file, wide = work.directory / "model.gguf", work.directory / "wide"
        write_gguf(source, file, kind, wide, lambda writer: letters(writer, 4096), is_random=False)
        return Written(str(file), wide)

    return write


def _plain(work: Work) -> Written:
    return Written(str(SHIPPED), SHIPPED)


def _channel(form: str, kind: str = "int", *, activations: bool = False) -> Callable[[], Layout]:
    return lambda: compressed(form, activations, num_bits=8, type=kind, strategy="channel", symmetric=True)


def _groups(bits: int, size: int, *, symmetric: bool = True) -> Callable[[], Layout]:
    return lambda: compressed(
        "pack-quantized", num_bits=bits, strategy="group", group_size=size, symmetric=symmetric
    )


def _blocks() -> Layout:
    return compressed(
        "float-quantized", True, num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    )


FORMATS: dict[str, Write] = {
    "bfloat16": _plain,
    "compressed-tensors W8A8, a scale for a token": _of_layout(
        _channel("int-quantized", activations=True), writers.each_token("int")
    ),
    "compressed-tensors W8A8, one scale for all": _of_layout(
        lambda: compressed_with(
            "int-quantized",
            EVERY_TOKEN,
            QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True),
        ),
        EVERY_TOKEN,
    ),
    "compressed-tensors W8A16": _of_layout(_channel("int-quantized")),
    "compressed-tensors W8A16, groups of 64": _of_layout(_groups(8, GROUP)),
    "compressed-tensors W4A16, groups of 32": _of_layout(_groups(4, 32)),
    "compressed-tensors W4A16, groups of 64": _of_layout(_groups(4, GROUP)),
    "compressed-tensors W4A16, zero points": _of_layout(_groups(4, GROUP, symmetric=False)),
    "compressed-tensors W4A16, another order": _of_layout(lambda: writers.in_another_order(GROUP)),
    "compressed-tensors fp8": _of_layout(
        _channel("float-quantized", "float", activations=True), writers.each_token("float")
    ),
    "compressed-tensors fp8 in blocks": _of_layout(_blocks, writers.each_token("float")),
    "fp8 of DeepSeek, blocks of 128": _of_layout(lambda: writers.fp8_blocks(128)),
    "fp8, one scale for a matrix": _of_layout(writers.fp8_tensor),
    "gptq": _of_layout(lambda: writers.gptq(4, GROUP)),
    "gptq, another order": _of_layout(lambda: writers.gptq(4, GROUP, ordered=True)),
    "gptq of 8 bits": _of_layout(lambda: writers.gptq(8, GROUP, version="gptq_v2")),
    "awq": _of_layout(lambda: writers.awq(GROUP)),
    **{
        f"gguf {kind}": _gguf(kind)
        for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
    },
    "--quantization int8_per_channel_weight_only": _online(
        "int8_per_channel_weight_only", _channel("int-quantized")
    ),
    "--quantization int8": _online(
        "int8", _channel("int-quantized", activations=True), writers.each_token("int")
    ),
    "--quantization int4": _online("int4", _groups(4, GROUP)),
    "--quantization fp8_per_channel": _online("fp8_per_channel", _channel("float-quantized", "float")),
    "--quantization fp8_per_block": _online("fp8_per_block", lambda: writers.fp8_blocks(128)),
}
"""How each format is written, by what it is called in the table."""


def write_padded(target: Path) -> None:
    """The shipped model with rows of 256 instead of 192, which computes the same.

    Zeros fill it up. Each KV group has a head more, and the stream 64 numbers more. Norms divide by the root of the mean of
    256 instead of 192 squares, so their weights and epsilon are smaller.
    """
    config = json.loads((SHIPPED / "config.json").read_text())
    hidden, part = config["hidden_size"], config["hidden_size"] / WIDE
    size, groups = config["head_dim"], config["num_key_value_heads"]

    def with_heads(rows: torch.Tensor) -> torch.Tensor:
        split = rows.unflatten(0, (groups, -1))
        return F.pad(split, (0, 0, 0, (WIDE - hidden) // groups)).flatten(0, 1)

    tensors = {}
    for name, tensor in load_file(SHIPPED / "model.safetensors").items():
        padded, last = tensor.float(), name.split(".")[-2]
        if last == "q_proj":
            padded = with_heads(padded)
        elif last == "o_proj":
            padded = with_heads(padded.T).T
        elif last.endswith("layernorm") or last == "norm":
            padded = padded * part**0.5
        missing = [(WIDE - each) if each == hidden else 0 for each in padded.shape]
        tensors[name] = F.pad(padded, [n for each in reversed(missing) for n in (0, each)]).contiguous()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    changes = {
        "hidden_size": WIDE,
        "num_attention_heads": WIDE // size,
        "moe_intermediate_size": WIDE,
        "rms_norm_eps": config["rms_norm_eps"] * part,
    }
    (target / "config.json").write_text(json.dumps(config | changes))


@dataclass(frozen=True)
class Result:
    """Losses in nats per token."""

    served: float
    by_library: float

    @property
    def change(self) -> float:
        """How far the served perplexity is above the library's, as a part of it."""
        return math.exp(self.served - self.by_library) - 1


def measure(name: str, work: Work, text: Windows) -> Result:
    """Losses of a format on this text."""
    written = FORMATS[name](work)
    expected = reference.loss_by_torch(written.widened, text, written.inputs)
    served = loss_of(written.served, "auto", "auto", [list(each) for each in text], written.online)
    return Result(served, expected)


def training_windows(text: Path) -> Windows:
    """The first of the text that the model was trained on."""
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    chapters = ["\n\n".join(each) for each in load_corpus(text).chapters[:CALIBRATION]]
    ids = tokenizer.encode("\n\n".join(chapters)).ids
    return [ids[at : at + WINDOW + 1] for at in range(0, len(ids) - WINDOW, WINDOW)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/lockstep-moe"), help="where the text is")
    parser.add_argument("--formats", default="", help="only those with this in their names")
    parser.add_argument("--windows", type=int, default=0, help="only so many of the text (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more of them than cores that are free take many times as long
    text, training = windows(args.work), training_windows(args.work)
    text = text[: args.windows or len(text)]
    lines, worst = [], 0.0
    for name in (each for each in FORMATS if args.formats in each):
        with tempfile.TemporaryDirectory() as directory:
            found = measure(name, Work(Path(directory), training), text)
        worst = max(worst, abs(found.change))
        perplexities = [f"{math.exp(each):.3f}" for each in (found.served, found.by_library)]
        lines.append([name, *perplexities, f"{100 * found.change:+.3f} %"])
        print(*lines[-1], sep="  ", flush=True)
    print(f"{len(text)} windows of {WINDOW} tokens")
    print_table(["format", "served", "by the library", "difference"], lines)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
