"""``lockstep verify`` in one process: answers of all kinds, kernels of other classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.kernels.core import library
from engine.sampling import SamplingParams, ThinkingBudget
from router.capsule import CapsuleAdapter
from router.tools.verify.command import kernels_for, main
from router.tools.verify.verdict import VerifyStatus
from tests.engine.adapters.made_adapters import make_adapter
from tests.engine.scheduling.test_grammar import LETTERS
from tests.router.tools.verify.answers import DIRECTORY, FLAGS, SAMPLED, Server, edited, honest, save

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

BUDGET = ThinkingBudget(tokens=6, begin=(), end=(70, 71))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 40},
    SAMPLED | {"max_tokens": 300},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "max_tokens": 40},
    SAMPLED | {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    SAMPLED | {"repetition_penalty": 1.3, "logit_bias": {70: 4.0, 71: -100.0}},
    SAMPLED | {"min_tokens": 20, "ignore_eos": False, "bad_words": ((70,), (71, 72))},
    SAMPLED | {"stop": ("the", ".")},
    SAMPLED | {"allowed_token_ids": tuple(range(60, 200))},
    SAMPLED | {"thinking": BUDGET},
    {"temperature": 1.0, "max_tokens": 30, "grammar": LETTERS},
    {"temperature": 1.0, "max_tokens": 30, "grammar": LETTERS, "thinking": BUDGET},
    {"temperature": 1.0, "max_tokens": 0},
]


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status of ``lockstep verify``, and all that it printed."""
    status = main([*arguments, *FLAGS])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.each_push
def test_answers_of_all_kinds_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsules = [honest().answer(SamplingParams(**kind)) for kind in KINDS]
    capsules.append(honest().answer(SamplingParams(**SAMPLED), samples=3))
    capsules += [Server(kept="int8").answer(SamplingParams(**SAMPLED))]
    capsules += [Server(quantization="int8").answer(SamplingParams(**SAMPLED))]
    status, text = verify(capsys, save(tmp_path / "all.jsonl", capsules))
    assert status == VerifyStatus.EQUAL, text
    assert text.endswith(f"\n{len(capsules)} equal\n")
    assert "equal, 3 samples, 120 tokens" in text


def test_an_answer_without_logprobs_is_checked_by_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = edited(honest().answer(SamplingParams(**SAMPLED)), {"logprobs": None})
    first, second = verify(capsys, save(tmp_path / "both.jsonl", [alone, edited(alone, seed="8")]))
    assert first == VerifyStatus.DIFFERENT
    assert "tokens alone, as it has no log-probabilities" in second
    assert second.endswith("\n1 equal, 1 different\n")


def test_answers_of_adapters_are_checked_with_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = []
    for number, name in enumerate(("one", "two")):
        make_adapter(DIRECTORY, tmp_path / name, seed=number, target_modules=["q_proj", "o_proj"])
        named.append(f"{name}={tmp_path / name}")
    server = Server(adapters=tuple(named))
    capsules = [server.answer(SamplingParams(**SAMPLED), adapter=name) for name in ("one", "two", "")]
    saved = save(tmp_path / "all.jsonl", capsules)
    status, text = verify(capsys, saved, "--lora-modules", *named)
    assert status == VerifyStatus.EQUAL, text
    status, text = verify(capsys, saved, "--lora-modules", named[0])
    assert capsules[1].adapter is not None
    assert f"an adapter with the digest {capsules[1].adapter.digest}, which is not served here" in text
    assert text.endswith("\n2 equal, 1 unusable\n")
    other = msgspec.structs.replace(capsules[1], adapter=capsules[0].adapter)
    status, text = verify(capsys, save(tmp_path / "other.json", [other]), "--lora-modules", *named)
    assert status == VerifyStatus.DIFFERENT, text
    adapter = CapsuleAdapter(capsules[1].adapter.digest, ranks=2)
    of_ranks = msgspec.structs.replace(capsules[1], adapter=adapter)
    status, text = verify(capsys, save(tmp_path / "ranks.json", [of_ranks]), "--lora-modules", *named)
    assert "replay it on a mesh with -tp 2" in text


@pytest.fixture
def _any_kernels() -> Iterator[None]:
    """Other kinds of kernels for one test."""
    yield
    library.choose(None)


@pytest.mark.usefixtures("_any_kernels")
def test_answers_of_avx2_are_equal_where_the_cpu_has_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the capsule, by the flag, and where the environment names these kernels."""
    file = save(tmp_path / "avx2.json", [Server(numerics="avx2").answer(SamplingParams(**SAMPLED))])
    status, text = verify(capsys, file)
    assert status == VerifyStatus.EQUAL, text
    assert "(avx2 kernels, bfloat16)" in text
    assert verify(capsys, file, "--numerics", "avx2")[0] == VerifyStatus.EQUAL
    monkeypatch.setenv(library.OFF, "avx2")
    library.choose(None)
    assert verify(capsys, file)[0] == VerifyStatus.EQUAL


@pytest.mark.usefixtures("_any_kernels")
def test_answers_of_another_class_are_only_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Closeness is a number: an answer of other weights is much further away."""
    server = honest()
    if server.numerics.kernels == "avx2":
        pytest.skip("this CPU has one class of kernels")
    file = save(tmp_path / "own.json", [server.answer(SamplingParams(**SAMPLED))])
    status, text = verify(capsys, file, "--numerics", "avx2")
    assert status == VerifyStatus.ONLY_CLOSE
    assert f"only closeness can be shown, as its class {server.numerics} cannot be computed here" in text
    assert 0.0 < _average(text) < 0.02
    stranger = Server(quantization="int4").answer(SamplingParams(**SAMPLED), claimed=server.numerics)
    status, text = verify(capsys, save(tmp_path / "stranger.json", [stranger]), "--numerics", "avx2")
    assert status == VerifyStatus.ONLY_CLOSE
    assert _average(text) > 0.04
    assert kernels_for("auto", "avx2") == "avx2"


def _average(text: str) -> float:
    """Average distance of log-probabilities that a line names."""
    return float(text.split(" at most and ")[1].split(" on average")[0])
