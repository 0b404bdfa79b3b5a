"""``lockstep bench serve``: flags, runs, files.

Flags, report and result files are those of ``vllm bench serve``, so that numbers compare by eye. Beyond
that, ``--concurrency 1 8 32`` makes a series of runs with one table at the end, and ``--serve ARGS`` starts a
mesh of its own. Time to first token is taken at the first chunk that says something, inter-token latency
between such chunks; token counts are those that the server reports as usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.distribution import install_extra
from coordinator.process import process
from coordinator.settings.command_line import OneLineParser
from coordinator.settings.errors import FlagError
from coordinator.settings.flags import from_flat
from router.launcher.endpoint_config import EndpointConfig
from router.tools.bench.arrivals import INFINITE, Arrivals
from router.tools.bench.datasets import (
    LOWEST_ID,
    Conversation,
    Shape,
    prefix_repetition,
    random_prompts,
    sharegpt,
)
from router.tools.bench.report import DETAILS, METRICS, Result, machine, report, summary, table
from router.tools.local_mesh import mesh

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from router.tools.bench.client import Target

Args = argparse.Namespace

PROG = "lockstep bench serve"
DATASETS = ("random", "prefix_repetition", "sharegpt", "multi_turn")
GOALS = ("ttft", "tpot", "e2el")
SAMPLING = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
}
"""Fields that go into each request, with their types."""
LEAST = {
    "port": 1,
    "num_prompts": 1,
    "max_concurrency": 1,
    "concurrency": 1,
    "burst_size": 1,
    "num_warmups": 0,
    "random_input_len": 1,
    "random_output_len": 1,
    "random_prefix_len": 0,
    "random_vocab": LOWEST_ID + 1,
    "sharegpt_output_len": 1,
    "prefix_repetition_prefix_len": 0,
    "prefix_repetition_suffix_len": 1,
    "prefix_repetition_num_prefixes": 1,
    "prefix_repetition_output_len": 1,
    "multi_turn_num_turns": 1,
}
"""Flags of counts and lengths, with the lowest that means something."""


def main(argv: list[str]) -> int:
    """``lockstep bench serve ...``; 1 if any request failed."""
    if argv[:1] != ["serve"]:
        helps = argv[:1] in (["-h"], ["--help"])
        print(
            f"usage: {PROG} ...  (measures a server; see {PROG} --help)",
            file=sys.stdout if helps else sys.stderr,
        )
        return 0 if helps else process.EXIT_USAGE
    args = parse_args(argv[1:])
    process.raise_open_files()  # each request has a connection
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        missing = f"this needs aiohttp: {install_extra('bench')}"
        print(f"{PROG}: error: {missing}", file=sys.stderr)
        return process.EXIT_USAGE
    import uvloop

    from router.tools.bench.client import Unmeasurable

    server = contextlib.nullcontext(args.base_url) if args.serve is None else mesh(args.serve)
    try:
        _check_places(args)
        with server as args.base_url:
            return uvloop.run(bench(args))
    except KeyboardInterrupt:
        return 130
    except (Unmeasurable, ValueError, OSError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return process.EXIT_FAILED


async def bench(args: Args) -> int:
    from router.tools.bench import client

    results = []
    where = args.endpoint_config
    async with client.session(args.header, key=args.key, trust=where.trust(), path=where.uds) as http:
        name = args.model or await client.model_name(http, args.base_url, args.ready_check_timeout_sec)
        target = client.Target(
            base_url=args.base_url,
            endpoint=args.endpoint,
            model=name,
            is_chat=args.backend == "openai-chat",
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
            extra_body=args.sampling | args.extra_body,
        )
        if args.ready_check_timeout_sec > 0:
            first = conversations(args, random.Random(args.seed), 1)[0][0]
            await client.until_ready(http, target, first, args.ready_check_timeout_sec)
        for number, concurrency in enumerate(args.concurrency or [args.max_concurrency]):
            results.append(await one_run(http, target, args, concurrency, number))
            print(report(results[-1], args.percentile_metrics, args.metric_percentiles), flush=True)
            if results[-1]["failed"]:
                first_error = next(filter(None, results[-1]["errors"]))
                print(
                    f"{results[-1]['failed']} requests failed, the first with: {first_error}", file=sys.stderr
                )
    if args.concurrency:
        print(table(results))
    save(args, results)
    return 1 if any(result["failed"] for result in results) else 0


async def one_run(
    http: ClientSession, target: Target, args: Args, concurrency: int | None, number: int
) -> Result:
    """Warm up, send all, and sum up.

    ``number`` makes the prompts of the runs of a series differ.
    """
    from router.tools.bench import client

    count = args.num_prompts or max(32, 4 * (concurrency or 8))
    rng = random.Random(f"{args.seed}-{number}")
    warmups = conversations(args, rng, args.num_warmups) if args.num_warmups else []
    await client.run(http, target, warmups, concurrency=concurrency)
    asked = conversations(args, rng, count)
    total = sum(map(len, asked))
    with _progress(args.disable_tqdm) as progress:
        bar = progress.add_task(f"{total} requests, at most {concurrency or count} at once", total=total)
        outcomes, duration = await client.run(
            http,
            target,
            asked,
            concurrency=concurrency,
            arrivals=arrivals(args),
            rng=rng,
            on_end=lambda: progress.advance(bar),
        )
    rate = args.request_rate
    return summary(
        outcomes,
        duration,
        described={
            "backend": args.backend,
            "model_id": target.model,
            "dataset_name": args.dataset_name,
            "request_rate": rate if rate != INFINITE else "inf",
            "burstiness": args.burstiness,
            "max_concurrency": concurrency,
            **({"label": args.label} if args.label else {}),
            **args.metadata,
        },
        percentiles=args.metric_percentiles,
        goals=args.goodput,
    )


def _progress(disabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=disabled or not sys.stderr.isatty(),
    )


def conversations(args: Args, rng: random.Random, count: int) -> list[Conversation]:
    """The conversations of a run.

    Raises:
        ValueError: the file of --dataset-path cannot be used.
    """
    as_text = args.backend == "openai-chat"
    if args.dataset_name == "sharegpt":
        kwargs: dict[str, Any] = {"num_tokens": _counter(args.tokenizer)} if args.tokenizer else {}
        return sharegpt(args.dataset_path, rng, count, output_len=args.sharegpt_output_len, **kwargs)
    if args.dataset_name == "prefix_repetition":
        shape = Shape(
            prefix_len=args.prefix_repetition_prefix_len,
            output_len=args.prefix_repetition_output_len,
            vocab=args.random_vocab,
            as_text=as_text,
        )
        return prefix_repetition(
            shape,
            rng,
            count,
            num_prefixes=args.prefix_repetition_num_prefixes,
            suffix_len=args.prefix_repetition_suffix_len,
        )
    shape = Shape(
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        prefix_len=args.random_prefix_len,
        range_ratio=args.random_range_ratio,
        vocab=args.random_vocab,
        as_text=as_text,
        num_turns=args.multi_turn_num_turns if args.dataset_name == "multi_turn" else 1,
    )
    return random_prompts(shape, rng, count)


def _counter(directory: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"--tokenizer: {directory} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # its library raises nothing more special
        raise ValueError(f"--tokenizer: {file} is broken: {error}") from error
    return lambda text: len(tokenizer.encode(text).ids)


def arrivals(args: Args) -> Arrivals:
    return Arrivals(
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        burst_size=args.burst_size,
        burst_interval=args.burst_interval,
        ramp_up=args.ramp_up_strategy,
        ramp_start=args.ramp_up_start_rps or 1.0,
        ramp_end=args.ramp_up_end_rps or 1.0,
    )


def save(args: Args, results: Sequence[Result]) -> None:
    """--save-result: a file per run; --output-json: the sums of all in one."""
    for result in results if args.save_result else ():
        file = _file_of(args, result, is_one_of_several=len(results) > 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))
    if args.output_json:
        sums = [{key: result[key] for key in result if key[:-1] not in DETAILS} for result in results]
        page = {"command": shlex.join(sys.argv), "machine": machine(), "runs": sums}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


def _file_of(args: Args, result: Result, *, is_one_of_several: bool) -> Path:
    """Where a run is saved: by default under a name as vLLM makes it."""
    limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
    if args.result_filename:
        given = Path(args.result_filename)
        name = given.with_stem(f"{given.stem}{limit}") if is_one_of_several else given
    else:
        model = str(result["model_id"]).rstrip("/").split("/")[-1]
        run = f"{result['request_rate']}qps{limit}-{model}-{result['date']}"
        name = Path(f"{args.label or args.backend}-{run}.json")
    found: Path = args.result_dir / name
    return found


def _check_places(args: Args) -> None:
    """See that results can be written, before anything is measured.

    Raises:
        OSError: they cannot.
    """
    files = [args.output_json] if args.output_json else []
    if args.save_result:  # the rest of a name that is not given is known with the run
        files.append(args.result_dir / (args.result_filename or f"{args.label or args.backend}-.json"))
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
        if file.exists():
            file.open("ab").close()


def _percents(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _goal(text: str) -> tuple[str, float]:
    name, _, most = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: goals are {', '.join(GOALS)}, as in ttft:500 (milliseconds)"
        )
    return name, float(most)


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (found and name):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value


def parse_args(argv: Sequence[str]) -> Args:
    """Wrong values end the process with exit code 2 and a message."""
    parser = OneLineParser(
        prog=PROG, description="Measure a server that speaks OpenAI's API.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--backend",
        choices=["openai", "vllm", "openai-chat"],
        default="openai",
        help="API to measure (default: %(default)s)",
    )
    add("--base-url", help="base URL of the server, with or without /v1 (default: http://127.0.0.1:8000)")
    add("--host", help="host of the server, instead of --base-url")
    add("--port", type=int, help="port of the server, instead of --base-url")
    add("--uds", metavar="PATH", help="path of the server's Unix socket, instead of --base-url")
    add(
        "--config",
        metavar="FILE",
        help="settings file of serve, for the server's host, port, certificate and key",
    )
    add("--serve", metavar="ARGS", help="start 'serve ARGS' for the runs, instead of --base-url")
    add("--endpoint", help="path of the API (default: /v1/completions or /v1/chat/completions)")
    add("--model", help="model name in requests (default: the first that the server lists)")
    add(
        "--tokenizer", type=Path, help="directory with tokenizer.json, to count the tokens of a ShareGPT file"
    )
    add("--dataset-name", choices=DATASETS, default="random", help="kind of prompts (default: %(default)s)")
    add("--dataset-path", type=Path, help="JSON file of the dataset sharegpt")
    add("--random-input-len", type=int, default=128, help="tokens per prompt (default: %(default)s)")
    add(
        "--random-output-len",
        type=int,
        default=64,
        help="tokens to generate per prompt (default: %(default)s)",
    )
    add(
        "--random-prefix-len",
        type=int,
        default=0,
        help="tokens of a prefix shared by all prompts (default: 0)",
    )
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="relative variation of lengths, 0 to below 1 (default: 0)",
    )
    add("--random-vocab", type=int, default=4096, help="token ids are below this (default: %(default)s)")
    add("--sharegpt-output-len", type=int, help="tokens to generate, instead of the lengths in the file")
    add(
        "--prefix-repetition-prefix-len",
        type=int,
        default=256,
        help="tokens per prefix (default: %(default)s)",
    )
    add(
        "--prefix-repetition-suffix-len",
        type=int,
        default=256,
        help="tokens per suffix (default: %(default)s)",
    )
    add(
        "--prefix-repetition-num-prefixes",
        type=int,
        default=10,
        help="number of prefixes (default: %(default)s)",
    )
    add(
        "--prefix-repetition-output-len",
        type=int,
        default=128,
        help="tokens to generate (default: %(default)s)",
    )
    add("--multi-turn-num-turns", type=int, default=4, help="turns per conversation (default: %(default)s)")
    add(
        "--num-prompts",
        type=int,
        help="prompts, or conversations, per run (default: 4 x concurrency, at least 32)",
    )
    add("--request-rate", type=float, default=INFINITE, help="requests per second (default: inf)")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="burstiness of arrivals: 1 is Poisson, less has more bursts (default: 1)",
    )
    add("--burst-size", type=int, help="requests sent together, instead of a rate")
    add("--burst-interval", type=float, default=1.0, help="seconds between two bursts (default: 1)")
    add(
        "--ramp-up-strategy",
        choices=["linear", "exponential"],
        help="growth of the request rate over the run",
    )
    add("--ramp-up-start-rps", type=float, help="requests per second at the start of the run")
    add("--ramp-up-end-rps", type=float, help="requests per second at the end of the run")
    add("--max-concurrency", type=int, help="most requests in flight")
    add("--concurrency", type=int, nargs="+", help="a series of runs with these --max-concurrency")
    add(
        "--goodput",
        type=_goal,
        nargs="+",
        default=[],
        metavar="GOAL",
        help="count requests within these milliseconds, like ttft:500 tpot:50",
    )
    add("--ignore-eos", action="store_true", help="generate exactly the requested number of tokens")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="sampling parameter (default: the server's)")
    add("--extra-body", type=json.loads, default={}, help="JSON object merged into each request")
    add("--header", type=_pair, nargs="+", default=[], metavar="NAME=VALUE", help="headers of every request")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")
    add(
        "--percentile-metrics",
        default=",".join(METRICS),
        help="metrics with percentiles (default: %(default)s)",
    )
    add(
        "--metric-percentiles",
        type=_percents,
        default="99",
        help="percentiles, such as 50,99 (default: %(default)s)",
    )
    add("--num-warmups", type=int, default=4, help="warm-up requests before each run (default: %(default)s)")
    add("--save-result", action="store_true", help="write a JSON file per run into --result-dir")
    add("--label", help="label in results and file names, instead of the backend")
    add(
        "--metadata",
        type=_pair,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="additional fields of results",
    )
    add("--result-dir", type=Path, default=Path(), help="directory of results (default: the current one)")
    add("--result-filename", help="name of the result file (default: made from the run)")
    add("--output-json", type=Path, metavar="FILE", help="write the summaries of all runs into one file")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        help="seconds to wait for a ready server, 0: no check (default: %(default)g)",
    )
    add("--disable-tqdm", action="store_true", help="show no progress bar")
    args = parser.parse_args(argv)
    args.percentile_metrics = args.percentile_metrics.split(",")
    args.goodput, args.header, args.metadata = dict(args.goodput), dict(args.header), dict(args.metadata)
    args.sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    problem = _problem(args)
    if problem is not None:
        parser.error(problem)
    args.endpoint_config = EndpointConfig(host=args.host or "127.0.0.1", port=args.port or 8000, uds=args.uds)
    if args.config is not None:
        names = ("host", "port", "uds")
        given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        try:
            args.endpoint_config = from_flat(
                EndpointConfig, {"config": args.config, **given}, shares_file=True
            )
        except FlagError as error:
            parser.error(str(error))
    if args.endpoint_config.uds and args.endpoint_config.ssl_certfile:
        parser.error("--uds with ssl-certfile: HTTPS at a Unix socket cannot be measured")
    args.key = next(iter(args.endpoint_config.api_key), None)
    args.base_url = (args.base_url or args.endpoint_config.base_url).rstrip("/")
    args.backend = "openai" if args.backend == "vllm" else args.backend
    args.endpoint = args.endpoint or f"/v1/{'chat/' * (args.backend == 'openai-chat')}completions"
    if args.base_url.endswith("/v1"):  # as serve prints it
        args.base_url = args.base_url.removesuffix("/v1")
        args.endpoint = "/v1" + args.endpoint.removeprefix("/v1")
    return args


def _too_small(args: Args) -> str | None:
    for name, least in LEAST.items():
        given = getattr(args, name)
        values = given if isinstance(given, list) else [least if given is None else given]
        if min(values) < least:
            return f"--{name.replace('_', '-')} must be at least {least}, not {min(values)}"
    return None


def _problem(args: Args) -> str | None:
    rates = [args.request_rate, args.burstiness, args.burst_interval]
    rates += [rate for rate in (args.ramp_up_start_rps, args.ramp_up_end_rps) if rate is not None]
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    checks = {
        "--serve starts its own server: leave out --base-url, --host, --port and --uds": args.serve
        is not None
        and (args.base_url or args.host or args.port or args.uds),
        "--config says where: leave out --base-url and --serve": args.config is not None
        and (args.base_url or args.serve is not None),
        "--base-url says where: leave out --host, --port and --uds": args.base_url
        and (args.host or args.port or args.uds),
        "rates, --burstiness and --burst-interval must be above 0": not all(rate > 0 for rate in rates),
        "--random-range-ratio is from 0 to below 1": not 0 <= args.random_range_ratio < 1,
        "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps need each other": len(
            {x is None for x in ramp}
        )
        > 1,
        "--burst-size and --ramp-up-strategy exclude each other": args.burst_size and args.ramp_up_strategy,
        "--dataset-name sharegpt needs --dataset-path": args.dataset_name == "sharegpt"
        and not args.dataset_path,
        f"metrics are {', '.join(METRICS)}": set(args.percentile_metrics) - set(METRICS),
        "percentiles are numbers from 0 to 100": not all(0 <= p <= 100 for p in args.metric_percentiles),
        "--extra-body must be a JSON object": not isinstance(args.extra_body, dict),
    }
    return _too_small(args) or next((problem for problem, is_wrong in checks.items() if is_wrong), None)
