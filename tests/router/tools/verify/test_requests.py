"""Capsules beside the requests that were sent: other prompts and parameters are named."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.kernels.core import library
from engine.sampling import SamplingParams
from router.api.bodies import read_chat
from router.api.prompts import prompts_of
from router.capsule import DIGEST_PREFIX, Capsule, read, written
from router.config import HttpConfig
from router.tools.verify.command import main
from router.tools.verify.requests import SentRequests
from router.tools.verify.verdict import VerifyStatus
from tests.router.tools.verify.answers import FLAGS, SAMPLED, Server, edited, honest, save

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

CHAT = {
    "messages": [{"role": "user", "content": "Tell me about Emma."}],
    "temperature": 0.8,
    "max_tokens": 20,
    "seed": 7,
}


def sent(**fields: Any) -> bytes:
    """Body of a request."""
    return json.dumps(CHAT | fields).encode()


@cache
def truthful(body: bytes) -> Capsule:
    """Capsule of the answer to a chat."""
    wanted = read_chat(body)
    ids = prompts_of(wanted, honest().text)[0].ids
    params = SamplingParams(temperature=wanted.temperature or 0.0, max_tokens=20, top_p=0.9)
    return of_request(honest().answer(params, ids=ids, seed=wanted.seed or 7), body)


def of_request(capsule: Capsule, body: bytes) -> Capsule:
    digest = DIGEST_PREFIX + hashlib.sha256(body).hexdigest()
    return read(written(msgspec.structs.replace(capsule, id="chatcmpl-1", request=digest)))


def problem(capsule: Capsule, *bodies: bytes, **flags: Any) -> str:
    (found,) = SentRequests(bodies, honest().text, HttpConfig(**flags)).problems([capsule])
    return found or ""


def test_an_answer_to_what_was_sent_has_no_problem() -> None:
    body = sent()
    assert problem(truthful(body), sent(seed=8), body) == ""
    unlimited = json.dumps({name: value for name, value in CHAT.items() if name != "max_tokens"}).encode()
    assert problem(of_request(truthful(body), unlimited), unlimited) == ""


def test_a_request_that_was_not_sent_is_named() -> None:
    assert "answers none of the given requests" in problem(truthful(sent()), sent(seed=8))


def test_another_template_is_named_at_the_first_token_of_the_prompt() -> None:
    body = sent()
    ids = truthful(body).prompts[0].prompt_ids
    lie = edited(truthful(body), prompt_ids=[*ids[:3], 70, *ids[3:]])
    assert f"at token 3 of {len(ids)}: 70 " in problem(lie, body)
    shorter = edited(truthful(body), prompt_ids=ids[:-2])
    assert f"at token {len(ids) - 2} of {len(ids)}: its end in the capsule" in problem(shorter, body)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"temperature": 0.5}, "its parameters are not the request's: temperature 0.8 instead of 0.5"),
        ({"top_p": 0.5}, "top_p 0.9 instead of 0.5"),
        ({"max_tokens": 30}, "max_tokens 20 instead of 30"),
        ({"stop": ["x"]}, 'stop [] instead of ["x"]'),
        ({"seed": 8}, "the request's seed is 8, and the capsule's 7"),
        ({"n": 2}, "the request asks for 2 samples, and the capsule has 1"),
        ({"logit_bias": {"70": 4}}, 'logit_bias {} instead of {"70":4.0}'),
        ({"thinking_token_budget": 9}, "thinking null instead of "),
        ({"messages": []}, "answers the request: "),
    ],
)
def test_other_parameters_are_named(asked: dict[str, Any], words: str) -> None:
    body = sent(**asked)
    found = problem(of_request(truthful(sent()), body), body, reasoning_parser="deepseek_r1")
    assert words in found


def test_a_reasoning_budget_that_nobody_asked_for_is_named() -> None:
    body = sent()
    params = msgspec.to_builtins(truthful(body).prompts[0].params, str_keys=True)
    capped = edited(truthful(body), params=params | {"thinking": {"tokens": 4, "begin": [], "end": [70]}})
    assert 'thinking {"tokens":4' in problem(capped, body)


def test_the_command_reads_requests_and_refuses_quantised_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = sent(), sent(seed=9)
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join([good, other]))
    capsules = [truthful(good), of_request(truthful(good), other)]
    file = save(tmp_path / "both.jsonl", capsules)
    flags = ["--requests", str(tmp_path / "requests.jsonl"), "--serve=--reasoning-parser qwen3"]
    assert main([file, *FLAGS, *flags]) == VerifyStatus.REQUEST
    found = capsys.readouterr()
    assert found.out.endswith("\n1 equal, 1 request\n")
    assert "line 2: chatcmpl-1: the request's seed is 9" in found.err
    quantised = Server(kept="int8").answer(SamplingParams(**SAMPLED))
    file = save(tmp_path / "quantised.json", [quantised])
    assert main([file, *FLAGS, "--unquantized"]) == VerifyStatus.QUANTIZED
    assert "bfloat16), with --kv-cache-dtype int8\n" in capsys.readouterr().out
    assert main([file, *FLAGS, "--requests", str(tmp_path / "nothing")]) == VerifyStatus.USAGE
    assert "--requests" in capsys.readouterr().err
