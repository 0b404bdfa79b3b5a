#!/usr/bin/env python3
"""Benchmark of the batch API beside the offline class, and of interactive requests beside it.

    python examples/benchmarks/prompts/bench_batches.py
    python examples/benchmarks/prompts/bench_batches.py --model build/models/dense-small --rounds 9

First the same requests run in turn as a batch of ``serve`` and through ``LLM.generate``, each mesh idle while
the other one works; the time of a batch is from its creation to its end. Then slices of interactive load
follow each other, each second one beside a batch that does not end: first tokens and gaps between tokens with
it are compared with those without. Load arrives as a Poisson process. Times are of this client, which shares
the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from lockstep import LLM, SamplingParams
from router.tools.bench.arrivals import ArrivalProcess
from router.tools.bench.client import BenchTarget, model_name, run, session
from router.tools.bench.datasets import PromptLengths, random_prompts
from router.tools.bench.report import machine, summary
from router.tools.local_mesh import mesh

ENDPOINT = "/v1/completions"
POLL_SECONDS = 0.1
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
}  # else it is the model's, which a batch has as its default
LINES_OF_ENDLESS = 5000
"""Lines of a batch that does not end within a slice."""
SHOWN = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
ENDED = ("completed", "failed", "expired", "cancelled")


def prompts_of(args: argparse.Namespace, round_: int) -> list[list[int]]:
    """Prompts of a round, which no cache holds yet."""
    rng = random.Random(round_)
    return [[rng.randrange(16, 4096) for _ in range(args.input_len)] for _ in range(args.lines)]


def lines_of(model: str, prompts: Sequence[list[int]], output_len: int) -> bytes:
    """File of a batch."""
    lines = [
        {
            "custom_id": str(number),
            "url": ENDPOINT,
            "method": "POST",
            "body": {
                "model": model,
                "prompt": prompt,
                "max_tokens": output_len,
                "ignore_eos": True,
                "seed": number,
            }
            | SAMPLING,
        }
        for number, prompt in enumerate(prompts)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines)


class Batches:
    """Client of the batch API."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def begin(self, lines: bytes) -> str:
        """Id of a new batch."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", lines, filename="lines.jsonl")
        file = await self._call("POST", "/v1/files", data=form)
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        return str((await self._call("POST", "/v1/batches", json=asked))["id"])

    async def ended(self, id: str) -> dict[str, Any]:
        """A batch, once it has ended."""
        return await self.until(id, lambda batch: batch["status"] in ENDED)

    async def until(self, id: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A batch, once that is so."""
        while True:
            if is_so(batch := await self.get(id)):
                return batch
            await asyncio.sleep(POLL_SECONDS)

    async def get(self, id: str) -> dict[str, Any]:
        return await self._call("GET", f"/v1/batches/{id}")

    async def cancel(self, id: str) -> None:
        await self._call("POST", f"/v1/batches/{id}/cancel")
        await self.ended(id)

    async def _call(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        async with self._http.request(method, self._url + path, **given) as answer:
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status} {await answer.text()}")
            return dict(await answer.json())


async def throughput(batches: Batches, llm: LLM, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of both, round by round."""
    rates: dict[str, list[float]] = {"batch": [], "offline": []}
    for round_ in range(-1, args.rounds):
        prompts = prompts_of(args, round_)
        lines = lines_of(model, prompts, args.output_len)
        took = {}
        for name in sorted(rates, reverse=bool(round_ % 2)):
            if name == "batch":
                began = time.perf_counter()
                batch = await batches.ended(await batches.begin(lines))
                if batch["request_counts"]["completed"] != args.lines:
                    raise SystemExit(f"not all lines have answers: {batch}")
            else:
                params = [
                    SamplingParams(max_tokens=args.output_len, ignore_eos=True, seed=number, **SAMPLING)
                    for number in range(args.lines)
                ]
                began = time.perf_counter()
                await asyncio.to_thread(
                    llm.generate, [{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False
                )
            took[name] = time.perf_counter() - began
        if round_ >= 0:  # the first one warms both
            for name, seconds in took.items():
                rates[name].append(args.lines * args.output_len / seconds)
            print(
                f"round {round_}: {' '.join(f'{name} {all[-1]:.0f}' for name, all in rates.items())} tokens/s"
            )
    shares = [one / other for one, other in zip(rates["batch"], rates["offline"], strict=True)]
    return rates | {"share": statistics.median(shares), "shares": shares}


async def beside(
    batches: Batches, http: aiohttp.ClientSession, target: BenchTarget, args: argparse.Namespace
) -> dict[str, Any]:
    """Interactive load without and with a batch, in turn."""
    outcomes: dict[str, list[Any]] = {"alone": [], "beside a batch": []}
    shape = PromptLengths(input_len=args.input_len, output_len=args.output_len)
    endless = prompts_of(args, 1000) * (1 + LINES_OF_ENDLESS // args.lines)
    lines_done = 0
    for number, name in product(range(args.slices), outcomes):
        rng = random.Random(number)  # the same load in both
        batch = ""
        if name != "alone":
            batch = await batches.begin(lines_of(target.model, endless, args.output_len))
            await batches.until(batch, lambda each: each["request_counts"]["completed"] > 0)
        load = random_prompts(shape, rng, max(1, round(args.rate * args.seconds)))
        arrivals = ArrivalProcess(request_rate=args.rate)
        found, _ = await run(http, target, load, arrivals=arrivals, rng=rng)
        outcomes[name] += found
        if batch:
            lines_done += (await batches.get(batch))["request_counts"]["completed"]
            await batches.cancel(batch)
    results: dict[str, Any] = {}
    for name, found in outcomes.items():
        whole = summary(found, 1.0, described={})
        results[name] = {key: whole[key] for key in (*SHOWN, "completed", "failed")}
    alone, other = results.values()
    return results | {
        "ratios": {key: other[key] / alone[key] for key in SHOWN},
        "lines answered meanwhile": lines_done,
    }


async def measure(args: argparse.Namespace, url: str, llm: LLM | None) -> dict[str, Any]:
    async with session() as http:
        model = await model_name(http, url, 60)
        batches, found = Batches(http, url), {}
        if llm is not None:
            found["throughput"] = await throughput(batches, llm, model, args)
            llm.close()
        if args.slices:
            target = BenchTarget(base_url=url, endpoint=ENDPOINT, model=model, ignore_eos=True)
            found["interactive"] = await beside(batches, http, target, args)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="lockstep-moe", help="(default: %(default)s)")
    add("-dp", type=int, default=1, help="instances (default: %(default)s)")
    add("--lines", type=int, default=512, help="of a batch (default: %(default)s)")
    add("--input-len", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    add("--rounds", type=int, default=5, help="of the comparison with LLM; 0: none (default: %(default)s)")
    add("--slices", type=int, default=6, help="of load, with and without a batch (default: %(default)s)")
    add("--seconds", type=float, default=10.0, help="of a slice (default: %(default)s)")
    add("--rate", type=float, default=2.0, help="interactive requests per second (default: %(default)s)")
    add("--flags", default="", help="more flags for serve, as one word")
    add("--output-json", type=Path, metavar="FILE", help="write the numbers into this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"{args.model} -dp {args.dp} --no-enable-expert-parallel --store-path {folder}/store {args.flags}"
        )
        with mesh(flags) as url:
            llm = None
            if args.rounds:
                llm = LLM(
                    args.model, data_parallel_size=args.dp, enable_expert_parallel=False, log_level="warning"
                )
            found = asyncio.run(measure(args, url, llm))
    found = {"machine": machine(), "arguments": {key: str(each) for key, each in vars(args).items()}} | found
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: each for key, each in found.items() if key != "machine"}, indent=1))


if __name__ == "__main__":
    main()
