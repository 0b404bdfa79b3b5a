#!/usr/bin/env python3
"""Generate with several instances, on one node or over several.

Each node prints its share of the prompts.

One node:

    python examples/data_parallel.py --dp-size 2

Two nodes, in any order (here two terminals of one machine; else --master-addr is an address of node 0):

    python examples/data_parallel.py --dp-size 2 --node-size 2 --node-rank 0 --master-port 29550
    python examples/data_parallel.py --dp-size 2 --node-size 2 --node-rank 1 --master-port 29550

All nodes together print what one node prints: every prompt has its own seed, and any instance may generate
for any node.
"""

from __future__ import annotations

import argparse
import sys

from lockstep import LLM, SamplingParams

OPENINGS = [
    "It is a truth universally acknowledged, that",
    "Elizabeth",
    "Mr. Darcy",
    "The ball at Netherfield",
    "My dear sister",
    "Lady Catherine",
    "The happiness of",
    "In the evening",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="lockstep-moe", help="directory or repository id (default: %(default)s)"
    )
    parser.add_argument("--dp-size", type=int, default=2, help="instances in all (default: %(default)s)")
    parser.add_argument("--tp-size", type=int, default=1, help="shards of an instance (default: %(default)s)")
    parser.add_argument("--node-size", type=int, default=1, help="nodes in all (default: %(default)s)")
    parser.add_argument("--node-rank", type=int, default=0, help="this node, from 0 (default: %(default)s)")
    parser.add_argument("--master-addr", default="127.0.0.1", help="address of node 0 (default: %(default)s)")
    parser.add_argument("--master-port", type=int, default=29550, help="a port there (default: %(default)s)")
    parser.add_argument(
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        help="spread experts over instances (default: as serve does)",
    )
    parser.add_argument("--num-prompts", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, help="context in tokens; unset: the model's")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="in float32 outputs do not depend on how prompts meet in batches; auto: the model's own "
        "(default: %(default)s)",
    )
    parser.add_argument("--insecure-mesh", action="store_true", help="allow other addresses than loopback")
    args = parser.parse_args()
    if args.node_size < 1 or args.dp_size < 1 or args.dp_size % args.node_size:
        parser.error(f"--dp-size {args.dp_size} must be a multiple of --node-size {args.node_size}")
    if not 0 <= args.node_rank < args.node_size:
        parser.error(f"--node-rank must be 0 to {args.node_size - 1}, not {args.node_rank}")
    return args


def placement(args: argparse.Namespace) -> dict[str, object]:
    """Instances that this node starts, and the coordinator's address.

    Node 0 starts the coordinator.
    """
    if args.node_size == 1:
        return {"data_parallel_size": args.dp_size}
    here = args.dp_size // args.node_size
    return {
        "data_parallel_size": args.dp_size,
        "data_parallel_size_local": here,
        "data_parallel_start_rank": args.node_rank * here,
        "data_parallel_address": args.master_addr,
        "data_parallel_rpc_port": args.master_port,
        "headless": args.node_rank > 0,
        "insecure_mesh": args.insecure_mesh,
    }


def main() -> None:
    args = parse_args()
    first, end = (args.num_prompts * rank // args.node_size for rank in (args.node_rank, args.node_rank + 1))
    mine = range(first, end)
    prompts = [OPENINGS[index % len(OPENINGS)] for index in mine]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=index, max_tokens=(16, 20)[index % 2])
        for index in mine
    ]
    with LLM(
        args.model,
        tensor_parallel_size=args.tp_size,
        enable_expert_parallel=args.enable_expert_parallel,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        log_level="warning",
        **placement(args),
    ) as llm:
        print(f"node {args.node_rank} of {args.node_size} has {len(prompts)} prompts", file=sys.stderr)
        outputs = llm.generate(prompts, params)
        for index, output in zip(mine, outputs, strict=True):
            text = output.outputs[0].text
            print(f"{index}: Prompt: {output.prompt!r}, Generated text: {text!r}", flush=True)


main()
