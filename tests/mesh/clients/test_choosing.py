"""Choosing among real instances through two front ends: prefixes, queues that move, limits and quotas."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.mesh.harness import Ports, serve, wait_until

pytestmark = pytest.mark.mesh

SLOTS, QUEUE = 2, 1
LIMITED = 5
SERVED = 250
"""Tokens of an answer that lasts for long beside a refusal."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two instances with two slots and one place to wait each."""
    directory: Path = tmp_path_factory.mktemp("choosing")
    limits = directory / "limits.yaml"
    limits.write_text(f"free: {{}}\nlimited: {{requests_per_minute: {LIMITED}}}\n")
    ports = Ports()
    flags = [
        "-dp", "2", "-asc", "2", "--no-enable-expert-parallel", "--enable-prompt-tokens-details",
        "--max-num-seqs", str(SLOTS), "--max-num-queued-reqs", str(QUEUE), "--max-num-batched-tokens", "512",
        "--num-gpu-blocks-override", "1000", "--api-key-limits", str(limits),
    ]  # fmt: skip
    slow = {"LOCKSTEP_NATIVE_KERNELS": "0"}  # so that answers take longer than a look at where they are
    with serve(directory / "log", *flags, *ports.head(), env=slow) as command:
        command.wait_for("2 instances ready")
        yield ports.url


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 4000) for _ in range(count)]


async def post(
    url: str, prompt: list[int], max_tokens: int, rank: int | None = None, key: str = "free"
) -> tuple[int, Any, dict[str, str]]:
    """Over a connection of its own, so that any front end may get it."""
    headers = {"authorization": f"Bearer {key}"}
    if rank is not None:
        headers["x-data-parallel-rank"] = str(rank)
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.json(), {k.lower(): v for k, v in response.headers.items()}


async def loads(url: str) -> dict[int, dict[str, int]]:
    headers = {"authorization": "Bearer free"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/loads") as response:
        return {each["dp_rank"]: each for each in (await response.json())["loads"]}


def until_idle(url: str) -> None:
    def idle() -> bool:
        return all(each["num_total_reqs"] == 0 for each in asyncio.run(loads(url)).values())

    wait_until(idle, 30, "nothing runs")


def test_a_prefix_is_found_again_whichever_front_end_is_asked(url: str) -> None:
    rng = random.Random(1)
    documents = [words(rng, 400) for _ in range(8)]

    async def ask_all() -> list[int]:
        for document in documents:
            await post(url, document, 1)
        await asyncio.sleep(1.0)  # the longest that a front end without streams there hears nothing, and more
        found = []
        for document in documents:
            status, answer, _ = await post(url, [*document, *words(rng, 20)], 1)
            assert status == 200
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    found = asyncio.run(ask_all())
    assert sum(cached == 400 for cached in found) >= 7, found


def test_sessions_of_claude_code_share_what_is_cached(url: str) -> None:
    """A first line that differs in each session is no part of the prompt."""
    rng = random.Random(4)
    rules = " ".join(rng.choice(["Mr. Darcy", "Mrs. Bennet", "the ball", "a carriage"]) for _ in range(300))

    def first_line(session: str, name: str = "x-anthropic-billing-header") -> str:
        return f"{name}: cc_version=2.1.331.{session}; cc_entrypoint=cli; cch={session};"

    async def usage(line: str, question: str) -> dict[str, int]:
        body = {
            "system": [{"type": "text", "text": line}, {"type": "text", "text": rules}],
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 1,
            "data_parallel_rank": 1,
        }
        async with (
            aiohttp.ClientSession(headers={"x-api-key": "free"}) as session,
            session.post(f"{url}/v1/messages", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            found: dict[str, int] = (await response.json())["usage"]
            return found

    async def ask_all() -> list[dict[str, int]]:
        await usage(first_line("00aa1"), "Who was at the ball?")
        other_line = first_line("9c3f2", "x-other-header")
        return [await usage(first_line("f00b4"), "Who danced?"), await usage(other_line, "Who danced?")]

    shared, apart = asyncio.run(ask_all())
    size = shared["input_tokens"] + shared["cache_read_input_tokens"]
    assert size > 600
    assert shared["cache_read_input_tokens"] > size - 50, "all but the question comes from the cache"
    assert apart["cache_read_input_tokens"] < 50, "another first line leaves nothing in common"


def test_a_full_mesh_refuses_at_once_and_no_more_are_let_in_than_fit(url: str) -> None:
    until_idle(url)
    rng = random.Random(2)

    async def crowd() -> list[tuple[int, float, dict[str, str]]]:
        async def one() -> tuple[int, float, dict[str, str]]:
            began = time.monotonic()
            status, _, headers = await post(url, words(rng, 20), SERVED)
            return status, time.monotonic() - began, headers

        return await asyncio.gather(*(one() for _ in range(24)))

    answers = asyncio.run(crowd())
    statuses = Counter(status for status, _, _ in answers)
    assert set(statuses) == {200, 503}
    assert 2 * SLOTS <= statuses[200] <= 2 * (SLOTS + QUEUE)
    refused = [(took, headers) for status, took, headers in answers if status == 503]
    served = [took for status, took, _ in answers if status == 200]
    assert max(took for took, _ in refused) < min(served), "who is refused need not wait for who is served"
    for _, headers in refused:
        assert (headers["retry-after"], headers["x-should-retry"]) == ("1", "true")


def test_a_queued_request_moves_to_the_instance_that_is_free_first(url: str) -> None:
    until_idle(url)
    rng = random.Random(3)

    async def scene() -> tuple[bool, bool]:
        long = [asyncio.create_task(post(url, words(rng, 20), 1500, rank=0)) for _ in range(SLOTS)]
        other = [asyncio.create_task(post(url, words(rng, 300), 1500, rank=1)) for _ in range(SLOTS)]
        await until(lambda now: [now[r]["num_running_reqs"] for r in sorted(now)] == [SLOTS, SLOTS])
        await asyncio.sleep(0.5)  # both front ends have heard of that
        queued = asyncio.create_task(post(url, words(rng, 20), 2))
        await until(lambda now: sum(each["num_waiting_reqs"] for each in now.values()) == 1)
        was_on_0 = (await loads(url))[0]["num_waiting_reqs"] == 1
        freed = other if was_on_0 else long
        busy = long if was_on_0 else other
        for task in freed:
            task.cancel()
        status, _, _ = await asyncio.wait_for(queued, 60)
        assert status == 200
        waits = not any(task.done() for task in busy)
        for task in [*long, *other]:
            task.cancel()
        await asyncio.gather(*long, *other, return_exceptions=True)
        return was_on_0, waits

    async def until(condition: Any) -> None:
        deadline = time.monotonic() + 30
        while not condition(await loads(url)):
            assert time.monotonic() < deadline, await loads(url)
            await asyncio.sleep(0.05)

    _, waits = asyncio.run(scene())
    assert waits, "it was served while those before it in its first queue still ran"
    until_idle(url)


def test_a_quota_holds_over_all_front_ends(url: str) -> None:
    until_idle(url)

    async def ask() -> Counter[int]:
        return Counter([(await post(url, [5, 6], 1, key="limited"))[0] for _ in range(3 * LIMITED)])

    assert asyncio.run(ask()) == {200: LIMITED, 429: 2 * LIMITED}


def test_a_pinned_request_goes_to_its_rank_or_nowhere(url: str) -> None:
    until_idle(url)
    status, answer, _ = asyncio.run(post(url, [5, 6], 1, rank=7))
    assert status == 400
    assert "no instance with data-parallel rank 7" in answer["error"]["message"]

    async def fill() -> list[int]:
        tasks = [post(url, [5, 6], SERVED, rank=1) for _ in range(SLOTS + QUEUE + 3)]
        return sorted(status for status, _, _ in await asyncio.gather(*tasks))

    statuses = asyncio.run(fill())
    assert statuses.count(200) <= SLOTS + QUEUE
    assert statuses.count(503) >= 3, "the other instance was free, but was not asked for"
