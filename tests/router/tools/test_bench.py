"""The load generator's decisions: what is asked, when, and what is reported."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from router.tools.bench import client
from router.tools.bench.arrivals import ArrivalProcess, pauses
from router.tools.bench.command import conversations, main, save
from router.tools.bench.datasets import PromptLengths, prefix_repetition, random_prompts, sharegpt
from router.tools.bench.report import RequestResult, meets, report, summary
from router.tools.bench.settings import parse_args


def test_random_prompts() -> None:
    shape = PromptLengths(input_len=10, output_len=5, prefix_len=3, range_ratio=0.5)
    found = random_prompts(shape, random.Random(0), 50)
    assert found == random_prompts(shape, random.Random(0), 50)
    prompts = [conversation[0].prompt for conversation in found]
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} <= set(range(8, 19))
    assert len({len(prompt) for prompt in prompts}) > 3
    assert {conversation[0].output_len for conversation in found} <= set(range(2, 9))
    (turns,) = random_prompts(PromptLengths(num_turns=3), random.Random(0), 1)
    assert [isinstance(turn.prompt, str) for turn in turns] == [True] * 3


def test_shared_prefixes() -> None:
    shape = PromptLengths(prefix_len=6, output_len=5)
    found = prefix_repetition(shape, random.Random(1), 30, num_prefixes=3, suffix_len=4)
    prefixes = [tuple(conversation[0].prompt[:6]) for conversation in found]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10, 10, 10]
    assert len({tuple(conversation[0].prompt) for conversation in found}) == 30


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [
        ("a question of some length", "an answer of some length " * 3),
        ("x", "too short a question, that one"),
    ]
    turns += [("too long " * 1000, "short answer, but of some length")]
    file.write_text(
        json.dumps(
            [
                {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
                for q, a in turns
            ]
        )
    )
    found = sharegpt(file, random.Random(0), 3)
    assert [(conversation[0].prompt, conversation[0].output_len) for conversation in found] == [
        (turns[0][0], 18)
    ] * 3
    assert sharegpt(file, random.Random(0), 1, output_len=7)[0][0].output_len == 7
    silent = [{"from": "human", "value": None}, {"from": "gpt", "value": "an answer of some length"}]
    file.write_text(json.dumps([{"conversations": silent}]))
    with pytest.raises(ValueError, match="has no question of"):
        sharegpt(file, random.Random(0), 1)
    file.write_text('{"no": "list"}')
    with pytest.raises(ValueError, match="is no ShareGPT file"):
        sharegpt(file, random.Random(0), 1)


def test_arrivals() -> None:
    rng = random.Random(0)
    assert set(pauses(ArrivalProcess(), rng, 5)) == {0.0}
    assert list(pauses(ArrivalProcess(burst_size=2, burst_interval=3.0), rng, 5)) == [0.0, 3.0, 0.0, 3.0, 0.0]
    steady = list(pauses(ArrivalProcess(request_rate=10, burstiness=1000), rng, 200))
    assert statistics.fmean(steady) == pytest.approx(0.1, rel=0.02)
    rising = list(
        pauses(ArrivalProcess(ramp_up="linear", ramp_start=1, ramp_end=100, burstiness=1e6), rng, 100)
    )
    assert rising[0] == pytest.approx(1, rel=0.1)
    assert rising[-1] == pytest.approx(0.01, rel=0.1)


def test_a_run_ends_with_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be waited for a further request is no part of its duration."""

    async def answered(*_: object) -> RequestResult:
        return RequestResult(input_len=1, output_len=1)

    monkeypatch.setattr(client, "send", answered)
    conversations = random_prompts(PromptLengths(), random.Random(0), 2)
    target = client.BenchTarget(base_url="", endpoint="", model="m")
    arrivals = ArrivalProcess(burst_size=2, burst_interval=60.0)

    async def run() -> float:
        async with client.session() as http:
            return (await client.run(http, target, conversations, arrivals=arrivals))[1]

    assert asyncio.run(asyncio.wait_for(run(), 10)) < 5.0


def test_summary_and_goodput() -> None:
    fast = RequestResult(input_len=10, output_len=3, ttft=0.1, itl=[0.1, 0.1], latency=0.3)
    slow = RequestResult(input_len=10, output_len=3, ttft=0.9, itl=[0.4, 0.4], latency=1.7)
    failed = RequestResult(input_len=10, error="HTTP 500")
    assert meets(fast, {"ttft": 100.1, "tpot": 100.1})
    assert not meets(slow, {"tpot": 300})
    assert not meets(failed, {})
    result = summary(
        [fast, slow, failed],
        2.0,
        described={"max_concurrency": 4, "request_rate": "inf"},
        goals={"ttft": 500},
    )
    assert (result["completed"], result["failed"], result["num_prompts"]) == (2, 1, 3)
    assert result["request_goodput"] == 0.5
    assert result["output_throughput"] == 3.0
    assert result["median_ttft_ms"] == pytest.approx(500)
    assert result["mean_itl_ms"] == pytest.approx(250)
    assert result["p99_e2el_ms"] == pytest.approx(1686)
    text = report(result, ["ttft", "itl"], [99.0])
    assert "Successful requests:                     2" in text
    assert "Request goodput (req/s):                 0.50" in text
    assert "Request rate configured" not in text
    assert "End-to-end" not in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--goodput", "speed:3"], "goals are ttft, tpot, e2el"),
        (["--ramp-up-strategy", "linear"], "need each other"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--request-rate", "0"], "must be above 0"),
        (["--request-rate", "nan"], "must be above 0"),
        (
            ["--prefix-repetition-output-len", "-1"],
            "--prefix-repetition-output-len must be at least 1, not -1",
        ),
        (["--port", "0"], "--port must be at least 1, not 0"),
        (["--concurrency", "8", "0"], "--concurrency must be at least 1, not 0"),
        (["--random-vocab", "16"], "--random-vocab must be at least 17, not 16"),
        (["--serve", "-dp 2", "--base-url", "http://x"], "leave out --base-url"),
        (["--config", "x", "--base-url", "http://x"], "--config says where: leave out --base-url"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read"),
        (["--percentile-metrics", "foo"], "metrics are ttft"),
        (["--header", "x"], "'x' must be NAME=VALUE"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_flags_may_have_underscores() -> None:
    assert parse_args(["--num_prompts", "7", "--random_input_len=9"]).num_prompts == 7


def test_flags_for_requests_and_results(tmp_path: Path) -> None:
    argv = [
        "--header",
        "X-Session-Id=a=b",
        "X-A=",
        "--label",
        "mine",
        "--metadata",
        "gpu=none",
        "--top-k",
        "3",
    ]
    args = parse_args([*argv, "--save-result", "--result-dir", str(tmp_path)])
    assert args.header == {"X-Session-Id": "a=b", "X-A": ""}
    assert (args.metadata, args.sampling) == ({"gpu": "none"}, {"top_k": 3})
    save(args, [{"max_concurrency": None, "model_id": "m", "request_rate": "inf", "date": "d"}])
    assert [path.name for path in tmp_path.iterdir()] == ["mine-infqps-m-d.json"]


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--base-url", "http://x:1"], "http://x:1/v1/completions"),
        (["--base-url", "http://x:1/v1/"], "http://x:1/v1/completions"),
        (["--base-url", "http://x:1/a/v1", "--backend", "openai-chat"], "http://x:1/a/v1/chat/completions"),
        (["--base-url", "http://x:1/v1", "--endpoint", "/v1/other"], "http://x:1/v1/other"),
        (["--base-url", "http://x:1/v1", "--endpoint", "/other"], "http://x:1/v1/other"),
        (["--base-url", "http://x:1", "--endpoint", "/other"], "http://x:1/other"),
    ],
)
def test_the_base_url_may_be_that_of_the_api(argv: list[str], asked: str) -> None:
    args = parse_args(argv)
    assert args.base_url + args.endpoint == asked
    assert not args.base_url.endswith("/v1"), "models are listed at /v1/models behind it"


@pytest.mark.parametrize("argv", [["--result-filename", "a/b.json"], ["--label", "a/b"]])
def test_results_may_go_into_folders(argv: list[str], tmp_path: Path) -> None:
    run = {"max_concurrency": None, "model_id": "m", "request_rate": "inf", "date": "d"}
    save(parse_args([*argv, "--save-result", "--result-dir", str(tmp_path)]), [run])
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["a"]


def test_a_tokenizer_that_is_broken_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    flags = ["--dataset-name", "sharegpt", "--dataset-path", "x", "--tokenizer", str(tmp_path)]
    with pytest.raises(ValueError, match=r"--tokenizer: .*tokenizer\.json is broken"):
        conversations(parse_args(flags), random.Random(0), 1)


def test_results_of_several_runs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    argv = [
        "--concurrency",
        "1",
        "8",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "x.json",
    ]
    run = {"model_id": "m", "request_rate": "inf", "date": "d"}
    save(parse_args(argv), [{"max_concurrency": limit, **run} for limit in (1, 8)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-concurrency1.json", "x-concurrency8.json"]
    save(parse_args(argv), [{"max_concurrency": 1, **run}])
    assert (tmp_path / "x.json").is_file()


def test_headers_go_with_every_request() -> None:
    async def run() -> dict[str, str]:
        async with client.session({"X-A": "1", "Authorization": "Bearer mine"}) as http:
            return dict(http.headers)

    assert asyncio.run(run()) == {"X-A": "1", "Authorization": "Bearer mine"}


def test_where_results_cannot_go_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    saved = ["--save-result", "--result-dir", str(tmp_path)]
    for flags in (
        ["--output-json", str(tmp_path)],
        ["--output-json", str(tmp_path / "file" / "results.json")],
        [*saved, "--result-filename", "folder"],
        [*saved, "--result-filename", "file/results.json"],
        [*saved, "--label", "file/mine"],
    ):
        assert (
            main(["serve", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0", *flags]) == 1
        )
        said = capsys.readouterr().err
        assert "lockstep bench serve: error:" in said
        assert "waiting for" not in said
        assert "cannot be measured" not in said


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (200, b"<html>", "ContentTypeError"),
        (401, b"{}", r"401.*\(LOCKSTEP_API_KEY, OPENAI_API_KEY\)"),
        (404, b"{}", "404"),
    ],
)
def test_a_server_that_will_never_do_is_not_waited_for(status: int, page: bytes, said: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            pass

    async def look(url: str) -> None:
        async with client.session() as http:
            await client.model_name(http, url, timeout=600)

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(client.Unmeasurable, match=said):
            asyncio.run(look(f"http://127.0.0.1:{server.server_address[1]}"))
    with pytest.raises(client.Unmeasurable, match="cannot be measured: InvalidUrl"):
        asyncio.run(look("http://[nowhere"))


def test_a_server_that_may_come_is_waited_for_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async def look() -> None:
        async with client.session() as http:
            await client.model_name(http, "http://127.0.0.1:9", timeout=0.7)

    with pytest.raises(client.Unmeasurable, match="ClientConnectorError"):
        asyncio.run(look())
    assert capsys.readouterr().err.count("waiting for http://127.0.0.1:9, at most 0.7 s") == 1


def test_there_is_only_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput"]) == 2
    assert "lockstep bench serve" in capsys.readouterr().err
    assert main(["--help"]) == 0
