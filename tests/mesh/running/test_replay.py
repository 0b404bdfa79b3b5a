"""Answers of one mesh, computed again on a fresh one of another size, in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from router.capsule import FIELD, Capsule, found_in, read, written
from router.tools.replay.command import main as replay
from tests.mesh.harness import Ports, serve
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.mesh

SIZES = [1, 3] if NIGHTLY else [1]
"""Instances of the fresh meshes."""
SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "32"]
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
LONG = "It was a dark and stormy night, and nobody was at the door of the house by the river. " * 12
USER: list[Any] = [{"role": "user", "content": "Tell me about Emma."}]
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "function", "function": {"name": "weather"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "It was", "max_tokens": 24} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": USER, "max_tokens": 24} | fields


KINDS: list[tuple[str, dict[str, Any]]] = [
    text(temperature=0),
    text(temperature=0, prompt=LONG),
    text(temperature=0, prompt=LONG + "Then"),
    text(seed=7, temperature=1),
    text(temperature=1),
    text(temperature=1, top_p=0.8, top_k=30, prompt=LONG + "And"),
    text(temperature=1, n=3),
    text(temperature=1.3, min_p=0.02, prompt=["One", "Two"]),
    text(temperature=1, presence_penalty=0.6, frequency_penalty=0.4),
    text(temperature=0, repetition_penalty=1.3),
    text(temperature=1, stop=["the", "."], max_tokens=40),
    text(temperature=1, logit_bias={"70": 4, "71": -100}),
    text(temperature=1, allowed_token_ids=list(range(60, 200))),
    text(temperature=1, bad_words=["the"], min_tokens=20),
    text(temperature=1, logprobs=3, ignore_eos=True),
    text(temperature=1, structured_outputs={"regex": "[a-z ]{10,30}"}),
    chat(temperature=0),
    chat(temperature=1, n=2, logprobs=True, top_logprobs=2),
    chat(temperature=1, tools=[{"type": "function", "function": WEATHER}], tool_choice=NAMED, max_tokens=40),
    chat(temperature=1, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    chat(temperature=1, seed=-3, stop="!"),
    ("/v1/responses", {"input": "Tell me about Emma.", "temperature": 1, "max_output_tokens": 24}),
    ("/v1/responses", {"input": LONG, "temperature": 0, "max_output_tokens": 16}),
    ("/v1/messages", {"model": SHIPPED_MODEL, "messages": USER, "max_tokens": 24, "temperature": 1}),
    (
        "/v1/messages",
        {"model": SHIPPED_MODEL, "messages": USER, "max_tokens": 40, "stop_sequences": ["a"], "top_k": 40},
    ),
]  # fmt: skip
"""Each is asked for as a whole and as a stream."""


def ask_all(ports: Ports, asked: Sequence[tuple[str, dict[str, Any]]], **headers: str) -> list[str]:
    """The bodies of answers, asked for at once."""
    with httpx2.Client(base_url=ports.url, timeout=120, trust_env=False) as client:

        def ask(one: tuple[str, dict[str, Any]]) -> str:
            answer = client.post(one[0], json=one[1], headers=headers)
            assert answer.status_code == 200, (one, answer.text)
            return answer.text

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(ask, asked))


def choices_of(answer: str) -> Any:
    return json.loads(answer)["choices"]


def capsules_of(answers: Sequence[str]) -> list[Capsule]:
    return [read(found_in(answer.encode())[0][1]) for answer in answers]


def forged(capsule: Capsule, index: int) -> bytes:
    """The capsule with one other token, and the digest that belongs to it."""
    fields = msgspec.to_builtins(capsule, str_keys=True)
    result = fields["prompts"][0]["samples"][0]["result"]
    ids = result["token_ids"]
    result["token_ids"] = [*ids[:index], ids[index] ^ 1, *ids[index + 1 :]]
    return written(msgspec.convert(fields, Capsule, str_keys=True))


@pytest.mark.nightly
@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_answers_are_equal_on_a_fresh_mesh_of_another_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = Ports()
    with serve(tmp_path / "2.log", SHIPPED_MODEL, "-dp", "2", *ports.head(), *SMALL, *TOOLS) as command:
        command.wait_for("2 instances ready")
        streams = [(path, body | {"stream": True}) for path, body in KINDS]
        answers = ask_all(ports, [*KINDS, *streams], **{"X-Lockstep-Capsule": "1"})
        without = ask_all(ports, KINDS[:4])
        assert command.stop() == 0
    assert [choices_of(answer) for answer in without] == [choices_of(answer) for answer in answers[:4]]
    capsules = capsules_of(answers)
    samples = [sample for each in capsules for prompt in each.prompts for sample in prompt.samples]
    assert len(capsules) == 50
    assert len(samples) == 58
    assert {sample.result.finish_reason for sample in samples} == {"stop", "length"}
    for size in SIZES:
        fresh = Ports()
        flags = ["-dp", str(size), "--max-num-batched-tokens", "96", "--max-num-seqs", "12"]
        with serve(tmp_path / f"{size}.log", SHIPPED_MODEL, *fresh.head(), *flags, *SMALL[:2]) as command:
            command.wait_for(f"{size} instance{'s' * (size > 1)} ready")
            _all_are_equal(fresh, answers, tmp_path)
            _a_changed_token_is_found(fresh, capsules[4], tmp_path, capsys)
            assert command.stop() == 0


def _all_are_equal(fresh: Ports, answers: Sequence[str], directory: Path) -> None:
    """Some from their own files, most as lines of one."""
    files = [directory / f"{number}.txt" for number in range(25, 50)]
    for file, answer in zip(files, answers[25:], strict=True):
        file.write_text(answer)
    lines = directory / "answers.jsonl"
    lines.write_text("\n".join(answers[:25]))
    command = "import sys; from router.launcher.serve import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, "replay", str(lines), *map(str, files), "--url", fresh.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.endswith("\n50 equal\n"), done.stdout + done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def _a_changed_token_is_found(
    fresh: Ports, capsule: Capsule, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = capsule.prompts[0].samples[0].result.token_ids
    file = directory / "forged.json"
    file.write_bytes(forged(capsule, 17))
    assert replay([str(file), "--url", fresh.url]) == 1
    out = capsys.readouterr().out
    assert f"sample 0 differs at token 17 of {len(ids)}: {ids[17] ^ 1} " in out
    assert f"in the capsule, {ids[17]} " in out
    edited = json.loads(forged(capsule, 17)) | {"digest": capsule.digest}
    file.write_text(json.dumps({FIELD: edited}))
    assert replay([str(file), "--url", fresh.url]) == 2
    assert "the capsule was edited after it was made" in capsys.readouterr().err
