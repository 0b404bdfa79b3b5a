"""Prefixes in files over a restart, a file that was changed, and weights that were."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path

import pytest

from coordinator.process.process import EXIT_REFUSED
from coordinator.rpc import keys
from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.model.checkpoint import fingerprint, read_model_info
from engine.model.finding import MODELS_DIRECTORY
from engine.model.weight_digest import stored_tensors
from engine.model.weight_set import WHOLE_FILE
from tests.mesh.faults.test_transfers import FLAGS, LENGTH, STAGED, ask, of
from tests.mesh.harness import Ports, free_port, serve, wait_until
from tests.nightly import NIGHTLY

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]
CACHED = (LENGTH - 1) // 16 * 16


KEY_FILE = ("--mesh-key-file", "mesh.key")


@pytest.mark.parametrize(
    ("workers", "where"),
    [((), "host")] + [((), "device"), (("-tp", "2"), "host"), (KEY_FILE, "host")] * NIGHTLY,
    indirect=["where"],
)
def test_a_mesh_that_starts_again_finds_its_prefixes_and_wrong_files_cost_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...], where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    keys.write(keys.generate(), tmp_path / KEY_FILE[1])
    ports, admin, directory = Ports(), free_port(), tmp_path / "kv"
    flags = [
        *FLAGS, *workers, "--enable-prompt-tokens-details", "--kv-cache-dir", str(directory), "--admin-port", str(admin),
    ]  # fmt: skip
    with serve(tmp_path / "log", "-dp", "1", *ports.head(), *flags) as command:
        command.wait_for("1 instance ready")
        assert (STAGED in command.log) == (where == "device")
        computed = [list(ask(ports, first, rank=0)) for first in (10, 500)]
        assert [cached for *_, cached in computed] == [0, 0]
        assert command.stop() == 0
    files = sorted(directory.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) >= 2 * CACHED // 16
    assert len(files[0].parents[1].name.split("-")) == (3 if workers == KEY_FILE else 2), "the key has a name"
    assert not list(directory.rglob("*.tmp"))
    flipped = files[-20]  # of the second prompt
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 8
    flipped.write_bytes(data)

    with serve(tmp_path / "again", "-dp", "1", *ports.head(), *flags) as command:
        command.wait_for("1 instance ready")
        *found, cached = ask(ports, 10, rank=0)
        assert (found, cached) == (computed[0][:2], CACHED - 16), "the last one is computed as well"
        wait_until(lambda: of(ports, "lockstep:kv_checked_total", 0) == 1, 5, "it is counted")
        assert of(ports, "lockstep:kv_wrong_total", 0) == 0
        *found, cached = ask(ports, 500, rank=0)
        assert found == computed[1][:2]
        assert 0 < cached < CACHED
        wait_until(lambda: of(ports, "lockstep:kv_wrong_total", 0) == 1, 5, "it is counted")
        hits = of(ports, "vllm:kv_offload_tiering_block_hits_total", 0, tier="fs")
        assert hits == 2 * CACHED // 16
        request = urllib.request.Request(f"http://127.0.0.1:{admin}/reset_prefix_cache", b"", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        assert not list(directory.rglob("*.kv"))
        *found, cached = ask(ports, 10, rank=0)
        assert (found, cached) == (computed[0][:2], 0)
        assert "Traceback" not in command.log
        assert command.stop() == 0


def change_weights(model: Path) -> None:
    """Turn the signs of 128 numbers of one matrix, between the samples of the fingerprint."""
    before = fingerprint(read_model_info(model))
    matrix = next(each for each in stored_tensors(model / WHOLE_FILE) if "q_proj" in each.name)
    with (model / WHOLE_FILE).open("r+b") as file:
        file.seek(matrix.begin)
        numbers = bytearray(file.read(256))
        numbers[1::2] = bytes(each ^ 0x80 for each in numbers[1::2])
        file.seek(matrix.begin)
        file.write(numbers)
    assert fingerprint(read_model_info(model)) == before


def test_other_weights_at_the_same_path_read_no_block_of_the_old_ones_and_no_mesh_takes_both(
    tmp_path: Path,
) -> None:
    model = Path(shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "model"))
    old = Path(shutil.copytree(model, tmp_path / "old"))
    ports, directory = Ports(), tmp_path / "kv"
    flags = [*FLAGS, "--served-model-name", SHIPPED_MODEL, "--enable-prompt-tokens-details"]
    keeps = ["--kv-cache-dir", str(directory)]
    with serve(tmp_path / "log", str(model), "-dp", "1", *ports.head(), *flags, *keeps) as command:
        command.wait_for("1 instance ready")
        *before, _ = ask(ports, 10, rank=0)
        (first,) = (member.numerics for member in ports.view().members)
        assert command.stop() == 0
    assert len(list(directory.rglob("*.kv"))) >= CACHED // 16

    change_weights(model)
    with serve(tmp_path / "again", str(model), "-dp", "1", *ports.head(), *flags, *keeps) as command:
        command.wait_for("1 instance ready")
        *after, cached = ask(ports, 10, rank=0)
        assert cached == 0, "so all of it was computed with the new weights"
        assert after != before
        (second,) = (member.numerics for member in ports.view().members)
        assert first is not None
        assert second is not None
        assert first.fingerprint != second.fingerprint
        assert first.weights != second.weights
        join = ["--headless", *ports.join(), *flags]
        with serve(tmp_path / "old.log", str(old), *join) as other:
            assert other.end() == EXIT_REFUSED
            assert (
                f"(digest {first.weights}) are not those of the mesh (digest {second.weights})" in other.log
            )
        assert len(ports.view().members) == 1
        assert command.stop() == 0
