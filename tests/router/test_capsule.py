"""Capsules: writing, reading, finding them in files."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from coordinator.numerics import Numerics
from engine.sampling import SamplingParams, ThinkingBudget
from router.capsule import (
    FIELD,
    Capsule,
    CapsuleError,
    CapsuleModel,
    CapsulePrompt,
    CapsuleSample,
    found_in,
    read,
    written,
)
from router.mesh import NumericsSwitch
from router.recorded import RecordedSample

PARAMS = SamplingParams(
    temperature=0.7,
    stop=("END", "ü\n"),
    max_tokens=9,
    logit_bias={7: -100.0, 12: 2.5, 101: 1e-7},
    bad_words=((1, 2), (3,)),
    thinking=ThinkingBudget(4, ((5, 6),), (7,)),
    grammar='{"grammars":[]}',
)
RESULT = RecordedSample((5, 6, 7), (-0.5, -0.10000000149011612, None), "stop", "END")
CAPSULE = Capsule(
    format=3,
    id="cmpl-1",
    created=1,
    model=CapsuleModel("tiny", "abc", "tok", ""),
    numerics=(Numerics("fp_1", "avx2", "bfloat16", invariant=True),),
    prompts=(
        CapsulePrompt(
            (1, 2, 3),
            PARAMS,
            str(2**63 - 1),
            (CapsuleSample(0, 0, "fp_1", RESULT, (NumericsSwitch(2, "fp_1", "fp_2"),)),),
        ),
    ),
)


def test_a_capsule_is_read_as_it_was_written() -> None:
    found = read(written(CAPSULE))
    assert msgspec.structs.replace(found, digest="") == CAPSULE
    assert found.digest.startswith("sha256:")


@pytest.mark.parametrize("layout", [{"indent": 2}, {"sort_keys": True}, {"ensure_ascii": False}])
def test_another_layout_of_its_json_is_the_same_capsule(layout: dict[str, Any]) -> None:
    assert read(json.dumps(json.loads(written(CAPSULE)), **layout).encode()) == read(written(CAPSULE))


def test_numbers_survive_programs_that_keep_them_in_53_bits() -> None:
    def rounded(text: str) -> float:
        return float(text)

    passed_on = json.loads(written(CAPSULE), parse_int=rounded)
    as_javascript = json.loads(json.dumps(passed_on), parse_float=lambda text: _whole(float(text)))
    assert read(json.dumps(as_javascript).encode()) == read(written(CAPSULE))


def _whole(value: float) -> float | int:
    """JavaScript writes whole numbers without a point."""
    return int(value) if value.is_integer() else value


def edited(**changes: Any) -> bytes:
    """The capsule with some of its sample's result changed, under the digest that it had."""
    fields = json.loads(written(CAPSULE))
    fields["prompts"][0]["samples"][0]["result"] |= changes
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (edited(token_ids=[5, 6, 8]), "edited after it was made"),
        (edited(logprobs=[-0.5, -0.1, None]), "edited after it was made"),
        (edited(token_ids=[5, 6]), "2 tokens have 3 log-probabilities"),
        (edited(token_ids=[5, "6", 7]), "edited, or is none: Expected `int`, got `str`"),
        (edited(more=1), "unknown field `more`"),
        (b'{"format":3}', "missing required field"),
        (b'{"format":2,"other":1}', "has format 2, and this version of Lockstep reads formats 3 to 5"),
        (b'{"prompts":[],"digest":""}', "the capsule has no version"),
        (b"[]", "edited, or is none: Expected `object`"),
        (written(CAPSULE)[:-40], "cut off, or no JSON"),
        (b"[" * 100_000, "edited, or is none"),
    ],
)
def test_what_is_no_capsule_as_it_was_made_is_named(text: bytes, problem: str) -> None:
    with pytest.raises(CapsuleError, match=problem.replace("`", ".")):
        read(text)


def test_a_digest_is_of_the_content() -> None:
    fields = json.loads(written(CAPSULE))
    fields["digest"] = "sha256:" + 64 * "0"
    with pytest.raises(CapsuleError, match="edited after it was made"):
        read(json.dumps(fields).encode())


ANSWER = b'{"id":"cmpl-1","choices":[],"%s":%s}' % (FIELD.encode(), written(CAPSULE))
STREAM = b'data: {"choices":[{"text":"a"}]}\n\nevent: last\ndata: %s\n\ndata: [DONE]\n\n' % ANSWER


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (written(CAPSULE), [""]),
        (ANSWER, [""]),
        (json.dumps(json.loads(ANSWER), indent=2).encode(), [""]),
        (STREAM, ["line 4: "]),
        (STREAM.replace(b"\n", b"\r\n"), ["line 4: "]),
        (STREAM + STREAM, ["line 4: ", "line 11: "]),
        (ANSWER + b"\n\n" + written(CAPSULE) + b"\n", ["line 1: ", "line 3: "]),
    ],
)
def test_capsules_are_found_in_what_clients_save(data: bytes, places: list[str]) -> None:
    found = found_in(data)
    assert [place for place, _ in found] == places
    assert all(read(text) == read(written(CAPSULE)) for _, text in found)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b" \n", "the file is empty"),
        (b"Hello", "cut off, or no JSON"),
        (ANSWER[:-30], "cut off, or no JSON"),
        (b'{"id":1,"choices":[]}', "no answer that holds one: ask with the header X-Lockstep-Capsule: 1"),
        (b"[]", "no capsule"),
        (b"\xff\xfe{", "cut off, or no JSON"),
        (STREAM.partition(b"event")[0], "the stream is cut off, or was made without the header"),
        (STREAM.partition(b"digest")[0], "line 4: cut off, or no JSON"),
        (ANSWER + b"\n" + ANSWER[:50], "line 2: cut off, or no JSON"),
        (ANSWER + b'\n{"id":2}', "line 2: no capsule"),
    ],
)
def test_files_without_a_capsule_are_named(data: bytes, problem: str) -> None:
    with pytest.raises(CapsuleError, match=problem):
        found_in(data)
