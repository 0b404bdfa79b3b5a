#!/usr/bin/env python3
"""Benchmark of an instance's CPU time per step, with a model that computes nothing.

    python examples/benchmarks/bench_overhead.py
    python examples/benchmarks/bench_overhead.py --sequences 1 64 256

Everything else of an instance is real: messages from a router (another process) over ZeroMQ, scheduler, block
pool, packing of the step, sampling from logits, tokens and reports sent back. Printed are CPU milliseconds
per step of the step loop, and of the whole process with ZeroMQ's threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from examples.benchmarks.null_model import NullExecutor
from router.tools.bench.report import machine

PROMPT = 128


def router(endpoint: str, sequences: int, answer: int, temperature: float) -> None:
    """The router's process: submit all requests, take tokens until each has ended."""
    import zmq.asyncio

    from coordinator.rpc.rpc import AsyncConnection
    from engine.messages import Attach, Submit, ToInstance, Tokens, ToRouter
    from engine.sampling import SamplingParams

    async def run() -> None:
        connection: AsyncConnection[ToRouter, ToInstance] = AsyncConnection(
            zmq.asyncio.Context(), endpoint, ToRouter, name="router"
        )
        while not connection.send(Attach("bench")):  # noqa: ASYNC110 (nothing is queued before it connects)
            await asyncio.sleep(0.01)
        params = SamplingParams(temperature=temperature, max_tokens=answer, ignore_eos=True)
        for number in range(1, sequences + 1):
            prompt = [(number * 31 + place * 7) % 4000 for place in range(PROMPT)]
            connection.send(Submit(number, str(number), prompt, params, seed=number))
        left = sequences
        while left:
            message = await connection.receive()
            if isinstance(message, Tokens):
                left -= sum(delta.finish_reason is not None for delta in message.deltas)
        connection.close()

    asyncio.run(run())


def measure(sequences: int, answer: int, temperature: float) -> dict[str, float]:
    """One load of so many sequences at once."""
    import torch

    from engine.config import SHIPPED_MODEL, EngineConfig, SchedulerConfig
    from engine.core import EngineCore
    from engine.model.checkpoint import read_model_info
    from engine.model.finding import MODELS_DIRECTORY
    from engine.serving.server import Server

    torch.set_num_threads(1)
    info = read_model_info(MODELS_DIRECTORY / SHIPPED_MODEL)
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=2048))
    executor: Any = NullExecutor(info.vocab_size, config.cache.block_size, max(sequences, 2048))
    blocks = sequences * (PROMPT + answer + 16) // config.cache.block_size + 2 * sequences
    core = EngineCore(config, info, executor, num_blocks=blocks, max_model_len=2048)
    server = Server("bench", "tcp://127.0.0.1:0", core)
    child = multiprocessing.get_context("spawn").Process(
        target=router, args=(server.endpoint, sequences, answer, temperature)
    )
    child.start()

    def stop_when_done() -> None:
        if not child.is_alive():
            server.drain(0.0)

    try:
        server.run(stop_when_done)
    finally:
        server.close()
    child.join()
    if child.exitcode:
        raise SystemExit("the router's process failed")
    steps = executor.decode_steps
    quarter = len(steps) // 4  # of the steps in which all run, neither the first nor the last
    (loop, process), (loop_end, process_end) = steps[quarter], steps[-quarter]
    number = len(steps) - 2 * quarter
    return {
        "sequences": sequences,
        "steps": number,
        "loop_ms": 1000 * (loop_end - loop) / number,
        "process_ms": 1000 * (process_end - process) / number,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--sequences", type=int, nargs="+", default=[1, 8, 64], help="at once (default: %(default)s)")
    add("--output-len", type=int, default=400, help="tokens per answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="of sampling (default: 0, greedy)")
    add("--output-json", type=Path, metavar="FILE", help="write the numbers into this file")
    args = parser.parse_args()
    results = [measure(count, args.output_len, args.temperature) for count in args.sequences]
    print("| sequences | steps | CPU ms per step, loop | CPU ms per step, process |")
    print("| --------: | ----: | --------------------: | -----------------------: |")
    for one in results:
        loop, process = f"{one['loop_ms']:>21.3f}", f"{one['process_ms']:>24.3f}"
        print(f"| {one['sequences']:>9} | {one['steps']:>5} | {loop} | {process} |")
    if args.output_json is not None:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        page = {"machine": machine(), "load_average": os.getloadavg(), "results": results}
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
