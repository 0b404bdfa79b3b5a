"""Settings of ``lockstep bench serve``: one struct, with flags of vLLM's names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from coordinator.settings.command_line import OneLineParser
from coordinator.settings.errors import FlagError
from coordinator.settings.flags import Count, Field, Natural, fields_of, flag, from_flat
from router.launcher.endpoint_config import EndpointConfig
from router.tools.bench.arrivals import INFINITE, ArrivalProcess
from router.tools.bench.datasets import LOWEST_ID
from router.tools.bench.report import METRICS

PROG = "lockstep bench serve"
GOALS = ("ttft", "tpot", "e2el")
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
"""Fields that go into each request."""
METAVARS = {
    "uds": "PATH",
    "config": "FILE",
    "serve": "ARGS",
    "goodput": "GOAL",
    "header": "NAME=VALUE",
    "metadata": "KEY=VALUE",
    "output_json": "FILE",
}
SEVERAL: dict[str, Callable[[list[Any]], Any]] = {
    "concurrency": tuple,
    "goodput": dict,
    "header": dict,
    "metadata": dict,
}
"""Settings that take several words, and what these make together."""

_SAMPLED = flag(help="sampling parameter (default: the server's)")


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What is measured, and how."""

    backend: Annotated[Literal["openai", "vllm", "openai-chat"], flag(help="API to measure")] = "openai"
    base_url: Annotated[
        str, flag(help="base URL of the server, with or without /v1 (default: http://127.0.0.1:8000)")
    ] = ""
    host: Annotated[str | None, flag(help="host of the server, instead of --base-url")] = None
    port: Annotated[Count | None, flag(help="port of the server, instead of --base-url")] = None
    uds: Annotated[str | None, flag(help="path of the server's Unix socket, instead of --base-url")] = None
    config: Annotated[
        str | None, flag(help="settings file of serve, for the server's host, port, certificate and key")
    ] = None
    serve: Annotated[str | None, flag(help="start 'serve ARGS' for the runs, instead of --base-url")] = None
    endpoint: Annotated[
        str, flag(help="path of the API (default: /v1/completions or /v1/chat/completions)")
    ] = ""
    model: Annotated[
        str | None, flag(help="model name in requests (default: the first that the server lists)")
    ] = None
    tokenizer: Annotated[
        Path | None, flag(help="directory with tokenizer.json, to count the tokens of a ShareGPT file")
    ] = None
    dataset_name: Annotated[
        Literal["random", "prefix_repetition", "sharegpt", "multi_turn"], flag(help="kind of prompts")
    ] = "random"
    dataset_path: Annotated[Path | None, flag(help="JSON file of the dataset sharegpt")] = None
    random_input_len: Annotated[Count, flag(help="tokens per prompt")] = 128
    random_output_len: Annotated[Count, flag(help="tokens to generate per prompt")] = 64
    random_prefix_len: Annotated[Natural, flag(help="tokens of a prefix shared by all prompts")] = 0
    random_range_ratio: Annotated[
        float, flag(help="relative variation of lengths, 0 to below 1 (default: 0)")
    ] = 0.0
    random_vocab: Annotated[int, Meta(ge=LOWEST_ID + 1), flag(help="token ids are below this")] = 4096
    sharegpt_output_len: Annotated[
        Count | None, flag(help="tokens to generate, instead of the lengths in the file")
    ] = None
    prefix_repetition_prefix_len: Annotated[Natural, flag(help="tokens per prefix")] = 256
    prefix_repetition_suffix_len: Annotated[Count, flag(help="tokens per suffix")] = 256
    prefix_repetition_num_prefixes: Annotated[Count, flag(help="number of prefixes")] = 10
    prefix_repetition_output_len: Annotated[Count, flag(help="tokens to generate")] = 128
    multi_turn_num_turns: Annotated[Count, flag(help="turns per conversation")] = 4
    num_prompts: Annotated[
        Count | None, flag(help="prompts, or conversations, per run (default: 4 x concurrency, at least 32)")
    ] = None
    request_rate: Annotated[float, flag(help="requests per second")] = INFINITE
    burstiness: Annotated[float, flag(help="burstiness of arrivals: 1 is Poisson, less has more bursts")] = (
        1.0
    )
    burst_size: Annotated[Count | None, flag(help="requests sent together, instead of a rate")] = None
    burst_interval: Annotated[float, flag(help="seconds between two bursts")] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, flag(help="growth of the request rate over the run")
    ] = None
    ramp_up_start_rps: Annotated[float | None, flag(help="requests per second at the start of the run")] = (
        None
    )
    ramp_up_end_rps: Annotated[float | None, flag(help="requests per second at the end of the run")] = None
    max_concurrency: Annotated[Count | None, flag(help="most requests in flight")] = None
    concurrency: Annotated[tuple[Count, ...], flag(help="a series of runs with these --max-concurrency")] = ()
    goodput: Annotated[
        dict[str, float], flag(help="count requests within these milliseconds, like ttft:500 tpot:50")
    ] = {}
    ignore_eos: Annotated[bool, flag(help="generate exactly the requested number of tokens")] = False
    temperature: Annotated[float, flag(help="sampling temperature (default: 0, greedy)")] = 0.0
    top_p: Annotated[float | None, _SAMPLED] = None
    top_k: Annotated[int | None, _SAMPLED] = None
    min_p: Annotated[float | None, _SAMPLED] = None
    frequency_penalty: Annotated[float | None, _SAMPLED] = None
    presence_penalty: Annotated[float | None, _SAMPLED] = None
    extra_body: Annotated[Any, flag(help="JSON object merged into each request")] = {}
    header: Annotated[dict[str, str], flag(help="headers of every request")] = {}
    seed: Annotated[int, flag(help="seed of prompts and arrivals")] = 0
    percentile_metrics: Annotated[tuple[str, ...], flag(help="metrics with percentiles")] = tuple(METRICS)
    metric_percentiles: Annotated[tuple[float, ...], flag(help="percentiles, such as 50,99")] = (99.0,)
    num_warmups: Annotated[Natural, flag(help="warm-up requests before each run")] = 4
    save_result: Annotated[bool, flag(help="write a JSON file per run into --result-dir")] = False
    label: Annotated[str | None, flag(help="label in results and file names, instead of the backend")] = None
    metadata: Annotated[dict[str, str], flag(help="additional fields of results")] = {}
    result_dir: Annotated[Path, flag(help="directory of results (default: the current one)")] = Path()
    result_filename: Annotated[
        str | None, flag(help="name of the result file (default: made from the run)")
    ] = None
    output_json: Annotated[Path | None, flag(help="write the summaries of all runs into one file")] = None
    ready_check_timeout_sec: Annotated[
        float, flag(help="seconds to wait for a ready server, 0: no check")
    ] = 600.0
    disable_tqdm: Annotated[bool, flag(help="show no progress bar")] = False

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that were given as flags."""
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}

    @property
    def arrivals(self) -> ArrivalProcess:
        """Arrival process of the requests."""
        return ArrivalProcess(
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            burst_size=self.burst_size,
            burst_interval=self.burst_interval,
            ramp_up=self.ramp_up_strategy,
            ramp_start=self.ramp_up_start_rps or 1.0,
            ramp_end=self.ramp_up_end_rps or 1.0,
        )

    @cached_property
    def endpoint_config(self) -> EndpointConfig:
        """The server on this host, where no base URL is given.

        Raises:
            FlagError: the file of --config cannot be used.
        """
        if self.config is None:
            return EndpointConfig(host=self.host or "127.0.0.1", port=self.port or 8000, uds=self.uds)
        given = {
            name: value for name in ("host", "port", "uds") if (value := getattr(self, name)) is not None
        }
        return from_flat(EndpointConfig, {"config": self.config, **given}, shares_file=True)

    @property
    def key(self) -> str | None:
        """API key of requests."""
        return next(iter(self.endpoint_config.api_key), None)


def parse_args(argv: Sequence[str]) -> BenchConfig:
    """Wrong values end the process with exit code 2 and a message."""
    parser = OneLineParser(
        prog=PROG,
        description="Measure a server that speaks OpenAI's API.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field in fields_of(BenchConfig):
        _add(parser, field)
    given = vars(parser.parse_args(argv))
    for name in given.keys() & SEVERAL.keys():
        given[name] = SEVERAL[name](given[name])
    config = BenchConfig(**given)
    try:
        if (problem := next(_problems(config), None)) is not None:
            parser.error(problem)
        where = config.endpoint_config
    except FlagError as error:
        parser.error(str(error))
    if where.uds and where.ssl_certfile:
        parser.error("--uds with ssl-certfile: HTTPS at a Unix socket cannot be measured")
    return _with_addresses(config, where)


def _add(parser: OneLineParser, field: Field) -> None:
    """The flag of a setting, with its default in the help text."""
    default, text = field.default, field.help
    if isinstance(default, tuple):
        default = ",".join(each if isinstance(each, str) else f"{each:g}" for each in default)
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        shown = f"{default:g}" if isinstance(default, float) else default
        text += f" (default: {shown})" * ("(default: " not in text)
    if field.kind is bool:
        parser.add_argument(field.long_name, action="store_true", help=text)
        return
    parser.add_argument(
        field.long_name,
        type=_READ.get(field.key, field.kind),
        choices=field.choices or None,
        nargs="+" if field.key in SEVERAL else None,
        metavar=METAVARS.get(field.key),
        help=text,
    )


def _with_addresses(config: BenchConfig, where: EndpointConfig) -> BenchConfig:
    """The settings with one base URL, without /v1, and the path of the API."""
    backend = "openai" if config.backend == "vllm" else config.backend
    base_url = (config.base_url or where.base_url).rstrip("/")
    endpoint = config.endpoint or f"/v1/{'chat/' * (backend == 'openai-chat')}completions"
    if base_url.endswith("/v1"):  # as serve prints it
        base_url = base_url.removesuffix("/v1")
        endpoint = "/v1" + endpoint.removeprefix("/v1")
    return msgspec.structs.replace(config, backend=backend, base_url=base_url, endpoint=endpoint)


def _problems(config: BenchConfig) -> Iterator[str]:
    """Problems with the settings, in words."""
    yield from _too_small(config)
    rates = [config.request_rate, config.burstiness, config.burst_interval]
    rates += [rate for rate in (config.ramp_up_start_rps, config.ramp_up_end_rps) if rate is not None]
    ramp = (config.ramp_up_strategy, config.ramp_up_start_rps, config.ramp_up_end_rps)
    is_placed = config.host or config.port or config.uds
    if config.serve is not None and (config.base_url or is_placed):
        yield "--serve starts its own server: leave out --base-url, --host, --port and --uds"
    if config.config is not None and (config.base_url or config.serve is not None):
        yield "--config says where: leave out --base-url and --serve"
    if config.base_url and is_placed:
        yield "--base-url says where: leave out --host, --port and --uds"
    if not all(rate > 0 for rate in rates):
        yield "rates, --burstiness and --burst-interval must be above 0"
    if not 0 <= config.random_range_ratio < 1:
        yield "--random-range-ratio is from 0 to below 1"
    if len({each is None for each in ramp}) > 1:
        yield "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps need each other"
    if config.burst_size and config.ramp_up_strategy:
        yield "--burst-size and --ramp-up-strategy exclude each other"
    if config.dataset_name == "sharegpt" and not config.dataset_path:
        yield "--dataset-name sharegpt needs --dataset-path"
    if set(config.percentile_metrics) - set(METRICS):
        yield f"metrics are {', '.join(METRICS)}"
    if not all(0 <= each <= 100 for each in config.metric_percentiles):
        yield "percentiles are numbers from 0 to 100"
    if not isinstance(config.extra_body, dict):
        yield "--extra-body must be a JSON object"


def _too_small(config: BenchConfig) -> Iterator[str]:
    """Counts and lengths below the bounds of their types."""
    about = inspect.type_info(BenchConfig)
    assert isinstance(about, inspect.StructType)
    for field in about.fields:
        least, given = _least(field.type), getattr(config, field.name)
        for value in given if isinstance(given, tuple) else (given,):
            if least is not None and value is not None and value < least:
                yield f"--{field.name.replace('_', '-')} must be at least {least}, not {value}"


def _least(kind: inspect.Type) -> int | None:
    """The lowest number of a type, if it has one."""
    match kind:
        case inspect.Metadata(inner) | inspect.VarTupleType(item_type=inner):
            return _least(inner)
        case inspect.UnionType(kinds):
            return next((least for each in kinds if (least := _least(each)) is not None), None)
        case inspect.IntType(ge=least):
            return least
    return None


def _percents(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


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


_READ: dict[str, Callable[[str], Any]] = {
    "goodput": _goal,
    "header": _pair,
    "metadata": _pair,
    "extra_body": json.loads,
    "percentile_metrics": _names,
    "metric_percentiles": _percents,
}
"""Settings that are read from a text of their own form."""
