#!/usr/bin/env python3
"""Steps of whole models by the native kernels and by torch's operators, family by family.

    python examples/benchmarks/kernels/family_speed.py gemma3 olmo2
    python examples/benchmarks/kernels/family_speed.py --output-json build/family-speed.json --seconds 300
    python examples/benchmarks/kernels/family_speed.py --show build/family-speed.json

Models have random weights in bfloat16, hidden size 1,024 and 8 layers. Both compute the same step in turns.
Printed are the median of the ratios, and the milliseconds of the native step.

With ``--output-json`` families that the file has are not measured again, and none is begun after
``--seconds``: the same command, again and again, measures all of them in slices. The table is that of the
whole file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3]))

from engine.attention.base import PLAN_KEYWORD, PackedRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.make import make_program
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from router.tools.bench.report import machine
from tests.engine.native_families import ASKED, MIXTURES, NATIVE

HIDDEN, LAYERS, CONTEXT, BLOCK_SIZE = 1024, 8, 4096, 16
BEHIND = 256
"""Positions before each row of a decode step."""
PROMPT = 2000
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": CONTEXT,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 16,
    "n_positions": CONTEXT,
    "sliding_window": 1024,
    "rotary_dim": 32,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 32_000,
}
OF_EXPERTS = {
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "shared_intermediate_size": 512,
}
"""Widths of mixtures, which have eight experts."""
OF_LATENTS = {
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 704,
}
"""Sizes of latent attention: DeepSeek's."""
TINY_HEAD = 16
"""Width of a head of tiny models with a factor for each pair."""
OF_TWO_KINDS = {"global_head_dim": 128, "num_global_key_value_heads": 2}
"""Sizes of models with heads of two sizes."""


def make_config(family: str) -> Any:
    """The family's tiny configuration with larger sizes."""
    tiny = NATIVE[family]().to_dict()
    wanted = (
        SIZES | (OF_EXPERTS if family in MIXTURES else {}) | (OF_LATENTS if "kv_lora_rank" in tiny else {})
    )
    sizes: dict[str, Any] = {name: size for name, size in wanted.items() if tiny.get(name)}
    if tiny.get("mlp_layer_types"):
        sizes["mlp_layer_types"] = ["dense"] + ["sparse"] * (LAYERS - 1)
    if tiny.get("layer_types"):
        sizes["layer_types"] = (tiny["layer_types"] * LAYERS)[:LAYERS]
    if tiny.get("no_rope_layers"):
        sizes["no_rope_layers"] = (tiny["no_rope_layers"] * LAYERS)[:LAYERS]
    if tiny.pop("per_layer_config", None):
        sizes |= OF_TWO_KINDS
    rope, times = tiny.get("rope_parameters") or {}, SIZES["head_dim"] // TINY_HEAD
    rope |= {name: rope[name] * times for name in ("short_factor", "long_factor") if name in rope}
    return type(NATIVE[family]())(**(tiny | sizes))


def soften(model: Any) -> None:
    """Make queries behind a norm small, where scores have no other factor (Gemma 4).

    With random weights such scores are large, and what comes of them is mostly rounding.
    """
    for name, weight in model.named_parameters():
        if "q_norm" in name and model.config.model_type.startswith("gemma4"):
            weight.data *= 0.1


def packed(rows: int, count: int, start: int) -> PackedRows:
    """Rows of ``count`` tokens from ``start`` on, each with blocks of its own."""
    blocks = -(-(start + count) // BLOCK_SIZE)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    positions = np.tile(np.arange(start, start + count), rows)
    single = rows if count == 1 else 0
    return PackedRows(np.full(rows, start), np.full(rows, count), tables, positions, single)


def seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


Cell = dict[str, list[float]]
"""Milliseconds of a step, by who computes it."""
STEPS = {
    "1 row": (1, 1, BEHIND),
    "8 rows": (8, 1, BEHIND),
    "32 rows": (32, 1, BEHIND),
    f"prompt of {PROMPT}": (1, PROMPT, 0),
}
"""Rows, tokens of each, and positions before them."""


def measure(family: str, times: int) -> dict[str, Cell]:
    """Times of all steps; nothing if torch computes the family."""
    with tempfile.TemporaryDirectory() as directory:
        made = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.bfloat16)
        soften(made)
        made.save_pretrained(directory)
        info, how = read_model_info(Path(directory)), ModelConfig()
        cpu = torch.device("cpu")
        plain, emptied = (load_model(info, how, dtype=torch.bfloat16, device=cpu) for _ in range(2))
    program = make_program(emptied, BLOCK_SIZE)
    if program is None:
        return {}
    return {name: compare(plain, program, packed(*step), times) for name, step in STEPS.items()}


def compare(model: LoadedModel, program: Program, step: PackedRows, times: int) -> Cell:
    """Milliseconds of a step by both."""
    ids = np.arange(len(step.positions)) % model.vocab_size
    wanted = np.cumsum(step.counts) - 1
    room = {"num_blocks": int(step.block_tables.max()) + 1, "block_size": BLOCK_SIZE, "dtype": model.dtype}
    ours = NativeCache(program.cached, **room)
    theirs = TorchPagedAttention(model.layers, device=model.device, **room)
    for stored in (*ours.stored, *theirs.stored):
        stored.fill_(0.5)  # memory that nobody has written is one page of zeros
    program.use(ours)

    def by_torch() -> None:
        model.module(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(step.positions)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(wanted),
            **{PLAN_KEYWORD: theirs.plan(step)},
        )

    def by_kernels() -> None:
        program.forward(step, ids, wanted)

    with torch.inference_mode():
        by_torch()
        by_kernels()
        pairs = [(seconds(by_torch), seconds(by_kernels)) for _ in range(times)]
    return {
        "torch": [round(1e3 * pair[0], 3) for pair in pairs],
        "native": [round(1e3 * pair[1], 3) for pair in pairs],
    }


def in_words(cell: Cell) -> str:
    """Ratio of the times of a step, and that of the native one."""
    ratio = statistics.median(theirs / ours for theirs, ours in zip(*cell.values(), strict=True))
    return f"{ratio:.1f}x ({statistics.median(cell['native']):.1f} ms)"


def show(page: dict[str, Any]) -> None:
    """Print the table of all that was measured."""
    print(f"{page['machine']}, {page['threads']} threads\n")
    print(f"| family | {' | '.join(STEPS)} |\n|---|{'---|' * len(STEPS)}")
    for family, cells in sorted(page["families"].items()):
        print(f"| {family} | {' | '.join(map(in_words, cells.values())) or 'torch'} |")


def here() -> dict[str, Any]:
    """A page without any family, and where it comes from."""
    return {"machine": machine(), "threads": torch.get_num_threads(), "families": {}}


def begun(file: Path | None) -> dict[str, Any]:
    """What a file has, to go on with.

    Raises:
        SystemExit: it was measured elsewhere.
    """
    if file is None or not file.exists():
        return here()
    page: dict[str, Any] = json.loads(file.read_text())
    if any(page[name] != value for name, value in here().items() if name != "families"):
        raise SystemExit(f"{file} is of another machine, or of other threads: write to another file")
    return page


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("families", nargs="*", choices=[*sorted(NATIVE), []], help="(default: those that people serve)")
    add("--times", type=int, default=5, help="of each step (default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="go on with this file, after each family")
    add("--seconds", type=float, default=float("inf"), help="begin no family later (default: all)")
    add("--show", type=Path, metavar="FILE", help="measure nothing: the table of such a file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.show is not None:
        show(json.loads(args.show.read_text()))
        return
    page, end = begun(args.output_json), time.monotonic() + args.seconds
    wanted = [family for family in args.families or ASKED if family not in page["families"]]
    for family in wanted:
        if time.monotonic() >= end:
            break
        page["families"][family] = measure(family, args.times)
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            args.output_json.write_text(json.dumps(page, indent=1) + "\n")
    show(page)
    left = [family for family in wanted if family not in page["families"]]
    if left:
        print(f"\n{len(left)} are left for the next time: {' '.join(left)}")


if __name__ == "__main__":
    main()
