"""Steps of whole models by the native kernels and by torch's operators, family by family.

    python examples/benchmarks/kernels/family_speed.py gemma3 olmo2

Models have random weights in bfloat16, hidden size 1,024 and 8 layers. Both compute the same step in turns.
Printed are the median of the ratios, and the milliseconds of the native step.
"""

from __future__ import annotations

import argparse
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
from engine.kernels.cache import NativeCache
from engine.kernels.make import make_program
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from router.tools.bench.report import machine
from tests.engine.native_families import MIXTURES, NATIVE

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
    "global_head_dim": 128,
    "num_global_key_value_heads": 2,
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


def make_config(family: str) -> Any:
    """The family's tiny configuration with larger sizes."""
    tiny = NATIVE[family]().to_dict()
    wanted = (
        SIZES | (OF_EXPERTS if family in MIXTURES else {}) | (OF_LATENTS if "kv_lora_rank" in tiny else {})
    )
    sizes = {name: size for name, size in wanted.items() if tiny.get(name)}
    if tiny.get("mlp_layer_types"):
        sizes["mlp_layer_types"] = ["dense"] + ["sparse"] * (LAYERS - 1)
    if tiny.get("layer_types"):
        sizes["layer_types"] = (tiny["layer_types"] * LAYERS)[:LAYERS]
    if tiny.get("no_rope_layers"):
        sizes["no_rope_layers"] = (tiny["no_rope_layers"] * LAYERS)[:LAYERS]
    return type(NATIVE[family]())(**(tiny | sizes))


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


def measure(family: str, times: int) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(make_config(family), dtype=torch.bfloat16).save_pretrained(directory)
        info, how = read_model_info(Path(directory)), ModelConfig()
        cpu = torch.device("cpu")
        plain, emptied = (load_model(info, how, dtype=torch.bfloat16, device=cpu) for _ in range(2))
    program = make_program(emptied, BLOCK_SIZE)
    if program is None:
        return f"| {family} | torch |"
    steps = (1, 1, BEHIND), (8, 1, BEHIND), (32, 1, BEHIND), (1, PROMPT, 0)
    cells = [compare(plain, program, packed(*step), times) for step in steps]
    return f"| {family} | {' | '.join(cells)} |"


def compare(model: LoadedModel, program: Program, step: PackedRows, times: int) -> str:
    """Ratio of the times of a step, and that of the native one."""
    ids = np.arange(len(step.positions)) % model.vocab_size
    wanted = np.cumsum(step.counts) - 1
    room = {"num_blocks": int(step.block_tables.max()) + 1, "block_size": BLOCK_SIZE, "dtype": model.dtype}
    program.use(NativeCache(program.cached, **room))
    cache = TorchPagedAttention(model.layers, device=model.device, **room)

    def by_torch() -> None:
        model.module(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(step.positions)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(wanted),
            **{PLAN_KEYWORD: cache.plan(step)},
        )

    def by_kernels() -> None:
        program.forward(step, ids, wanted)

    with torch.inference_mode():
        by_torch()
        by_kernels()
        pairs = [(seconds(by_torch), seconds(by_kernels)) for _ in range(times)]
    ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    return f"{ratio:.1f}x ({1e3 * statistics.median(ours for _, ours in pairs):.1f} ms)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=sorted(NATIVE))
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    print(f"{machine()}, {torch.get_num_threads()} threads\n")
    print(f"| family | 1 row | 8 rows | 32 rows | prompt of {PROMPT} |\n|---|---|---|---|---|")
    for family in options.families:
        print(measure(family, options.times), flush=True)


if __name__ == "__main__":
    main()
