"""KV blocks that travel between real instances, which stop and die meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from tests.mesh.clients.test_clients import metrics
from tests.mesh.harness import Ports, free_port, serve, wait_until
from tests.nightly import NIGHTLY

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

FLAGS = ["--dtype", "bfloat16", "--num-gpu-blocks-override", "600", "--no-enable-expert-parallel"]
LENGTH = 1000
"""Tokens of a prompt."""


def places(*, on_devices: Sequence[pytest.MarkDecorator]) -> pytest.MarkDecorator:
    """Workers, and caches on the host or on a device, which has these marks."""
    return pytest.mark.parametrize(
        ("workers", "where"),
        [
            ((), "host"),
            pytest.param(("-tp", "2"), "host", marks=pytest.mark.nightly),
            pytest.param(("-pp", "2"), "host", marks=pytest.mark.nightly),
            pytest.param((), "device", marks=on_devices),
        ],
        indirect=["where"],
        ids=["", "-tp 2", "-pp 2", "device"],
    )


STAGED = "KV blocks are copied through host memory"
"""Line in the log of an instance whose cache is on a device."""
LONG, MEDIUM, SHORT = 1400, 1000, 400
"""Tokens of an answer that outlasts two drains and a change of instances."""


def ask(ports: Ports, first: int, rank: int) -> tuple[list[int], list[str], int]:
    """Token ids, log-probabilities and cached tokens of an answer of one instance."""
    prompt = [4 + (first + 7 * index) % 4000 for index in range(LENGTH)]
    body = {
        "model": SHIPPED_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.8, "seed": 5, "logprobs": 1,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{ports.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-data-parallel-rank": str(rank)},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    choice: dict[str, Any] = found["choices"][0]
    logprobs = [each.hex() for each in choice["logprobs"]["token_logprobs"]]
    return choice["token_ids"], logprobs, found["usage"]["prompt_tokens_details"]["cached_tokens"]


def of(ports: Ports, name: str, rank: int, **labels: str) -> float:
    labels |= {"engine": str(rank), "model_name": SHIPPED_MODEL}
    shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return metrics(ports).get(f"{name}{{{shown}}}", 0.0)


@places(on_devices=[])
def test_blocks_of_another_instance_spare_computing_and_change_no_bit(
    tmp_path: Path, workers: tuple[str, ...], where: str
) -> None:
    ports = Ports()
    flags = [*FLAGS, *workers, "--enable-prompt-tokens-details"]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        assert (STAGED in command.log) == (where == "device")
        for first in (10, 500):
            *computed, cached = ask(ports, first, rank=0)
            assert cached == 0
            time.sleep(0.3)  # its blocks are reported at the latest by then
            *fetched, cached = ask(ports, first, rank=1)
            assert fetched == computed
            assert cached == (LENGTH - 1) // 16 * 16
        wait_until(
            lambda: of(ports, "lockstep:kv_fetches_total", 1, outcome="whole") == 2, 5, "it is counted"
        )
        assert of(ports, "vllm:external_prefix_cache_hits_total", 1) == 2 * 992
        assert of(ports, "vllm:prompt_tokens_by_source_total", 1, source="external_kv_transfer") == 2 * 992
        assert of(ports, "lockstep:kv_lent_blocks_total", 0) == 2 * 62
        assert of(ports, "lockstep:kv_fetched_bytes_total", 1) > 0

        before = list(ask(ports, 900, rank=0)[:2])
        time.sleep(0.3)
        source = command.child("Engine_0")
        source.send_signal(signal.SIGSTOP)  # it keeps its connections, and answers nothing
        began = time.monotonic()
        *stopped, cached = ask(ports, 900, rank=1)
        assert stopped == before
        assert cached < 992
        assert time.monotonic() - began < 30
        source.send_signal(signal.SIGCONT)

        before = list(ask(ports, 1300, rank=0)[:2])
        time.sleep(0.3)
        killer = threading.Timer(0.004, (command.child("Worker_0_PP") if workers else source).kill)
        killer.start()  # while its blocks are fetched
        assert list(ask(ports, 1300, rank=1)[:2]) == before
        wait_until(lambda: of(ports, "vllm:kv_cache_usage_perc", 1) == 0, 10, "nothing is held")
        assert "Traceback" not in command.log
        command.stop()


@pytest.mark.skipif(not NIGHTLY, reason="at night")
def test_workers_that_share_experts_with_others_lend_their_shards_and_die(tmp_path: Path) -> None:
    ports = Ports()
    flags = [*FLAGS, "-ep", "-tp", "2", "--enable-prompt-tokens-details"]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        for first in (10, 500):
            computed = ask(ports, first, rank=0)[:2]
            time.sleep(0.3)
            *fetched, cached = ask(ports, first, rank=1)
            assert tuple(fetched) == computed
            assert cached == (LENGTH - 1) // 16 * 16
        assert of(ports, "vllm:external_prefix_cache_hits_total", 1) == 2 * 992
        computed = ask(ports, 1300, rank=0)[:2]
        command.child("Worker_0_PP").kill()
        assert ask(ports, 1300, rank=1)[:2] == computed
        assert "Traceback" not in command.log
        command.stop()


def test_blocks_stay_where_they_are_if_that_is_wished(tmp_path: Path) -> None:
    ports = Ports()
    flags = [*FLAGS, "--enable-prompt-tokens-details", "--no-enable-kv-transfer"]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        assert "KV blocks are lent" not in command.log
        computed = ask(ports, 10, rank=0)
        time.sleep(0.3)
        assert ask(ports, 10, rank=1) == computed
        assert of(ports, "vllm:external_prefix_cache_queries_total", 1) == 0
        assert command.stop() == 0


@places(on_devices=[pytest.mark.nightly])
def test_requests_of_a_drained_instance_move_with_their_blocks(
    tmp_path: Path, workers: tuple[str, ...], where: str
) -> None:
    ports = Ports()
    flags = [*FLAGS, *workers, "--num-gpu-blocks-override", "1200", "--drain-timeout", "0"]
    length = SHORT if workers else LONG  # on two cores workers wait for each other
    prompts = [[4 + (90 * each + 7 * index) % 4000 for index in range(600)] for each in range(8)]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        assert (STAGED in command.log) == (where == "device")
        moved = asyncio.run(streams(ports, prompts, command.child("Engine_1").terminate, tokens=length))
        wait_until(lambda: "are back after" in command.log, 10, "all have moved")
        found = re.search(
            r"(\d+) requests of instance 1 are back .* (\d+) tokens computed again, (\d+) were cached",
            command.log,
        )
        assert found is not None, command.log
        number, computed, cached = map(int, found.groups())  # others had their last token before
        assert cached >= number * 592
        # the block in the making came, too, unless a copy or a hand-over came to nothing
        assert computed == 0 or any(
            of(ports, "lockstep:kv_fetches_total", 0, outcome=each)
            for each in ("absent", "refused", "lost", "slow")
        )
        assert "left to the routers" not in command.log
        assert asyncio.run(streams(ports, prompts, tokens=length)) == moved
        wait_until(lambda: of(ports, "vllm:kv_cache_usage_perc", 0) == 0, 10, "nothing is held")
        assert "Traceback" not in command.log
        command.stop()


async def streams(
    ports: Ports,
    prompts: list[list[int]],
    act: Callable[[], object] | None = None,
    *,
    tokens: int = 250,
    all_have_begun: asyncio.Event | None = None,
) -> list[tuple[list[int], list[str]]]:
    """Token ids and log-probabilities of answers.

    With ``act``, all run at instance 1, and it is called once they have begun. ``all_have_begun`` is set then.
    """
    begun: set[int] = set()
    all_have_begun = all_have_begun or asyncio.Event()

    async def ask(client: openai.AsyncOpenAI, index: int) -> tuple[list[int], list[str]]:
        extra = {"x-data-parallel-rank": "1"} if act is not None else {}
        found: list[int] = []
        logprobs: list[str] = []
        async for chunk in await client.completions.create(
            model=SHIPPED_MODEL, prompt=prompts[index], max_tokens=tokens, temperature=0.8, seed=5, logprobs=1,
            stream=True, extra_headers=extra, extra_body={"return_token_ids": True, "ignore_eos": True},
        ):  # fmt: skip
            for choice in chunk.choices:
                found += choice.token_ids  # type: ignore[attr-defined]
                logprobs += (
                    [] if choice.logprobs is None else map(float.hex, choice.logprobs.token_logprobs or ())
                )
            if len(found) > 3:
                begun.add(index)
                if len(begun) == len(prompts):
                    all_have_begun.set()
        return found, logprobs

    async with openai.AsyncOpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
        asked = [asyncio.create_task(ask(client, index)) for index in range(len(prompts))]
        if act is not None:
            await asyncio.wait_for(all_have_begun.wait(), 60)
            act()
        return await asyncio.gather(*asked)


@pytest.mark.parametrize("where", ["host", pytest.param("device", marks=pytest.mark.nightly)], indirect=True)
def test_long_prompts_begin_at_one_instance_and_go_on_at_another(tmp_path: Path, where: str) -> None:
    ports = Ports()
    flags = [*FLAGS, "-dpl", "1", "--num-gpu-blocks-override", "1200", "--disaggregation-mode"]
    details = "--enable-prompt-tokens-details"
    prompts = [[4 + (90 * each + 7 * index) % 4000 for index in range(length)] for each, length in LENGTHS]
    with (
        serve(tmp_path / "head", "-dp", "2", *ports.head(), *flags, "decode", details) as head,
        serve(tmp_path / "other", "--headless", *ports.join(), *flags, "prefill") as other,
    ):
        head.wait_for("2 instances ready")
        assert (STAGED in head.log) == (where == "device")
        decoding = next(rank for rank in (0, 1) if f"Engine_{rank}" in head.log)
        moved = asyncio.run(streams(ports, prompts, tokens=MEDIUM))
        fetched = of(ports, "vllm:external_prefix_cache_hits_total", decoding)
        assert fetched >= 4 * 592, "of long prompts"
        wait_until(
            lambda: of(ports, "vllm:generation_tokens_total", decoding) > 3 * MEDIUM, 5, "they went on"
        )
        asked = sum(length for _, length in LENGTHS)
        wait_until(lambda: of_both(ports, "vllm:prompt_tokens_total") == asked, 5, "each prompt counts once")
        assert sources(ports) == {"local_compute": asked, "local_cache_hit": 0, "external_kv_transfer": 0}
        assert of_both(ports, "vllm:request_prefill_kv_computed_tokens_sum") == asked
        again = asyncio.run(streams(ports, prompts, tokens=MEDIUM))
        assert again == moved, "from the cache of the decoding one"
        assert of(ports, "vllm:external_prefix_cache_hits_total", decoding) < fetched + 592
        usage = asyncio.run(usage_of(ports, [3, *prompts[0]]))
        assert usage == (601, 0), "nothing was cached where its first token was given"
        wait_until(lambda: of_both(ports, "vllm:prompt_tokens_total") == 2 * asked + 601, 5, "and again")
        assert sum(sources(ports).values()) == 2 * asked + 601
        assert "are back after" not in head.log, "nothing was lost"
        other.child(f"Engine_{1 - decoding}").kill()
        alone = [[1, *prompt] for prompt in prompts]  # cached nowhere
        assert [len(tokens) for tokens, _ in asyncio.run(streams(ports, alone))] == [250] * len(alone)
        assert "Traceback" not in head.log
        head.stop()


LENGTHS = [(0, 600), (1, 600), (2, 60), (3, 600), (4, 60), (5, 600)]
"""Number and tokens of each prompt."""


def of_both(ports: Ports, name: str, **labels: str) -> float:
    return sum(of(ports, name, rank, **labels) for rank in (0, 1))


def sources(ports: Ports) -> dict[str, float]:
    """Prompt tokens of both instances, by where they came from."""
    name = "vllm:prompt_tokens_by_source_total"
    names = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: of_both(ports, name, source=source) for source in names}


async def usage_of(ports: Ports, prompt: list[int]) -> tuple[int, int]:
    """Tokens of a prompt, and the cached ones, as its answer has them."""
    async with openai.AsyncOpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(
            model=SHIPPED_MODEL, prompt=prompt, max_tokens=100, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_newcomer_has_the_hottest_prefix_before_its_first_request(tmp_path: Path) -> None:
    """Three prompts begin alike; what they share is copied, and answers stay the same."""
    ports = Ports()
    admin = free_port()
    flags = [*FLAGS, "--enable-prompt-tokens-details", "--admin-port", str(admin)]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        computed = [ask(ports, 10, rank=0)[:2] for _ in range(3)]
        time.sleep(0.3)  # its blocks are reported at the latest by then
        request = urllib.request.Request(
            f"http://127.0.0.1:{admin}/admin/scale", b'{"n": 3}', {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 202
        command.wait_for("copies 1 hot prefixes first")
        wait_until(lambda: of(ports, "vllm:external_prefix_cache_hits_total", 2) == 992, 20, "it has them")
        *found, cached = ask(ports, 10, rank=2)
        assert tuple(found) == tuple(computed[0])
        assert cached == (LENGTH - 1) // 16 * 16
        assert "Traceback" not in command.log
        command.stop()
