"""A real client of a real mesh of two instances: requests, answers, and what remains."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from engine.config import SHIPPED_MODEL
from tests.mesh.conftest import Mesh
from tests.mesh.harness import Ports, wait_until

pytestmark = pytest.mark.mesh

LETTERS = "abcdefgh"
LONG: dict[str, Any] = {"max_tokens": 30, "extra_body": {"ignore_eos": True}}
OPENING = "It is a truth universally acknowledged, that"


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metrics(mesh: Ports) -> dict[str, float]:
    """Every sample of /metrics by its full name, labels included."""
    with urllib.request.urlopen(f"{mesh.url}/metrics") as page:
        text = page.read().decode()
    return {
        name: float(value) for name, value in re.findall(r"^([a-zA-Z_:].*?) ([0-9.eE+-]+|NaN)$", text, re.M)
    }


def gauges(mesh: Ports) -> dict[str, float]:
    """What must be zero when nothing runs."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "requests_in_flight")
    return {
        name: value for name, value in metrics(mesh).items() if name.split("{")[0].split(":")[-1] in names
    }


def assert_idle(mesh: Ports) -> None:
    """Both instances and the router report no request and no block in use."""

    def idle() -> bool:
        found = gauges(mesh)
        loads = [member.load for member in mesh.view().members]
        return (
            len(found) >= 7
            and not any(found.values())
            and all(load.running == load.waiting == load.blocks_used == 0 for load in loads)
        )

    wait_until(idle, 15, "an idle mesh")


def generated_by_rank(mesh: Mesh) -> list[float]:
    return [
        value
        for name, value in sorted(metrics(mesh).items())
        if name.startswith("vllm:generation_tokens_total")
    ]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == SHIPPED_MODEL
    assert client.models.retrieve(SHIPPED_MODEL).id == SHIPPED_MODEL
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.models.retrieve("no-such")


def test_a_completion_reads_as_english(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=SHIPPED_MODEL, prompt=OPENING, max_tokens=60, seed=1)
    text = answer.choices[0].text
    words = re.findall(r"[a-z]+", text.lower())
    common = {"the", "and", "of", "to", "a", "in", "was", "her", "she", "i", "it", "he", "that", "had", "not"}
    assert len(words) > 25
    assert sum(word in common for word in words) > len(words) / 6, text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60


def test_both_instances_give_the_same_and_both_work(mesh: Mesh, client: openai.OpenAI) -> None:
    before = generated_by_rank(mesh)
    texts = [
        client.completions.create(
            model=SHIPPED_MODEL,
            prompt=OPENING,
            temperature=0,
            max_tokens=20,
            extra_headers={"X-data-parallel-rank": str(rank)},
        )
        .choices[0]
        .text
        for rank in (0, 1)
    ]
    assert texts[0] == texts[1]
    with ThreadPoolExecutor(
        8
    ) as crowd:  # one after the other would be for who has the beginning in its cache
        crowd.map(
            lambda letter: client.completions.create(model=SHIPPED_MODEL, prompt=letter, **LONG), LETTERS
        )
    wait_until(
        lambda: all(now > then + 25 for now, then in zip(generated_by_rank(mesh), before, strict=True)), 5
    )


def test_chat_with_all_kinds_of_content(client: openai.OpenAI) -> None:
    for content in ("Tell me about Elizabeth.", [{"type": "text", "text": "Tell me about Elizabeth."}]):
        answer = client.chat.completions.create(
            model=SHIPPED_MODEL,
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
            max_completion_tokens=30,
            temperature=0,
        )
        assert answer.choices[0].message.role == "assistant"
        assert len(answer.choices[0].message.content or "") > 20


def test_streams_equal_whole_answers_and_carry_usage(client: openai.OpenAI) -> None:
    fixed: dict[str, Any] = {"model": SHIPPED_MODEL, "prompt": OPENING, "max_tokens": 40, "seed": 3}
    whole = client.completions.create(**fixed)
    with client.completions.create(**fixed, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_n_samples_differ_and_are_reproducible(client: openai.OpenAI) -> None:
    answers = [
        client.completions.create(model=SHIPPED_MODEL, prompt=OPENING, max_tokens=20, n=2, seed=5)
        for _ in range(2)
    ]
    assert [choice.index for choice in answers[0].choices] == [0, 1]
    assert answers[0].choices[0].text != answers[0].choices[1].text
    assert [c.text for c in answers[0].choices] == [c.text for c in answers[1].choices]
    assert answers[0].usage is not None
    assert answers[0].usage.completion_tokens == 40


def test_stop_strings_and_ids(client: openai.OpenAI) -> None:
    free = client.completions.create(
        model=SHIPPED_MODEL,
        prompt=OPENING,
        max_tokens=40,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    text, ids = free.choices[0].text, free.choices[0].token_ids  # type: ignore[attr-defined]
    stop = text.split()[6]
    stopped = client.completions.create(
        model=SHIPPED_MODEL, prompt=OPENING, max_tokens=40, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    by_id = client.completions.create(
        model=SHIPPED_MODEL,
        prompt=OPENING,
        max_tokens=40,
        temperature=0,
        extra_body={"stop_token_ids": [ids[7]], "return_token_ids": True},
    )
    assert by_id.choices[0].stop_reason == ids[7]  # type: ignore[attr-defined]
    assert by_id.choices[0].token_ids == ids[: ids.index(ids[7]) + 1]  # type: ignore[attr-defined]


def test_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=SHIPPED_MODEL, prompt=OPENING, max_tokens=4, temperature=0, logprobs=3, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(OPENING)
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    for top, token in list(zip(logprobs.top_logprobs, logprobs.tokens, strict=True))[-4:]:
        assert max(top, key=lambda name: top[name]) == token, "greedy takes the most likely"
    chat = client.chat.completions.create(
        model=SHIPPED_MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content or []] == [2, 2, 2]


def test_prompts_as_lists_and_tokens(client: openai.OpenAI) -> None:
    texts = client.completions.create(
        model=SHIPPED_MODEL, prompt=["She was", "He was"], max_tokens=5, temperature=0
    )
    assert [choice.index for choice in texts.choices] == [0, 1]
    ids = client.post("../tokenize", body={"model": SHIPPED_MODEL, "prompt": "He was"}, cast_to=object)
    tokens = ids["tokens"]  # type: ignore[index]
    one = client.completions.create(model=SHIPPED_MODEL, prompt=tokens, max_tokens=5, temperature=0)
    many = client.completions.create(
        model=SHIPPED_MODEL, prompt=[tokens, tokens], max_tokens=5, temperature=0
    )
    assert one.choices[0].text == texts.choices[1].text
    assert [choice.text for choice in many.choices] == [one.choices[0].text] * 2


def test_64_streams_a_third_cancelled_leave_nothing_behind(mesh: Mesh) -> None:
    before = generated_by_rank(mesh)
    finished, cancelled = asyncio.run(_crowd(mesh))
    assert (finished, cancelled) == (43, 21)
    assert_idle(mesh)
    assert all(now > then + 100 for now, then in zip(generated_by_rank(mesh), before, strict=True))


async def _crowd(mesh: Mesh) -> tuple[int, int]:
    rng = random.Random(0)

    async def one(client: openai.AsyncOpenAI, index: int) -> bool:
        leaves_after = rng.randrange(1, 12) if index % 3 == 1 else None
        stream = await client.completions.create(
            model=SHIPPED_MODEL,
            prompt=[rng.randrange(5, 4000) for _ in range(rng.randrange(1, 120))],
            max_tokens=rng.randrange(20, 60) if leaves_after is None else 400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        count = 0
        async with stream:
            async for _ in stream:
                count += 1
                if count == leaves_after:
                    return False
        return True

    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        outcomes = await asyncio.gather(*(one(client, index) for index in range(64)))
    return sum(outcomes), len(outcomes) - sum(outcomes)


def test_an_idle_mesh_is_empty(mesh: Mesh) -> None:
    assert_idle(mesh)
