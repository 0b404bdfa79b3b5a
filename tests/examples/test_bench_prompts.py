"""Loads, counts and tables of the benchmarks of long prompts and of many."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from examples.benchmarks.prompts import bench_offline, bench_prompts, prompt_load, prompt_tables
from router.tools.bench.client import BenchTarget


def args(**changes: Any) -> argparse.Namespace:
    given = {"lengths": [128, 8000], "counts": [1, 8], "beside": [4000], "most_tokens": 32_000}
    return argparse.Namespace(**given | changes)


def cell(system: str, length: int, beside: int, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"system": system, "length": length, "count": 1, "beside": beside, "runs": list(runs)}


def run(first: float, p99: float = 9.0, failed: int = 0) -> dict[str, Any]:
    return {"ttft_ms": first, "ttft_most_ms": first, "itl_ms": 5.0, "itl_p99_ms": p99, "failed": failed} | {
        "itl_most_ms": 2 * p99
    }


def page() -> dict[str, Any]:
    cells = [
        cell("lockstep-dp1", 500, 0, run(20.0), run(10.0)),
        cell("vllm", 500, 0, run(50.0), run(40.0)),
        cell("vllm-cores", 500, 0, run(30.0), run(60.0, failed=1)),
        cell("lockstep-dp1", 8000, 0, run(900.0)),
        cell("vllm", 8000, 0),
        cell("vllm-cores", 8000, 0),
        cell("lockstep-dp1", 4000, 8, run(300.0, 20.0)),
        cell("vllm", 4000, 8, run(600.0, 50.0)),
    ]
    model = {"model": "m", "dtype": "bfloat16", "cells": cells, "start_seconds": {}}
    model |= {"calibration": [{"read_gb_per_s": 10.0, "bf16_gflop_per_s": 400}], "left_out": {"x": "is not"}}
    return json.loads(json.dumps({"models": [model]}))  # type: ignore[no-any-return]


def rows_of(text: str) -> set[tuple[str, ...]]:
    return {tuple(part.strip() for part in line.split("|")[1:-1]) for line in text.splitlines()}


def test_a_cell_with_too_many_tokens_or_requests_is_left_out() -> None:
    cells = bench_prompts.cells_of(args(), ["lockstep-dp1", "llama.cpp"])
    kinds = [(one["system"], one["length"], one["count"], one["beside"]) for one in cells]
    assert kinds == [
        ("lockstep-dp1", 128, 1, 0),
        ("llama.cpp", 128, 1, 0),
        ("lockstep-dp1", 8000, 1, 0),
        ("llama.cpp", 8000, 1, 0),
        ("lockstep-dp1", 128, 8, 0),  # eight of 8,000 are too many, and llama.cpp has one sequence
        ("lockstep-dp1", 4000, 1, 8),
    ]


def test_a_server_has_room_for_the_largest_cell(tmp_path: Path) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    cells = bench_prompts.cells_of(args(lengths=[16_000], counts=[8], most_tokens=1 << 30), ["vllm"])
    room = bench_prompts.room_of(tmp_path, "bfloat16", cells)
    assert room.context == 16_064
    assert (room.kv_gib - 1) * 2**30 < 8 * 16_000 * 8192 <= room.kv_gib * 2**30
    with pytest.raises(SystemExit, match="too short for 16384"):
        bench_prompts.room_of(tmp_path, "bfloat16", [cell("vllm", 16_384, 0)])


def test_defaults_of_a_quick_look_give_way_to_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_prompts.py", "--quick", "--lengths", "700"])
    found = bench_prompts.parse_args()
    assert (found.lengths, found.counts, found.beside, found.repeats) == ([700], [1], [], 2)
    assert found.systems == bench_prompts.QUICK


def test_prompts_are_the_same_for_the_same_key_and_share_nothing() -> None:
    one, other = prompt_load.prompts_of("key", 8192, [40, 60])
    assert [len(one), len(other)] == [40, 60]
    assert prompt_load.prompts_of("key", 8192, [40, 60]) == [one, other]
    assert one[:4] != other[:4] != prompt_load.prompts_of("other", 8192, [40])[0][:4]
    assert prompt_load.LOWEST_ID <= min(one + other) <= max(one + other) < 8192


def test_short_prompts_are_sent_more_often() -> None:
    counts = [
        prompt_load.rounds_of(length, at_once) for length, at_once in [(128, 1), (2000, 2), (16_000, 8)]
    ]
    assert counts == [4, 2, 1]


def test_gaps_are_those_that_reach_into_the_span() -> None:
    times = [0.0, 1.0, 2.5, 3.0, 7.0, 8.0]
    assert prompt_load.gaps_within(times, 1.5, 6.0) == [1500.0, 500.0, 4000.0]


class Server:
    """A server whose decodes stop while it has a long prompt."""

    def __init__(self) -> None:
        self.may_decode = asyncio.Event()
        self.may_decode.set()
        self.prompts: list[int] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count, length = body["max_tokens"], len(body["prompt"])
        self.prompts.append(length)
        response = web.StreamResponse()
        await response.prepare(request)
        if count == 1:
            self.may_decode.clear()
            await asyncio.sleep(0.1)
        for _ in range(count):
            if count > 1:
                await self.may_decode.wait()
                await asyncio.sleep(0.001)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        self.may_decode.set()
        await response.write(b"data: [DONE]\n\n")
        return response


async def measured(prompt: int, decodes: list[int], most: int) -> tuple[Server, dict[str, Any]]:
    server, app = Server(), web.Application()
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        target = BenchTarget(
            base_url="http://{}:{}".format(*runner.addresses[0][:2]),
            endpoint="/v1/completions",
            model="bench",
            ignore_eos=True,
        )
        long, *short = prompt_load.prompts_of("key", 8192, [prompt, *decodes])
        return server, await prompt_load.beside_decodes(target, long, short, most)
    finally:
        await runner.cleanup()


def test_gaps_of_decodes_beside_a_long_prompt_are_those_of_its_time() -> None:
    server, run = asyncio.run(measured(300, [5, 6], 100_000))
    assert (run["failed"], run["error"]) == (0, "")
    assert server.prompts == [5, 6, 300]  # it came once both decoded
    assert run["ttft_ms"] >= 100
    assert run["itl_most_ms"] >= 90
    assert run["itl_ms"] <= run["itl_p99_ms"] <= run["itl_most_ms"]
    assert 2 <= run["num_gaps"] < 50  # and not those of before


def test_decodes_that_end_before_the_prompt_has_its_token_are_failures() -> None:
    _, run = asyncio.run(measured(300, [5, 6], prompt_load.SETTLED))
    assert run["failed"] == 2
    assert "itl_p99_ms" not in run


def test_tables_name_the_lead_over_each_and_over_the_best_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    prompt_tables.print_model(page()["models"][0])
    said = capsys.readouterr().out
    rows = rows_of(said)
    assert ("lockstep-dp1", "15.0 (10.0-20.0)", "900.0") in rows
    assert ("vllm", "3.25 (2.50-4.00)", "") in rows
    assert ("best of vllm", "1.50", "") in rows  # a request failed in the second repeat
    assert ("vllm", "2.00") in rows
    assert "ITL p99: how many times shorter lockstep-dp1 has it" in said
    assert "Left out: x is not" in said


def test_a_plot_of_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    unmeasured = {"model": "n", "dtype": "bfloat16", "cells": [cell("vllm", 500, 0)]}
    prompt_tables.plot(tmp_path, {"models": [*page()["models"], unmeasured]})
    assert (tmp_path / "prompts-m-bfloat16.svg").read_text().rstrip().endswith("</svg>")


def test_offline_prompts_have_the_lengths_that_were_asked_for() -> None:
    found = bench_offline.drawn(argparse.Namespace(seed=0, lengths=[64, 256], prompts=200), 0, 8192)
    lengths = [len(prompt) for prompt in found]
    assert len(found) == 200
    assert 64 <= min(lengths) < 80 < 240 < max(lengths) <= 256


def test_offline_tables_compare_with_the_best_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"lockstep": [400.0, 600.0], "vllm": [200.0, 150.0], "vllm-cores": [100.0, 300.0]}
    made = {
        name: [{"tokens_per_second": one, "failed": 0} for one in speeds] for name, speeds in runs.items()
    }
    model = {"model": "m", "dtype": "bfloat16", "calibration": [], "left_out": {}, "runs": made}
    bench_offline.print_model(model)
    rows = rows_of(capsys.readouterr().out)
    assert ("lockstep", "500 (400-600)") in rows
    assert ("lockstep / vllm", "3.00 (2.00-4.00)") in rows
    assert ("lockstep / best of vllm", "2.00 (2.00-2.00)") in rows
