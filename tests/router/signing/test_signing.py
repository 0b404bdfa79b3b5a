"""Signed capsules: canonical form, keys, and the test vectors of docs/use/capsules.md."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from router.capsule import FIELD, fields_of, read, written
from router.config import HttpConfig
from router.mesh import ServedModel
from router.signing.canonical import canonical, number
from router.signing.keys import CapsuleKey, PublicKeys, SigningKeyError, signature_problem
from router.text.tokens import Tokenizer
from tests.router.conftest import ids_of, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.router.signing import second
from tests.router.test_capsule import CAPSULE

PAGE = Path(__file__).parents[3] / "docs" / "use" / "capsules.md"
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
"""Private key of the first test of RFC 8032."""
KEY = CapsuleKey(Ed25519PrivateKey.from_private_bytes(SEED))
OTHER = CapsuleKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
KEYS = PublicKeys([OTHER.public, KEY.public])


def numbers() -> list[float]:
    chance = random.Random(3)
    drawn = [struct.unpack("<d", chance.randbytes(8))[0] for _ in range(2000)]
    near = [chance.uniform(-1, 1) * 10.0**power for power in range(-25, 25) for _ in range(20)]
    edges = [0.0, -0.0, 1.0, -2.5, 1e20, 1e21, 1e-6, 1e-7, 123456789012345680000.0, 5e-324, 2.0**53, 0.1]
    return [each for each in (*drawn, *near, *edges) if abs(each) < float("inf")]


def test_numbers_are_those_of_ecmascript() -> None:
    known = {1e21: "1e+21", 1e20: "1" + "0" * 20, 1e-6: "0.000001", 1e-7: "1e-7", -0.0: "0", 4.5: "4.5"}
    known |= {333333333.33333329: "333333333.3333333", 1e23: "1e+23", 0.002: "0.002", 5e-324: "5e-324"}
    assert {value: number(value) for value in known} == known
    for value in numbers():
        assert float(number(value)) == value
        assert number(value) == second.ecmascript(value)


@pytest.mark.parametrize(
    "value", [{"\u20ac": 1, "\r": [], "\U0001f600": '\x07\u2028é"\\/', "ﬀ": None, "1": True}]
)
def test_both_implementations_have_one_canonical_form(value: Any) -> None:
    assert canonical(value).decode() == second.canonical(value)
    assert list(json.loads(canonical(value))) == ["\r", "1", "\u20ac", "\U0001f600", "ﬀ"]


def test_a_signed_capsule_is_verified_by_both_implementations() -> None:
    text = written(CAPSULE, KEY)
    assert msgspec.structs.replace(read(text), digest="", signature=None) == CAPSULE
    fields = fields_of(text)
    assert signature_problem(fields, KEYS) is None
    assert second.is_signed(json.loads(text), KEY.public.x)
    assert not second.is_signed(json.loads(text), OTHER.public.x)
    assert not second.is_signed(json.loads(text) | {"created": 2}, KEY.public.x)
    passed_on = json.loads(json.dumps(json.loads(text, parse_int=float), indent=1))
    assert signature_problem(passed_on, KEYS) is None, "numbers may be written in other ways"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"created": 2}, "was changed after it was signed"),
        ({"signature": None}, "the capsule is not signed"),
        ({"signature": {"algorithm": "none", "key": KEY.public.kid, "value": ""}}, "the given keys are"),
        ({"signature": {"algorithm": "Ed25519", "key": "x", "value": ""}}, "is signed by key x"),
        ({"signature": {"algorithm": "Ed25519", "key": KEY.public.kid, "value": "AA"}}, "is not that of key"),
        ({"signature": 3}, "cannot be read"),
    ],
)
def test_what_is_not_signed_by_a_known_key_is_named(changes: dict[str, Any], problem: str) -> None:
    found = signature_problem(fields_of(written(CAPSULE, KEY)) | changes, KEYS)
    assert found is not None
    assert problem in found


def pem(directory: Path, key: Ed25519PrivateKey) -> str:
    file = directory / "key.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(file)


def test_a_router_signs_and_publishes_its_key(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = HttpConfig(
        capsule_key=pem(tmp_path, Ed25519PrivateKey.from_private_bytes(SEED)), api_key=("secret",)
    )
    body = {"prompt": "Hello", "max_tokens": 3}
    with serving(FakeMesh(served, saying(ids_of(tokenizer, " Hello world!"))), config) as server:
        keys = server.client.get("/.well-known/lockstep-keys.json")
        assert (keys.status_code, keys.json()) == (200, {"keys": [msgspec.to_builtins(KEY.public)]})
        headers = {"x-lockstep-capsule": "tokens", "authorization": "Bearer secret"}
        answer = server.client.post("/v1/completions", json=body, headers=headers)
    capsule = answer.json()[FIELD]
    assert second.is_signed(capsule, keys.json()["keys"][0]["x"])
    assert capsule["prompts"][0]["samples"][0]["result"]["logprobs"] is None
    assert re.fullmatch("sha256:[0-9a-f]{64}", capsule["request"])


@pytest.mark.parametrize("text", ["", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_without_a_key_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no PEM file of a private key"):
        HttpConfig(capsule_key=str(file))
    with pytest.raises(SigningKeyError, match="No such file"):
        CapsuleKey.read(str(tmp_path / "nothing"))


def test_vectors_of_the_page_are_what_both_implementations_give() -> None:
    form, capsule = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[-2:]
    fields = json.loads(capsule)
    assert fields == json.loads(written(CAPSULE, KEY))
    rest = {name: each for name, each in fields.items() if name not in ("signature", "digest")}
    assert canonical(rest).decode() == second.canonical(rest) == form.strip()
    assert second.is_signed(fields, KEY.public.x)
    assert KEY.public.x in PAGE.read_text()
