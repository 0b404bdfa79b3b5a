"""Input that ``lockstep verify`` cannot use: a sentence and an exit status for each kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.numerics import Numerics
from engine.kernels.core import library
from engine.sampling import SamplingParams
from router.capsule import written
from router.signing.keys import CapsuleKey, PublicKeys
from router.tools.verify.command import main
from router.tools.verify.verdict import VerifyStatus
from tests.router.tools.verify.answers import FLAGS, SAMPLED, edited, honest, save

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status of ``lockstep verify``, and all that it printed."""
    status = main([*FLAGS, *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with one honest capsule."""
    file = tmp_path_factory.mktemp("good") / "good.json"
    save(file, [honest().answer(SamplingParams(**SAMPLED))])
    return file


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda text: text[:-40], VerifyStatus.UNREADABLE, "cut off, or no JSON"),
        (lambda _: "", VerifyStatus.UNREADABLE, "the file is empty"),
        (lambda _: '{"choices": []}', VerifyStatus.UNREADABLE, "no capsule, and no answer that holds one"),
        (
            lambda text: text.replace('"created":1', '"created":2'),
            VerifyStatus.EDITED,
            "the capsule was edited after it was made",
        ),
        (lambda text: json.dumps(json.loads(text) | {"format": 99}), VerifyStatus.VERSION, "has format 99"),
    ],
)
def test_what_cannot_be_read(
    make: Callable[[str], str],
    status: VerifyStatus,
    words: str,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(make(good.read_text()))
    found, text = verify(capsys, str(file))
    assert found == status
    assert words in text


def test_a_signature_of_no_given_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The right key's capsule is verified beside the others."""
    capsule = honest().answer(SamplingParams(**SAMPLED))
    ours, other = (CapsuleKey(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2))
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode(PublicKeys([ours.public])))
    file = tmp_path / "signed.jsonl"
    file.write_bytes(b"\n".join(written(capsule, key) for key in (ours, other, None)))
    status, text = verify(capsys, str(file), "--keys", str(tmp_path / "keys.json"))
    assert status == VerifyStatus.SIGNATURE
    assert "1 equal, 2 signature" in text
    assert "signed.jsonl: line 2: " in text
    assert "signed.jsonl: line 3: " in text


def test_a_checkpoint_that_is_not_there(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(good), "--model", str(tmp_path / "nothing")]) == VerifyStatus.NO_MODEL
    assert "nothing" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context_or_the_memory(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = verify(capsys, str(good), "--max-model-len", "32")
    assert status == VerifyStatus.TOO_LONG
    assert "exceed the context length of 32" in text
    status, text = verify(capsys, str(good), "--kv-cache-memory-bytes", "1K")
    assert status == VerifyStatus.TOO_LONG
    assert "KV cache" in text


def test_a_variant_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variant = Numerics(honest().numerics.fingerprint + "_variant", "torch", "bfloat16", invariant=False)
    lie = edited(honest().answer(SamplingParams(**SAMPLED), claimed=variant), seed="8")
    status, text = verify(capsys, save(tmp_path / "variant.json", [lie]))
    assert status == VerifyStatus.VARIANT
    assert "is variant, which promises no equal bits: only closeness can be shown" in text


def test_parameters_that_no_request_can_have(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsule = edited(honest().answer(SamplingParams(**SAMPLED)), params=SAMPLED | {"top_p": 3.0})
    status, text = verify(capsys, save(tmp_path / "bad.json", [capsule]))
    assert status == VerifyStatus.UNUSABLE
    assert "sample 0 cannot be computed: top_p must be" in text


def test_flags_that_mean_nothing(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(good)])
    assert ended.value.code == VerifyStatus.USAGE
    assert "give --model" in capsys.readouterr().err
    status, text = verify(capsys, str(good), "--keys", str(good))
    assert status == VerifyStatus.USAGE
    assert "cannot be used" in text
