"""Digests of tensors: every byte counts, the files that hold them do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.numerics import Arithmetic
from engine.config import SHIPPED_MODEL, EngineConfig, ModelConfig
from engine.model.checkpoint import fingerprint, read_model_info
from engine.model.finding import MODELS_DIRECTORY
from engine.model.weight_digest import (
    MOST_SAMPLED,
    PIECE_BYTES,
    SAMPLE_BYTES,
    sample_digest,
    stored_tensors,
    whole_digest,
)
from engine.model.weight_set import INDEX_FILE, WHOLE_FILE
from engine.numerics import numerics_of
from engine.settings import resolve
from engine.transfers.identity import CacheFacts, identity_of
from tests.engine.model.gguf.test_gguf import write_gguf
from tests.engine.tiny_models import make_tiny_model

LARGE = "model.large.weight"


def write(path: Path, **more: torch.Tensor) -> Path:
    """A file with a tensor of several megabytes between two small ones."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model.first": torch.arange(8.0),
        LARGE: torch.randn(1024, 1500, generator=generator),
        "model.last": torch.arange(3, dtype=torch.int64),
    }
    save_file(tensors | more, path, metadata={"format": "pt"})
    return path


def flip(path: Path, place: int) -> None:
    """Change one bit of one byte."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / WHOLE_FILE)


def test_every_byte_of_a_tensor_counts(file: Path) -> None:
    (large,) = [each for each in stored_tensors(file) if each.name == LARGE]
    assert large.num_bytes == 1024 * 1500 * 4
    found = {whole_digest([file])}
    places = [0, 1, large.num_bytes // 3, large.num_bytes // 2, large.num_bytes - 1]
    for place in places:
        flip(file, large.begin + place)
        found.add(whole_digest([file]))
        flip(file, large.begin + place)
    assert len(found) == 1 + len(places)
    assert whole_digest([file]) in found


def test_tensors_larger_than_a_piece_are_hashed_whole(tmp_path: Path) -> None:
    size = PIECE_BYTES + 5
    path = tmp_path / WHOLE_FILE
    save_file({"a": torch.zeros(size, dtype=torch.uint8)}, path)
    passed: list[int] = []
    before = whole_digest([path], passed.append)
    assert passed == [PIECE_BYTES, 5]
    flip(path, path.stat().st_size - 1)
    assert whole_digest([path]) != before


@pytest.mark.parametrize(
    "changed",
    [
        {"model.other": torch.zeros(1)},
        {"model.first": torch.arange(8.0).reshape(2, 4)},
        {"model.first": torch.arange(8.0).view(torch.int32)},
    ],
    ids=["one more", "another shape", "another type"],
)
def test_names_shapes_and_types_count(tmp_path: Path, changed: dict[str, torch.Tensor]) -> None:
    one, other = write(tmp_path / "one.safetensors"), write(tmp_path / "other.safetensors", **changed)
    assert whole_digest([one]) != whole_digest([other])
    assert sample_digest([one]) != sample_digest([other])


def test_a_tensor_under_another_name_counts(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    first, second = torch.zeros(4), torch.ones(4)
    save_file({"a": first, "b": second}, one)
    save_file({"a": second, "b": first}, other)
    assert whole_digest([one]) != whole_digest([other])
    assert sample_digest([one]) != sample_digest([other])


def test_samples_are_of_each_tensor(file: Path) -> None:
    before, found = sample_digest([file]), set()
    for tensor in stored_tensors(file):
        for place in (tensor.num_bytes // 2, tensor.num_bytes - 1):
            flip(file, tensor.begin + place)
            found.add(sample_digest([file]))
            flip(file, tensor.begin + place)
    assert len(found | {before}) == 1 + 2 * 3
    (large,) = [each for each in stored_tensors(file) if each.name == LARGE]
    flip(file, large.begin + SAMPLE_BYTES)
    assert sample_digest([file]) == before, "between two samples only the digest of all bytes shows it"


def test_samples_of_very_many_tensors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_SAMPLED >= 2048, "more than most models have"
    monkeypatch.setattr("engine.model.weight_digest.MOST_SAMPLED", 3)
    path = tmp_path / WHOLE_FILE
    save_file({f"t{number}": torch.zeros(2) for number in range(10)}, path)
    before, shown = sample_digest([path]), 0
    for tensor in stored_tensors(path):
        flip(path, tensor.begin + tensor.num_bytes - 1)
        shown += sample_digest([path]) != before
        flip(path, tensor.begin + tensor.num_bytes - 1)
    assert shown == 3


def test_copies_cut_into_other_files_are_the_same_model(tmp_path: Path) -> None:
    whole = Path(shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "whole"))
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    tensors = load_file(cut / WHOLE_FILE)
    (cut / WHOLE_FILE).unlink()
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, name in enumerate(reversed(tensors)):
        parts[number % 2][name] = tensors[name]
    places = {}
    for number, part in enumerate(parts):
        save_file(part, cut / f"part{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(part, f"part{number}.safetensors")
    (cut / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    assert fingerprint(read_model_info(cut)) == fingerprint(read_model_info(whole))
    assert whole_digest(sorted(cut.glob("*.safetensors"))) == whole_digest([whole / WHOLE_FILE])


def test_gguf_files_have_digests_of_their_tensors(tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1)
    one, copy = (write_gguf(plain, tmp_path / name / "m.gguf", "Q8_0") for name in ("one", "copy"))
    assert whole_digest([one]) == whole_digest([copy])
    assert sample_digest([one]) == sample_digest([copy])
    tensor = max(stored_tensors(copy), key=lambda each: each.num_bytes)
    flip(copy, tensor.begin + tensor.num_bytes // 3)
    assert whole_digest([one]) != whole_digest([copy])


def test_a_file_that_ends_early_is_refused(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model\.safetensors ends before model\.\w+(\.weight)? does"):
        whole_digest([file])


def class_of(directory: Path, **model: Any) -> tuple[str, str, str]:
    """Fingerprint, numerics class and identity of KV blocks of an instance that reads a directory."""
    config = EngineConfig(model=ModelConfig(model=str(directory), **model))
    info, settings = resolve(config)
    weights = whole_digest([directory / WHOLE_FILE])
    arithmetic = Arithmetic("amx", "1", "native", weights=weights)
    numerics = numerics_of(settings, config.model, info.directory, [arithmetic])
    assert numerics.weights == weights
    facts = CacheFacts(
        numerics=numerics.fingerprint, dtype="bfloat16", block_size=16, layout=[64], weights=weights
    )
    return settings.fingerprint, numerics.fingerprint, identity_of(facts)


@pytest.mark.parametrize("online", [None, "int8"])
def test_one_byte_between_samples_is_another_class_and_shares_no_block(
    tmp_path: Path, online: str | None
) -> None:
    copy = Path(shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "copy"))
    before = class_of(copy, quantization=online)
    tensor = max(stored_tensors(copy / WHOLE_FILE), key=lambda each: each.num_bytes)
    flip(copy / WHOLE_FILE, tensor.begin + tensor.num_bytes // 4 + 12_345)
    after = class_of(copy, quantization=online)
    assert after[0] == before[0], "or the test shows less than it could"
    assert after[1] != before[1]
    assert after[2] != before[2]
    if online:
        assert class_of(copy)[1] != after[1]
