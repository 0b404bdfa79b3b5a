"""``lockstep verify`` in one process: answers of all kinds, and planted lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from coordinator.numerics import Numerics
from engine.kernels.core import library
from engine.sampling import SamplingParams
from router.capsule import Capsule
from router.tools.verify.command import kernels_for, main
from router.tools.verify.verdict import VerifyStatus
from tests.engine.scheduling.test_grammar import LETTERS
from tests.router.tools.verify.answers import DIRECTORY, ROOM, Server, edited, honest, named_as, save

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

FLAGS = ["--model", str(DIRECTORY), "--cpu-threads", "1", "--kv-cache-memory-bytes", str(ROOM)]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 40},
    SAMPLED | {"max_tokens": 300},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "max_tokens": 40},
    SAMPLED | {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    SAMPLED | {"repetition_penalty": 1.3, "logit_bias": {70: 4.0, 71: -100.0}},
    SAMPLED | {"min_tokens": 20, "ignore_eos": False, "bad_words": ((70,), (71, 72))},
    SAMPLED | {"stop": ("the", ".")},
    SAMPLED | {"allowed_token_ids": tuple(range(60, 200))},
    {"temperature": 1.0, "max_tokens": 30, "grammar": LETTERS},
    {"temperature": 1.0, "max_tokens": 0},
]


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status of ``lockstep verify``, and all that it printed."""
    status = main([*arguments, *FLAGS])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_answers_of_all_kinds_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsules = [honest().answer(SamplingParams(**kind)) for kind in KINDS]
    capsules.append(honest().answer(SamplingParams(**SAMPLED), samples=3))
    capsules += [Server(kept="int8").answer(SamplingParams(**SAMPLED))]
    capsules += [Server(quantization="int8").answer(SamplingParams(**SAMPLED))]
    status, text = verify(capsys, save(tmp_path / "all.jsonl", capsules))
    assert status == VerifyStatus.EQUAL, text
    assert text.endswith(f"\n{len(capsules)} equal\n")
    assert "equal, 3 samples, 120 tokens" in text


def told(index: int, words: str) -> str:
    return f"differs at token {index} of 40: .*{words}"


def changed_token(capsule: Capsule) -> Capsule:
    ids = capsule.prompts[0].samples[0].result.token_ids
    return edited(capsule, {"token_ids": [*ids[:17], ids[17] ^ 1, *ids[18:]]})


def changed_logprob(capsule: Capsule) -> Capsule:
    logprobs = list(capsule.prompts[0].samples[0].result.logprobs or ())
    logprobs[5] = (logprobs[5] or 0.0) - 2**-20
    return edited(capsule, {"logprobs": logprobs})


def cut(capsule: Capsule) -> Capsule:
    result = capsule.prompts[0].samples[0].result
    return edited(capsule, {"token_ids": result.token_ids[:9], "logprobs": (result.logprobs or ())[:9]})


def tuned(directory: Path) -> Server:
    """Server of a fine-tune: the same model, but for a little of one layer."""
    directory.mkdir()
    for path in DIRECTORY.iterdir():
        (directory / path.name).symlink_to(path)
    (file,) = directory.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = next(name for name in tensors if "layers.0" in name and "q_proj" in name)
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    tensors[name] = (tensors[name].float() + 0.02 * noise).to(tensors[name].dtype)
    file.unlink()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return Server(directory)


def answered(params: dict[str, Any], **how: Any) -> Capsule:
    return honest().answer(SamplingParams(**params), **how)


PENALISED = SAMPLED | {"frequency_penalty": 0.9}
LIES: dict[str, tuple[Callable[[], Capsule], str]] = {
    "token": (lambda: changed_token(answered(SAMPLED)), told(17, "this place alone was changed")),
    "logprob": (lambda: changed_logprob(answered(SAMPLED)), told(5, "this place alone was changed")),
    "cut": (lambda: cut(answered(SAMPLED)), "differs at token 9 of 9: end by .*the answer was cut"),
    "capped": (
        lambda: edited(answered(SAMPLED | {"max_tokens": 20}), params=SAMPLED | {"max_tokens": 40}),
        "differs at token 20 of 20: end by .*the answer was cut",
    ),
    "seed": (lambda: edited(answered(SAMPLED), seed="8"), "the model gives its tokens these log-prob"),
    "greedy": (
        lambda: edited(answered(SAMPLED | {"temperature": 0.0}), params=SAMPLED),
        "it is what the model gives greedily; .*another sampling parameter",
    ),
    "penalty": (
        lambda: edited(answered(SAMPLED), params=PENALISED),
        "it is what the model gives without penalties",
    ),
    "prompt": (
        lambda: edited(answered(SAMPLED, text="You are short. It was a dark"), prompt_ids=[70, 71, 72]),
        told(0, "the model gives other log-probabilities: other weights, another prompt"),
    ),
    "cache": (
        lambda: Server(kept="int8").answer(SamplingParams(**SAMPLED), claimed=honest().numerics),
        "it is what the model gives with --kv-cache-dtype int8, which is not its class",
    ),
    "weights": (
        lambda: Server(quantization="int8").answer(SamplingParams(**SAMPLED), claimed=honest().numerics),
        "it is what the model gives with --quantization int8, which is not its class",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_at_the_first_token_that_shows_it(
    lie: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = LIES[lie]
    flags = ["--no-explain"] if lie == "prompt" else []
    status, text = verify(capsys, save(tmp_path / "lie.json", [make()]), *flags)
    assert status == VerifyStatus.DIFFERENT
    assert matches(words, text), text


def matches(words: str, text: str) -> bool:
    """Whether the parts of ``words`` stand in a text, in order."""
    place = 0
    for part in words.split(".*"):
        place = text.find(part, place)
        if place < 0:
            return False
    return True


def test_a_fine_tune_under_the_models_name_differs_and_under_its_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = tuned(tmp_path / "tuned")
    own = server.answer(SamplingParams(**SAMPLED))
    stolen = named_as(server.answer(SamplingParams(**SAMPLED), claimed=honest().numerics), honest().text)
    status, text = verify(capsys, save(tmp_path / "stolen.json", [stolen]), "--no-explain")
    assert status == VerifyStatus.DIFFERENT
    assert matches("differs at token .*the model gives other log-probabilities.* tokens differ by ", text), (
        text
    )
    status, text = verify(capsys, save(tmp_path / "own.json", [own]))
    assert status == VerifyStatus.OTHER_MODEL
    assert f"the capsule is of checkpoint {own.model.fingerprint}, not of " in text


def test_an_answer_without_logprobs_is_checked_by_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsule = edited(answered(SAMPLED), {"logprobs": None})
    status, text = verify(capsys, save(tmp_path / "equal.json", [capsule]))
    assert (status, "tokens alone, as it has no log-probabilities" in text) == (VerifyStatus.EQUAL, True)
    lie = edited(answered(SAMPLED), {"logprobs": None}, seed="8")
    assert verify(capsys, save(tmp_path / "lie.json", [lie]))[0] == VerifyStatus.DIFFERENT


def test_a_class_of_avx2_is_computed_with_its_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the CPU has more; a class of another compiler is only close."""
    capsule = answered(SAMPLED)
    status, text = verify(capsys, save(tmp_path / "own.json", [capsule]), "--numerics", "avx2")
    if honest().numerics.kernels == "avx2":
        assert status == VerifyStatus.EQUAL
        return
    assert status == VerifyStatus.ONLY_CLOSE
    assert matches("only closeness can be shown, as its class .*40 tokens differ by 0.", text), text
    assert kernels_for("auto", "avx2") == "avx2"


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda text: text[:-40], VerifyStatus.UNREADABLE, "cut off, or no JSON"),
        (
            lambda text: text.replace('"created":1', '"created":2'),
            VerifyStatus.EDITED,
            "the capsule was edited",
        ),
        (lambda text: json.dumps(json.loads(text) | {"format": 99}), VerifyStatus.VERSION, "has format 99"),
    ],
)
def test_what_cannot_be_read_has_a_status_of_its_own(
    make: Callable[[str], str],
    status: VerifyStatus,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(make(Path(save(tmp_path / "good.json", [answered(SAMPLED)])).read_text()))
    found, text = verify(capsys, str(file))
    assert found == status
    assert words in text


def test_what_cannot_be_computed_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save(tmp_path / "good.json", [answered(SAMPLED)])
    assert main([file, "--model", str(tmp_path / "nothing")]) == VerifyStatus.NO_MODEL
    assert "nothing" in capsys.readouterr().err
    status, text = verify(capsys, file, "--max-model-len", "32")
    assert status == VerifyStatus.TOO_LONG
    assert "exceed the context length of 32" in text
    variant = Numerics(honest().numerics.fingerprint + "_variant", "torch", "bfloat16", invariant=False)
    file = save(tmp_path / "variant.json", [edited(answered(SAMPLED, claimed=variant), seed="8")])
    status, text = verify(capsys, file)
    assert status == VerifyStatus.VARIANT
    assert "is variant, which promises no equal bits: only closeness can be shown" in text
