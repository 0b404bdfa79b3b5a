"""A hot-prefix load on real meshes of the shipped model, one for each policy."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from router.bench.local_mesh import mesh

CONTEXT = 2048
DOCUMENTS = 6
DOCUMENT_TOKENS = 1200
RATE = 3.0
"""Requests per second for each instance."""
OUTPUT = 16


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that begin with one of a few documents, drawn by Zipf's law."""

    def words(length: int) -> list[int]:
        return [rng.randrange(5, 4000) for _ in range(length)]

    documents = [words(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    weights = [1 / (place + 1) for place in range(DOCUMENTS)]
    return [[*rng.choices(documents, weights)[0], *words(rng.randint(16, 128))] for _ in range(count)]


async def compare(policies: Sequence[str], size: int, count: int) -> dict[str, Any]:
    """Times in milliseconds, as clients see them."""
    results = []
    for policy in policies:
        arguments = (
            f"-dp {size} --load-balancing-policy {policy} --no-enable-expert-parallel "
            "--enable-prompt-tokens-details --num-gpu-blocks-override 600 --max-num-seqs 32"
        )
        with mesh(arguments) as url:
            found = await _load(url, size, count)
        results.append({"policy": policy, "instances": size, **found})
        print(
            f"{policy:20} TTFT p50 {found['ttft_p50']:7.1f} ms  p99 {found['ttft_p99']:7.1f} ms  "
            f"hit rate {found['hit_rate']:.3f}",
            flush=True,
        )
    return {"instances": size, "requests": count, "results": results}


async def _load(url: str, size: int, count: int) -> dict[str, Any]:
    rng = random.Random(1)
    times: list[float] = []
    totals = {"prompt_tokens": 0, "cached_tokens": 0}

    async def ask(session: aiohttp.ClientSession, prompt: list[int], at: float) -> None:
        await asyncio.sleep(at)
        body = {
            "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, first = time.perf_counter(), None
        async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                if first is None:
                    first = time.perf_counter() - began
                if usage := json.loads(line[6:]).get("usage"):
                    totals["prompt_tokens"] += usage["prompt_tokens"]
                    totals["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        assert first is not None, "a stream without a token"
        times.append(1000 * first)

    async with aiohttp.ClientSession() as session:
        await ask(session, [5] * 20, 0)
        times.clear()
        totals = dict.fromkeys(totals, 0)
        at, asking = 0.0, []
        for prompt in prompts(rng, count):
            at += rng.expovariate(RATE * size)
            asking.append(ask(session, prompt, at))
        await asyncio.gather(*asking)
    ordered = sorted(times)
    return {
        "ttft_p50": ordered[len(ordered) // 2],
        "ttft_p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "ttft_mean": sum(ordered) / len(ordered),
        "hit_rate": totals["cached_tokens"] / totals["prompt_tokens"],
    }
