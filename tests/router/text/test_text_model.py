"""Digests of a router's tokenizer and chat template, as capsules hold them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from router.config import HttpConfig
from router.mesh import ServedModel
from router.text.text_model import load_text_model

TEMPLATE = "{% for message in messages %}{{ message.content }};{% endfor %}"


def digests(served: ServedModel, **config: str) -> tuple[str, str]:
    model = load_text_model(served, HttpConfig(**config))
    return model.tokenizer.digest, model.chat_template_digest


@pytest.fixture
def copy(served: ServedModel, tmp_path: Path) -> ServedModel:
    directory = shutil.copytree(served.directory, tmp_path / "copy")
    return msgspec.structs.replace(served, directory=str(directory))


def change(directory: str, name: str, act: Callable[[dict[str, object]], None]) -> None:
    path = Path(directory) / name
    fields = json.loads(path.read_text())
    act(fields)
    path.write_text(json.dumps(fields))


def test_copies_have_the_same_digests(served: ServedModel, copy: ServedModel) -> None:
    assert digests(copy) == digests(served)
    assert all(digests(served))


def test_another_template_changes_its_digest_alone(served: ServedModel, copy: ServedModel) -> None:
    tokenizer, template = digests(served)
    other = digests(served, chat_template=TEMPLATE)
    assert other[0] == tokenizer
    assert other[1] not in ("", template)
    variables = digests(served, default_chat_template_kwargs='{"enable_thinking": false}')
    assert variables[0] == tokenizer
    assert variables[1] not in (template, other[1])
    change(copy.directory, "tokenizer_config.json", lambda fields: fields.update(chat_template=TEMPLATE))
    assert digests(copy) == other, "wherever it stands"


def test_another_tokenizer_changes_its_digest(served: ServedModel, copy: ServedModel) -> None:
    found = {digests(served)[0]}
    change(copy.directory, "tokenizer.json", lambda fields: fields.update(normalizer={"type": "NFC"}))
    found.add(digests(copy)[0])
    assert digests(served, tokenizer=copy.directory)[0] in found
    change(copy.directory, "tokenizer_config.json", lambda fields: fields.update(add_bos_token=True))
    found.add(digests(copy)[0])
    assert len(found) == 3
