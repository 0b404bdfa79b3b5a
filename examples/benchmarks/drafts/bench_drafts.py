"""Drafts against none in one process: tokens per CPU second, by number of requests.

    python examples/benchmarks/drafts/bench_drafts.py --text FILE --methods off ngram eagle3=HEAD

All engines are in this process, on one thread, and take the same prompts by turns, a few steps each. So the
CPU time of a cell is comparable on a machine that others use, too. Answers must be equal, token for token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from tokenizers import Tokenizer

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Counters, Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams

PEER = b"bench"
BLOCK_SIZE = 16
STEPS_OF_A_TURN = 16
Answers = dict[int, list[int]]


class Drafter:
    """One engine, with or without drafts."""

    def __init__(self, directory: Path, method: str, options: argparse.Namespace) -> None:
        self.name, _, model = method.partition("=")
        wanted = {"method": self.name, "num_speculative_tokens": options.most}
        if model:
            wanted["model"] = model
        most = max(options.requests)
        scheduler = SchedulerConfig(
            max_num_batched_tokens=2048,
            max_num_seqs=most,
            speculative_config=None if self.name == "off" else json.dumps(wanted),
        )
        config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype=options.dtype),
            cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
            device=DeviceConfig(device="cpu"),
            scheduler=scheduler,
        )
        info = read_model_info(directory)
        executor = UniExecutor(config, info, 1)
        facts = executor.load(lambda _phase: None)
        each = -(-(options.prompt + options.output + options.most + 1) // BLOCK_SIZE)
        executor.allocate(each * (most + 1), 0)
        self.found: Answers = {}
        self.wall = self.busy = 0.0
        """Seconds of the clock on the wall, and of the CPU."""
        self.core = EngineCore(
            config,
            info,
            executor,
            num_blocks=each * (most + 1),
            max_model_len=info.context_length,
            place=ModelPlace(is_native=True, boundaries=[], keeps_experts=facts.has_all_layers),
        )

    def begin(self, submits: list[Submit]) -> None:
        """Take in requests that are to be answered."""
        self.found = {each.request: [] for each in submits}
        self.wall = self.busy = 0.0
        began, before = time.perf_counter(), time.process_time()
        for each in submits:
            refusal = self.core.submit(PEER, each)
            assert refusal is None, refusal
        self.wall += time.perf_counter() - began
        self.busy += time.process_time() - before

    def turn(self) -> bool:
        """Run some steps; False: all is answered."""
        began, before = time.perf_counter(), time.process_time()
        for _ in range(STEPS_OF_A_TURN):
            if self.core.is_empty:
                break
            self.core.stepping.notice_work()
            for delta in self.core.step().get(PEER, []):
                self.found[delta.request] += delta.token_ids
        self.wall += time.perf_counter() - began
        self.busy += time.process_time() - before
        return not self.core.is_empty

    def counters(self) -> Counters:
        return self.core.scheduler.counters()


def submits_of(tokens: list[int], count: int, options: argparse.Namespace, seed: int) -> list[Submit]:
    chance = random.Random(seed)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.output, ignore_eos=True)
    starts = [chance.randrange(max(1, len(tokens) - options.prompt)) for _ in range(count)]
    return [
        Submit(
            request=number,
            request_id=f"b{seed}-{number}",
            prompt_ids=tokens[start : start + options.prompt],
            params=params,
            seed=seed * 1000 + number,
        )
        for number, start in enumerate(starts)
    ]


def measure(
    drafters: list[Drafter], tokens: list[int], options: argparse.Namespace
) -> list[dict[str, object]]:
    """Rows of the table, by number of requests and method."""
    rows: list[dict[str, object]] = []
    for count in options.requests:
        rates: dict[str, list[tuple[float, float]]] = {each.name: [] for each in drafters}
        taken: dict[str, tuple[int, int]] = {}
        for repeat in range(options.repeats + 1):
            submits = submits_of(tokens, count, options, seed=100 * count + repeat)
            before = {each.name: each.counters() for each in drafters}
            for each in drafters:
                each.begin(submits)
            under_way = drafters if repeat % 2 else drafters[::-1]
            while under_way:
                under_way = [each for each in under_way if each.turn()]
            for each in drafters:
                assert each.found == drafters[0].found, f"{each.name} gives other tokens"
                old, after, total = before[each.name], each.counters(), sum(map(len, each.found.values()))
                drafted = after.drafted_tokens - old.drafted_tokens
                accepted = sum(after.taken_by_place) - sum(old.taken_by_place)
                so_far = taken.get(each.name, (0, 0))
                taken[each.name] = so_far[0] + drafted, so_far[1] + accepted
                if repeat:  # the first one warms up
                    rates[each.name].append((total / each.busy, total / each.wall))
        off = rates[drafters[0].name]
        plain = [cpu for cpu, _ in off]
        for each in drafters:
            by_cpu = [cpu for cpu, _ in rates[each.name]]
            ratios = [cpu / alone for cpu, alone in zip(by_cpu, plain, strict=True)]
            drafted, accepted = taken[each.name]
            row: dict[str, object] = {
                "requests": count,
                "method": each.name,
                "tokens_per_cpu_second": round(statistics.median(by_cpu), 1),
                "tokens_per_second": round(statistics.median(wall for _, wall in rates[each.name]), 1),
                "over_off": round(statistics.harmonic_mean(by_cpu) / statistics.harmonic_mean(plain), 3),
                "over_off_median": round(statistics.median(ratios), 3),
                "over_off_lowest": round(min(ratios), 3),
                "over_off_highest": round(max(ratios), 3),
                "drafted": drafted,
                "accepted": accepted,
            }
            rows.append(row)
            print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="directory or name; unset: the shipped model")
    parser.add_argument("--methods", nargs="+", default=["off", "ngram"], help="the first is compared with")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--text", type=Path, required=True, help="file that prompts are cut from")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--most", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    directory = find_model(options.model, None, weights=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = tokenizer.encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    drafters = [Drafter(directory, method, options) for method in options.methods]
    rows = measure(drafters, tokens, options)
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
