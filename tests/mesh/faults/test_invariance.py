"""Answers keep their bits on a mesh that loses an instance and drains another one.

Three instances with spread experts and drafts, in bfloat16, against one engine in this process, token ids and
log-probabilities alike: docs/design/invariance.md.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.finding import MODELS_DIRECTORY
from router.api.parameters import MIN_TEMPERATURE
from tests.engine.invariance.answers import NGRAMS, Answer, Answers, How, load
from tests.engine.invariance.mixed import requests
from tests.engine.scheduling.test_grammar import JSON, SCHEMA
from tests.mesh.clients.test_clients import metrics
from tests.mesh.harness import Ports, free_port, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

COUNT, NUM_TOKENS = 20, 160
"""Requests, and tokens of most answers: a kill and a drain find running streams."""
FLAGS = ["--dtype", "bfloat16", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "32"]
SAME_NAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "min_tokens"),
    *("frequency_penalty", "allowed_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "max_tokens"),
)
"""Parameters that the API calls as the engine does."""

Bits = tuple[list[int], list[str], list[str | None]]
"""Token ids, their log-probabilities, those of the prompt."""


def lasting() -> list[Submit]:
    """Requests of all kinds, most of which last for some seconds."""

    def lasts(submit: Submit) -> Submit:
        params, is_json = submit.params, submit.request % 6 == 0
        params = msgspec.structs.replace(
            params,
            max_tokens=NUM_TOKENS,
            ignore_eos=not is_json,
            grammar=JSON if is_json else None,
            allowed_token_ids=None if is_json else params.allowed_token_ids,
            stop_token_ids=(),
            bad_words=(),
            thinking=None,
            temperature=max(params.temperature, MIN_TEMPERATURE) if not params.greedy else 0.0,
        )
        return msgspec.structs.replace(submit, params=params, priority=0)

    drawn = requests(3, count=COUNT, vocab_size=4096, longest=200, most=8)
    firsts = {each.request - each.sample_index: each for each in map(lasts, drawn) if not each.sample_index}
    return [
        msgspec.structs.replace(each, params=firsts[each.request - each.sample_index].params)
        for each in drawn
    ]


def body_of(samples: Sequence[Submit]) -> dict[str, Any]:
    """The HTTP request whose samples these are."""
    first, params = samples[0], samples[0].params
    body = {name: getattr(params, name) for name in SAME_NAME}
    body |= {"prompt": first.prompt_ids, "seed": first.seed, "n": len(samples), "return_token_ids": True}
    body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.grammar is not None:
        body["structured_outputs"] = {"json": SCHEMA}
    if params.prompt_logprobs is None:
        body["stream"] = True
    return {"model": SHIPPED_MODEL, **{name: value for name, value in body.items() if value is not None}}


async def ask(client: openai.AsyncOpenAI, samples: Sequence[Submit], begun: set[int]) -> dict[int, Bits]:
    """The answer of each sample, by its request's number; streams say when they have ``begun``."""
    found: dict[int, Bits] = {each.request: ([], [], []) for each in samples}

    def take(choices: Sequence[Any]) -> None:
        for choice in choices:
            ids, logprobs, prompt = found[samples[choice.index].request]
            ids += choice.token_ids
            logprobs += [each.hex() for each in (choice.logprobs.token_logprobs if choice.logprobs else ())]
            lines = getattr(choice, "prompt_logprobs", None) or ()
            for line, token in zip(lines, samples[0].prompt_ids, strict=False):
                prompt.append(None if line is None else float(line[str(token)]["logprob"]).hex())

    body = body_of(samples)
    answer = await client.post(
        "/completions",
        body=body,
        cast_to=openai.types.Completion,
        stream=bool(body.get("stream")),
        stream_cls=openai.AsyncStream[openai.types.Completion],
    )
    if not body.get("stream"):
        take(answer.choices)
        return found
    async for chunk in answer:
        begun.add(samples[0].request)
        take(chunk.choices)
    return found


def bits_of(answer: Answer) -> Bits:
    prompt = [None if each is None else each[1] for each in answer.prompt_logprobs or ()]
    return answer.token_ids, [each[1] for each in answer.logprobs], prompt


async def crowd(ports: Ports, submits: Sequence[Submit], disturb: Callable[[], None]) -> dict[int, Bits]:
    """All answers, to requests that come at once; ``disturb`` is called in between."""
    begun: set[int] = set()
    groups = [list(each) for _, each in groupby(submits, lambda each: each.request - each.sample_index)]
    async with openai.AsyncOpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
        asked = [asyncio.create_task(ask(client, group, begun)) for group in groups]
        await asyncio.to_thread(wait_until, lambda: len(begun) > len(groups) // 2, 20, "streams have begun")
        await asyncio.to_thread(disturb)
        answers = await asyncio.gather(*asked)
    return {key: value for answer in answers for key, value in answer.items()}


def test_bits_stay_while_an_instance_is_killed_and_another_drained(tmp_path: Path) -> None:
    submits = lasting()
    kinds = {"grammar", "logprobs", "prompt_logprobs", "repetition_penalty", "logit_bias", "top_k"}
    unset = msgspec.structs.asdict(type(submits[0].params)())
    assert all(any(getattr(each.params, kind) != unset[kind] for each in submits) for kind in kinds)
    assert {each.sample_index for each in submits} > {0, 1}
    expected: Answers = load(MODELS_DIRECTORY / SHIPPED_MODEL).answers(submits, How())[0]
    ports, admin = Ports(), free_port()
    flags = [*FLAGS, "--speculative-config", NGRAMS, "--admin-port", str(admin)]
    with serve(tmp_path / "log", "-dp", "3", "-ep", *ports.head(), *flags) as command:
        command.wait_for("3 instances ready")

        def running(rank: int) -> float:
            return metrics(ports)[
                f'vllm:num_requests_running{{engine="{rank}",model_name="{SHIPPED_MODEL}"}}'
            ]

        def disturb() -> None:
            wait_until(lambda: running(1) > 1, 20, "instance 1 works")
            command.child("Engine_1").kill()
            wait_until(lambda: command.log.count("recovered in epoch") == 2, 20, "the others go on")
            wait_until(lambda: running(2) > 1, 20, "instance 2 works")
            drain = urllib.request.Request(
                f"http://127.0.0.1:{admin}/admin/drain",
                b'{"rank": 2, "timeout": 0}',
                {"content-type": "application/json"},
            )
            assert urllib.request.urlopen(drain, timeout=20).status == 202

        found = asyncio.run(crowd(ports, submits, disturb))
        assert found == {key: bits_of(answer) for key, answer in expected.items()}
        counted = metrics(ports)
        moved = {
            kind: counted[f'lockstep:faults_total{{event="resume",kind="{kind}"}}']
            for kind in ("connection_lost", "removed", "drained")
        }
        assert moved["connection_lost"] + moved["removed"] > 0, "whichever was heard first"
        assert moved["drained"] > 0
        drafted = sum(value for name, value in counted.items() if "num_draft_tokens_total" in name)
        assert drafted > 0, "how many are accepted is up to the text"
        assert command.stop() == 0
