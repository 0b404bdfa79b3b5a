"""``lockstep bench serve``: runs and files of results.

Flags, report and result files are those of ``vllm bench serve``, so that numbers compare by eye. Beyond
that, ``--concurrency 1 8 32`` makes a series of runs with one table at the end, and ``--serve ARGS`` starts a
mesh of its own. Time to first token is taken at the first chunk that says something, inter-token latency
between such chunks; token counts are those that the server reports as usage.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.distribution import install_extra
from coordinator.process import process
from router.tools.bench.arrivals import INFINITE
from router.tools.bench.datasets import (
    Conversation,
    PromptLengths,
    prefix_repetition,
    random_prompts,
    sharegpt,
)
from router.tools.bench.report import DETAILS, Result, machine, report, summary, table
from router.tools.bench.settings import PROG, BenchConfig, parse_args
from router.tools.local_mesh import mesh

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from router.tools.bench.client import BenchTarget


def main(argv: list[str]) -> int:
    """Run ``lockstep bench serve`` or ``machine``; returns 1 if a request failed."""
    if argv[:1] == ["machine"]:
        from router.tools.bench import machine_command

        return machine_command.main(argv[1:])
    if argv[:1] != ["serve"]:
        helps = argv[:1] in (["-h"], ["--help"])
        print(
            f"usage: {PROG} ...  (measures a server; see {PROG} --help), or lockstep bench machine",
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
        with server as base_url:
            return uvloop.run(bench(replace(args, base_url=base_url)))
    except KeyboardInterrupt:
        return 130
    except (Unmeasurable, ValueError, OSError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return process.EXIT_FAILED


async def bench(args: BenchConfig) -> int:
    from router.tools.bench import client

    results = []
    where = args.endpoint_config
    async with client.session(args.header, key=args.key, trust=where.trust(), path=where.uds) as http:
        name = args.model or await client.model_name(http, args.base_url, args.ready_check_timeout_sec)
        target = client.BenchTarget(
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
    http: ClientSession, target: BenchTarget, args: BenchConfig, concurrency: int | None, number: int
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
            arrivals=args.arrivals,
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


def conversations(args: BenchConfig, rng: random.Random, count: int) -> list[Conversation]:
    """Conversations of one run, from the dataset that was named.

    Raises:
        ValueError: the file of --dataset-path cannot be used.
    """
    as_text = args.backend == "openai-chat"
    if args.dataset_name == "sharegpt" and args.dataset_path is not None:
        kwargs: dict[str, Any] = {"num_tokens": _counter(args.tokenizer)} if args.tokenizer else {}
        return sharegpt(args.dataset_path, rng, count, output_len=args.sharegpt_output_len, **kwargs)
    if args.dataset_name == "prefix_repetition":
        shape = PromptLengths(
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
    shape = PromptLengths(
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


def save(args: BenchConfig, results: Sequence[Result]) -> None:
    """Write results: a file per run (--save-result), all sums in one (--output-json)."""
    for result in results if args.save_result else ():
        file = _file_of(args, result, is_one_of_several=len(results) > 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))
    if args.output_json:
        sums = [{key: result[key] for key in result if key[:-1] not in DETAILS} for result in results]
        page = {"command": shlex.join(sys.argv), "machine": machine(), "runs": sums}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


def _file_of(args: BenchConfig, result: Result, *, is_one_of_several: bool) -> Path:
    """File to save a run to, by default under vLLM's kind of name."""
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


def _check_places(args: BenchConfig) -> None:
    """Check that results can be written, before anything is measured.

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
