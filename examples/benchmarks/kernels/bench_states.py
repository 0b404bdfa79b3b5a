#!/usr/bin/env python3
"""Benchmark of recurrent states: native kernels and torch's adapter in turns.

    python examples/benchmarks/kernels/bench_states.py qwen3_next kimi_linear
    python examples/benchmarks/kernels/bench_states.py --output-json build/states.json --times 5
    python examples/benchmarks/kernels/bench_states.py --show build/states.json

Models have random weights in bfloat16, hidden size 1,024 and 8 layers. Each request has a prompt first; then
decode steps of 1, 8 and 32 requests are timed, and prompts of 512 tokens. Printed are the median of the
ratios, the milliseconds of the native step, and the share of them that reading takes.

Read are the weights of which tokens need all, those experts that so many tokens choose at random, and each
request's states (not its open rows). The limit is a block of as many bytes, read again and again by as many
threads: from a cache that holds it, which is named then, else from memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
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
from engine.model.checkpoint import EXPERTS, read_model_info
from engine.model.weights import LoadedModel, load_model
from engine.states.grid import GRID, boundary_of
from engine.states.held import StateRows
from engine.step import RowPieces
from examples.benchmarks.machine_limits import calibrate
from parallel.machine_rates import best_kind, cache_sizes, probe
from router.tools.bench.report import machine
from tests.families.configs import make_config

HIDDEN, LAYERS, BLOCK_SIZE = 1024, 8, 16
BEHIND = 20
"""Tokens of each request before its decode steps."""
PROMPT = 512
REQUESTS = (1, 8, 32)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_heads": 8,
    "linear_head_dim": 128,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mamba_d_state": 128,
    "ssm_state_size": 128,
    "mamba_n_heads": 32,
    "mamba_num_heads": 32,
    "mamba_d_head": 64,
    "mamba_head_dim": 64,
    "mamba_d_ssm": 2048,
    "chunk_size": 64,
    "mamba_chunk_size": 64,
}
FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "nemotron_h",
    "granitemoehybrid",
)


def config_of(family: str) -> Any:
    """The family's tiny configuration with larger sizes, its layer types repeated."""
    tiny = make_config(family, **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"})
    fields = tiny.to_dict()
    if fields.get("kv_lora_rank"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if fields.get(name):
            fields[name] = ([*fields[name]] * LAYERS)[:LAYERS]
    config: Any = type(tiny)(**(fields | {"num_hidden_layers": LAYERS}))
    return config


class Requests:
    """Running requests of both; they go on token by token."""

    def __init__(self, model: LoadedModel, program: Program, number: int) -> None:
        self.number, self._model, self._program = number, model, program
        self._blocks = -(-(BEHIND + PROMPT) // BLOCK_SIZE)
        room = {"num_blocks": number * self._blocks, "block_size": BLOCK_SIZE, "dtype": model.dtype}
        self._ours = NativeCache(program.cached, **room)
        self._theirs = TorchPagedAttention(model.layers, device=model.device, **room)
        program.use(self._ours)
        program.allocate_states(2 * number, 0)
        assert model.states is not None
        model.states.allocate(2 * number, 0)

    def packed(self, start: int, count: int) -> PackedRows:
        """Rows of all requests, of ``count`` tokens from ``start`` on."""
        tables = np.arange(self.number * self._blocks, dtype=np.int32).reshape(self.number, -1)
        positions = np.tile(np.arange(start, start + count), self.number)
        starts, counts = np.full(self.number, start), np.full(self.number, count)
        return PackedRows(starts, counts, tables, positions, self.number if count == 1 else 0)

    def by_kernels(self, start: int, count: int) -> float:
        """Seconds of a step of the kernels."""
        step, ids, wanted = self._step(start, count)
        with self._program.alone([(row, start, count) for row in range(self.number)]):
            return seconds(lambda: self._program.forward(step, ids, wanted))

    def by_torch(self, start: int, count: int) -> float:
        """Seconds of a step of the modules' own code, on its grid."""
        step, ids, wanted = self._step(start, count)
        with self._states_of_torch(start, count):
            return seconds(
                lambda: self._model.module(
                    input_ids=torch.from_numpy(ids)[None],
                    position_ids=torch.from_numpy(step.positions)[None],
                    use_cache=False,
                    logits_to_keep=torch.from_numpy(wanted),
                    **{PLAN_KEYWORD: self._theirs.plan(step)},
                )
            )

    def _step(self, start: int, count: int) -> tuple[PackedRows, Any, Any]:
        step = self.packed(start, count)
        return step, step.positions % self._model.vocab_size, np.cumsum(step.counts) - 1

    def _states_of_torch(self, start: int, count: int) -> AbstractContextManager[None]:
        states, last = self._model.states, boundary_of(start + count)
        assert states is not None
        if start == 0:
            states.running.clear()
        fills = {last: last // GRID % 2} if last > boundary_of(start) else {}
        pieces = {
            row: RowPieces(fills={position: [2 * row + half] for position, half in fills.items()})
            for row in range(self.number)
        }
        rows = list(range(self.number))
        return states.step(StateRows(rows, [start] * self.number, [count] * self.number, pieces))


def seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measure(family: str, times: int) -> dict[str, Any]:
    """Milliseconds of steps by both, with bytes read; nothing without native kernels."""
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16).save_pretrained(directory)
        info, how = read_model_info(Path(directory)), ModelConfig()
        cpu = torch.device("cpu")
        model, emptied = (load_model(info, how, dtype=torch.bfloat16, device=cpu) for _ in range(2))
    program = make_program(emptied, BLOCK_SIZE)
    if program is None or model.states is None:
        return {}
    reading = probe(best_kind())
    assert reading is not None, "the kernels were compiled"
    found: dict[str, Any] = {"steps": {}, "read_bytes": {}, "read_ms": {}}
    with torch.inference_mode():
        for number in REQUESTS:
            requests = Requests(model, program, number)
            requests.by_torch(0, BEHIND), requests.by_kernels(0, BEHIND)
            pairs = [
                (requests.by_torch(BEHIND + place, 1), requests.by_kernels(BEHIND + place, 1))
                for place in range(times)
            ]
            name = f"{number} requests"
            found["steps"][name] = in_milliseconds(pairs)
            num_bytes = found["read_bytes"][name] = read_bytes(model, program, number)
            rate = reading.reading(torch.get_num_threads(), num_bytes, times)
            found["read_ms"][name] = round(1e3 * num_bytes / rate, 3)
        requests = Requests(model, program, 1)
        pairs = [(requests.by_torch(0, PROMPT), requests.by_kernels(0, PROMPT)) for _ in range(min(times, 5))]
        found["steps"][f"prompt of {PROMPT}"] = in_milliseconds(pairs)
    return found


def read_bytes(model: LoadedModel, program: Program, number: int) -> int:
    """Bytes that a decode step must read: weights that it uses, and states."""
    module, config = model.module, model.module.config.get_text_config()
    sizes = {name: each.numel() * each.element_size() for name, each in module.named_parameters()}
    chosen = float(sum(size for name, size in sizes.items() if ".experts." in name))
    others = sum(sizes.values()) - chosen
    if not config.tie_word_embeddings:  # of the table of tokens, a step reads a row for each
        table = module.get_input_embeddings().weight
        others -= table.numel() * table.element_size()
    if chosen:
        experts = next(int(getattr(config, name)) for name in EXPERTS if getattr(config, name, None))
        chosen *= 1 - (1 - model.experts_per_token / experts) ** number
    kept = program.weight_bytes / (program.weight_bytes + program.saved_bytes)
    states = 0 if program.states is None else number * program.states.kind.num_bytes
    return int(kept * (others + chosen)) + states


def in_milliseconds(pairs: list[tuple[float, float]]) -> dict[str, list[float]]:
    return {
        name: [round(1e3 * each, 3) for each in own]
        for name, own in zip(("torch", "native"), zip(*pairs, strict=True), strict=True)
    }


def in_words(name: str, page: dict[str, Any], family: dict[str, Any]) -> str:
    """Ratio of both times, the native time, and the share of it that reading takes."""
    cell = family["steps"][name]
    ratio = statistics.median(theirs / ours for theirs, ours in zip(*cell.values(), strict=True))
    median = statistics.median(cell["native"])
    words = f"{ratio:.1f}x ({median:.1f} ms"
    if name in family.get("read_ms", {}):
        holds = [level for level, size in page["caches"].items() if size >= family["read_bytes"][name]]
        words += f", {100 * family['read_ms'][name] / median:.0f} % of the rate of {(*holds, 'memory')[0]}"
    return f"{words})"


def show(page: dict[str, Any]) -> None:
    """Print the table of all that was measured."""
    print(f"{page['machine']}, {page['threads']} threads, {page['limits']['read_gb_per_s']} GB/s\n")
    names = [*(f"{number} requests" for number in REQUESTS), f"prompt of {PROMPT}"]
    print(f"| family | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for family, found in page["families"].items():
        cells = [in_words(name, page, found) for name in names] if found else ["torch"]
        print(f"| {family} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("families", nargs="*", choices=[*FAMILIES, []], help="(default: all)")
    add("--times", type=int, default=17, help="decode steps of each kind (default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write the measurements here, too")
    add("--show", type=Path, metavar="FILE", help="measure nothing: the table of such a file")
    args = parser.parse_args()
    if args.show is not None:
        show(json.loads(args.show.read_text()))
        return
    page: dict[str, Any] = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "limits": calibrate(),
        "caches": cache_sizes(),
        "families": {},
    }
    for family in args.families or FAMILIES:
        page["families"][family] = measure(family, args.times)
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            args.output_json.write_text(json.dumps(page, indent=1) + "\n")
    show(page)


if __name__ == "__main__":
    main()
