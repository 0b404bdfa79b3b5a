"""Weight versions that are put together from parts: the newest tensor of each name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.weight_digest import stored_tensors, whole_digest
from engine.weight_versions.assembled import assemble, first_numbers, homes_of, remove_unneeded
from engine.weight_versions.contract import WeightsRefused
from engine.weight_versions.private_files import PrivateFiles


def tensors(scale: float, *names: str) -> dict[str, torch.Tensor]:
    return {name: scale * torch.arange(1.0, 7.0).reshape(2, 3) for name in names}


def directory(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for name, each in files.items():
        save_file(each, path / f"{name}.safetensors")
    return path


def read(path: Path) -> dict[str, float]:
    """The first number of each tensor, as instances read the version."""
    files = PrivateFiles(sorted(path.glob("*.safetensors")), lambda: False)
    return {name: float(files.read(name).flatten()[0]) for name in files.homes}


def test_parts_take_the_place_of_tensors_and_the_rest_stays(tmp_path: Path) -> None:
    base = directory(tmp_path / "base", one=tensors(1, "a", "b"), two=tensors(1, "c"))
    part = tmp_path / "part.safetensors"
    save_file(tensors(2, "a"), part)
    later = directory(tmp_path / "later", new=tensors(3, "c"))
    made = assemble(base, [part, later], tmp_path / "room" / "x")
    assert read(made) == {"a": 2, "b": 1, "c": 3}
    whole = directory(tmp_path / "whole", all=tensors(2, "a") | tensors(1, "b") | tensors(3, "c"))
    found = PrivateFiles(sorted(made.glob("*.safetensors")), lambda: False)
    assert found.digest() == whole_digest(sorted(whole.glob("*.safetensors")))
    assert len(list(made.glob("*.safetensors"))) == 3, "a file of which nothing is left is no part"

    next_part = tmp_path / "next.safetensors"
    save_file(tensors(4, "b"), next_part)
    newer = assemble(made, [next_part], tmp_path / "room" / "y")
    assert read(newer) == {"a": 2, "b": 4, "c": 3}
    shutil.rmtree(made)
    assert read(newer) == {"a": 2, "b": 4, "c": 3}, "it has links to files, not to the version before"


def test_a_whole_directory_is_read_where_it_is(tmp_path: Path) -> None:
    base = directory(tmp_path / "base", one=tensors(1, "a", "b"))
    new = directory(tmp_path / "new", one=tensors(2, "a", "b"))
    assert assemble(base, [new], tmp_path / "x") == new
    assert not (tmp_path / "x").exists()


def test_versions_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    base = directory(tmp_path / "base", one=tensors(1, "a", "b"))
    room = tmp_path / "room"
    versions = [base]
    for number, name in enumerate(("a", "b", "a", "b")):
        into = room / str(number)
        into.mkdir(parents=True)
        save_file(tensors(number, name), into / "received.safetensors")
        versions.append(assemble(versions[-1], [into / "received.safetensors"], into))
        remove_unneeded(room, versions[-2], versions[-1])
        assert read(versions[-1])[name] == number
    assert sorted(each.name for each in room.iterdir()) == ["2", "3"], "the newest, and the one with a"
    assert base.is_dir(), "a trainer's own files are never removed"


def test_parts_that_cannot_be_read(tmp_path: Path) -> None:
    base = directory(tmp_path / "base", one=tensors(1, "a"))
    cut = tmp_path / "cut.safetensors"
    save_file(tensors(2, "a"), cut)
    cut.write_bytes(cut.read_bytes()[:-4])
    (tmp_path / "empty").mkdir()
    for part, why in (
        (cut, "promises"),
        (tmp_path / "none", "none"),
        (tmp_path / "empty", "no \\*.safetensors"),
    ):
        with pytest.raises(WeightsRefused, match=why):
            assemble(base, [part], tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_first_numbers_of_a_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = torch.tensor([1.5, -2.25, 3e-3, 1000.0]).to(dtype)
    made = tmp_path / "one.safetensors"
    save_file({"w": wanted, "i": torch.ones(3, dtype=torch.int32)}, made)
    assert {each.name for each in stored_tensors(made)} == {"w", "i"}
    assert first_numbers(homes_of(made), "w", 3) == wanted.double().tolist()[:3]
    with pytest.raises(KeyError):
        first_numbers(homes_of(made), "i", 3)
    assert load_file(made)["w"].dtype is dtype
