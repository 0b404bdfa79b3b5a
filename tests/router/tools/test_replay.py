"""``lockstep replay`` against a real server before a scripted mesh."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.numerics import Numerics
from engine.messages import Delta, FinishReason, TokenLogprobs
from router.capsule import FIELD, Capsule, read, written
from router.config import HttpConfig
from router.mesh import MeshError, Prompt, ServedModel, WeightSpan
from router.text.tokens import Tokenizer
from router.tools.replay.command import main
from tests.router.conftest import Server, ids_of, serving
from tests.router.fake_mesh import Facts, FakeMesh, saying

CLASS = Numerics("fp_000000000001", "avx2", "bfloat16", invariant=True)
VARIANT = Numerics("fp_000000000002_variant", "torch", "bfloat16", invariant=False)
ASKS = {"x-lockstep-capsule": "1"}


@pytest.fixture(scope="module")
def shared(served: ServedModel) -> Iterator[Server]:
    facts = Facts(numerics={CLASS: [0, 1], VARIANT: [2]})
    model = msgspec.structs.replace(served, fingerprint="abc")
    with serving(FakeMesh(model, saying([]), facts), HttpConfig()) as server:
        yield server


@pytest.fixture
def server(shared: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("COLUMNS", "200")
    shared.mesh.reset(saying(ids_of(tokenizer, " Hello world!")))
    shared.mesh.fingerprints.update(dict.fromkeys(range(8), CLASS.fingerprint))
    yield shared
    shared.wait_until_idle()


def answer(server: Server, **body: Any) -> str:
    return server.client.post("/v1/completions", json={"prompt": "Hello"} | body, headers=ASKS).text


def capsule_of(text: str) -> Capsule:
    return read(json.dumps(json.loads(text)[FIELD]).encode())


@pytest.fixture
def replay(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command on files of these contents; gives its exit status, output and errors."""

    def run(*contents: str | bytes, flags: Sequence[str] = ()) -> tuple[int, str, str]:
        files = []
        for number, content in enumerate(contents):
            file = tmp_path / f"{number}.json"
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            files.append(str(file))
        status = main([*files, *(flags or ("--url", f"{server.url}/v1"))])
        output = capsys.readouterr()
        return status, output.out.replace(f"{tmp_path}/", ""), output.err.replace(f"{tmp_path}/", "")

    return run


Replay = Callable[..., tuple[int, str, str]]


def test_equal_answers(server: Server, replay: Replay) -> None:
    whole, streamed = answer(server, n=3, temperature=1), answer(server, stream=True, stop=[" world"])
    status, out, err = replay(whole, streamed, whole.strip() + "\n" + whole)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == "4 equal"
    assert lines[0].startswith("0.json: cmpl-")
    assert lines[0].endswith(": equal, 3 samples, 15 tokens, fp_000000000001 (avx2 kernels, bfloat16)")
    assert lines[1].startswith("1.json: line ")
    assert ": equal, 1 sample," in lines[1]
    assert [line.partition(": cmpl")[0] for line in lines[2:4]] == ["2.json: line 1", "2.json: line 2"]


def test_standard_input(server: Server, replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.TextIOWrapper(io.BytesIO(answer(server).encode()))
    monkeypatch.setattr(sys, "stdin", data)
    status, out, _ = replay(flags=("-", "--url", server.url))
    assert status == 0
    assert out.startswith("standard input: cmpl-")


def forged(text: str, **changes: Any) -> bytes:
    """The capsule of an answer, with a changed result and the digest for it."""
    fields = msgspec.to_builtins(capsule_of(text), str_keys=True)
    fields["prompts"][0]["samples"][-1]["result"] |= changes
    return written(msgspec.convert(fields, Capsule, str_keys=True))


def test_a_token_that_somebody_changed_is_named(server: Server, replay: Replay, tokenizer: Tokenizer) -> None:
    text = answer(server, n=2, temperature=1)
    ids = list(capsule_of(text).prompts[0].samples[1].result.token_ids)
    wrong = [*ids[:2], 70, *ids[3:]]
    status, out, _ = replay(forged(text, token_ids=wrong))
    assert status == 1
    named, count = out.splitlines()
    assert (
        f"sample 1 differs at token 2 of {len(ids)}: 70 {tokenizer.decode([70])!r} with log-probability -1.5 "
        f"(bits bfc00000) in the capsule, {ids[2]} {tokenizer.decode([ids[2]])!r} with log-probability -1.5 "
        "(bits bfc00000) from instance "
    ) in named
    assert count == "1 different"


def test_another_chat_template_is_a_remark(server: Server, replay: Replay) -> None:
    capsule = capsule_of(answer(server))
    other = msgspec.structs.replace(capsule.model, chat_template="0" * 16)
    status, out, _ = replay(written(msgspec.structs.replace(capsule, model=other)))
    assert status == 0
    assert "equal, 1 sample" in out
    assert "; the router has another chat template now: the same messages may give another prompt" in out


def test_without_the_right_digest_it_is_not_even_replayed(server: Server, replay: Replay) -> None:
    fields = json.loads(answer(server))
    fields[FIELD]["prompts"][0]["samples"][0]["result"]["token_ids"][1] += 1
    status, out, err = replay(json.dumps(fields))
    assert (status, out) == (2, "")
    assert "0.json: the capsule was edited after it was made" in err
    assert len(server.mesh.prompts) == 1


def test_one_bit_of_a_log_probability_is_named(server: Server, replay: Replay) -> None:
    text = answer(server)

    def other(prompt: Prompt) -> list[Delta]:
        deltas = saying(list(capsule_of(text).prompts[0].samples[0].result.token_ids))(prompt)
        changed = TokenLogprobs(deltas[3].token_ids[0], -1.5000001192092896, 1, [], [])
        return [*deltas[:3], msgspec.structs.replace(deltas[3], logprobs=[changed]), *deltas[4:]]

    server.mesh.script = other
    status, out, _ = replay(text)
    assert status == 1
    assert "differs at token 3 of" in out
    assert "-1.5 (bits bfc00000) in the capsule" in out
    assert "-1.5000001192092896 (bits bfc00001) from instance" in out


def test_an_end_that_differs_is_named(server: Server, replay: Replay, tokenizer: Tokenizer) -> None:
    text = answer(server)
    ids = ids_of(tokenizer, " Hello world!")
    server.mesh.script = saying(ids[:-1], FinishReason.STOP)
    status, out, _ = replay(text)
    assert status == 1
    assert f"differs at token {len(ids) - 1} of {len(ids)}: {ids[-1]}" in out
    assert "in the capsule, end by stop from instance" in out


def test_a_variant_class_promises_nothing(server: Server, replay: Replay, tokenizer: Tokenizer) -> None:
    server.mesh.fingerprints[0] = VARIANT.fingerprint
    text = answer(server)
    status, out, _ = replay(text)
    assert status == 0
    assert "; by luck: the class is variant, and promises no equal bits" in out
    server.mesh.script = saying(ids_of(tokenizer, " Hello you!"))
    status, out, _ = replay(text)
    assert status == 1
    assert "its class is variant, which promises no equal bits: sample 0 differs" in out


def test_tokens_behind_a_change_of_class_are_not_compared(server: Server, replay: Replay) -> None:
    text = answer(server)
    fields = msgspec.to_builtins(capsule_of(text), str_keys=True)
    sample = fields["prompts"][0]["samples"][0]
    sample["numerics_changes"] = [{"after_tokens": 2, "before": "fp_1", "after": "fp_3"}]
    ids = sample["result"]["token_ids"]
    sample["result"]["token_ids"] = [*ids[:3], 70, *ids[4:]]
    status, out, _ = replay(written(msgspec.convert(fields, Capsule, str_keys=True)))
    assert status == 0
    assert "only 2 tokens were compared: the class changed before the others" in out


def test_tokens_of_other_weights_are_not_compared(server: Server, replay: Replay) -> None:
    server.mesh.weight_spans[0] = [WeightSpan(0, 6), WeightSpan(2, 7)]
    fields = msgspec.to_builtins(capsule_of(answer(server)), str_keys=True)
    server.mesh.weight_spans[0] = [WeightSpan(0, 6)]
    sample = fields["prompts"][0]["samples"][0]
    ids = sample["result"]["token_ids"]
    sample["result"]["token_ids"] = [*ids[:3], 70, *ids[4:]]
    status, out, _ = replay(written(msgspec.convert(fields, Capsule, str_keys=True)))
    assert status == 0
    assert "only 2 tokens were compared: the class changed before the others" in out


def test_a_sample_without_tokens_needs_no_server(server: Server, replay: Replay) -> None:
    status, out, _ = replay(answer(server, max_tokens=0, echo=True))
    assert status == 0
    assert "equal, 1 sample, 0 tokens" in out


def test_a_full_server_is_asked_again(server: Server, replay: Replay) -> None:
    text = answer(server)
    server.mesh.refusal = MeshError(503, "ServiceUnavailableError", "every queue is full", retry_after=0)
    server.mesh.refuse_after = 1
    server.mesh.generations.clear()
    tries: list[Prompt] = []
    generate = server.mesh.generate

    def at_the_third_try(prompt: Prompt) -> Any:
        tries.append(prompt)
        if len(tries) < 3:
            raise server.mesh.refusal or AssertionError
        return generate(prompt)

    server.mesh.generate = at_the_third_try  # type: ignore[method-assign]
    try:
        status, _, _ = replay(text)
    finally:
        del server.mesh.generate
    assert (status, len(tries)) == (0, 3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"model": {"name": "huge", "fingerprint": "def", "tokenizer": "", "chat_template": ""}},
            "the capsule is of model huge (checkpoint def), and",
        ),
        ({"numerics": []}, "no instance"),
    ],
)
def test_capsules_of_elsewhere_are_named_and_others_replayed(
    server: Server, replay: Replay, changes: dict[str, Any], problem: str
) -> None:
    good = answer(server)
    fields = msgspec.to_builtins(capsule_of(good), str_keys=True) | changes
    if "numerics" in changes:
        fields["prompts"][0]["samples"][0]["system_fingerprint"] = "fp_9"
        problem = "the capsule is of numerics class fp_9 (unknown kernels, unknown), and this mesh has fp_000000000001 (avx2"
    status, out, err = replay(good, written(msgspec.convert(fields, Capsule, str_keys=True)))
    assert status == 2
    assert out.endswith("1 equal, 1 not replayed\n")
    assert f"lockstep replay: error: 1.json: {problem}" in err


def test_an_answer_of_an_older_instance_names_no_class(server: Server, replay: Replay) -> None:
    server.mesh.fingerprints.clear()
    status, _, err = replay(answer(server))
    assert status == 2
    assert "0.json: its instance named no numerics class" in err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "0.json: the file is empty"),
        (b"\x00", "0.json: cut off, or no JSON"),
        (b'{"choices":[]}', "0.json: no capsule, and no answer that holds one"),
    ],
)
def test_files_without_capsules(replay: Replay, content: bytes, problem: str) -> None:
    status, out, err = replay(content)
    assert (status, out) == (2, "")
    assert problem in err


def test_a_missing_file(replay: Replay, tmp_path: Path) -> None:
    status, _, err = replay(flags=(str(tmp_path / "none.json"),))
    assert status == 2
    assert "none.json cannot be read: No such file or directory" in err


def test_no_server(server: Server, replay: Replay) -> None:
    status, _, err = replay(answer(server), flags=("--url", "http://127.0.0.1:9"))
    assert status == 2
    assert "no server answers at http://127.0.0.1:9" in err


def test_a_server_that_replays_nothing(server: Server, replay: Replay) -> None:
    status, _, err = replay(answer(server), flags=("--url", f"{server.url}/elsewhere"))
    assert status == 2
    assert "replays nothing, it is no Lockstep or an older one" in err


def test_control_characters_of_a_capsule_do_not_reach_the_terminal(server: Server, replay: Replay) -> None:
    capsule = msgspec.structs.replace(capsule_of(answer(server)), id="a\x1b[31m")
    _, out, _ = replay(written(capsule))
    assert "\x1b" not in out
    assert r"a\x1b[31m: equal" in out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "give the FILES with the answers"),
        (("a", "--serve", "", "--url", "http://x"), "--serve starts its own server: leave out --url"),
        (("a", "--concurrency", "0"), "--concurrency"),
    ],
)
def test_wrong_flags(flags: Sequence[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
