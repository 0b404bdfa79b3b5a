"""The code for AMX on any CPU with AVX-512, its instructions emulated."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.core import library
from engine.kernels.core.operations import AS_FLOAT, OperationKind
from engine.kernels.products.packing import panels
from tests.engine.compute import test_bfloat16
from tests.engine.kernels import test_kernels
from tests.engine.kernels.emulation import TILES
from tests.engine.kernels.products.test_compression import narrow, run, same_bits
from tests.engine.kernels.test_kernels import random

REAL = library.load()
"""The kernels of this CPU."""
pytestmark = pytest.mark.skipif(not TILES.is_possible or REAL is None, reason="no AVX-512, or no g++, here")
SMALLEST = 2.0**-126
"""The smallest float that is not a denormal."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[library.KernelLibrary]:
    with TILES.kernels() as emulated:
        monkeypatch.setattr(test_kernels, "KERNELS", emulated)
        yield emulated


def without_denormals(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST, 0, x).astype(np.float32)


def as_documented(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Products of x [rows, k] and weight [n, k], added up as TDPBF16PS does.

    Sums in float64 are exact here, if exponents are not far apart: so each addition is rounded once.
    """

    def of_part(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        total = np.zeros((len(rows), len(columns)), dtype=np.float32)
        for tile in range(0, rows.shape[1], 32):
            halves = []
            for half in (0, 1):
                added = np.zeros_like(total)
                for i in range(tile + half, tile + 32, 2):
                    product = np.outer(rows[:, i], columns[:, i])
                    added = without_denormals((added.astype(np.float64) + product).astype(np.float32))
                halves.append(added)
            total = without_denormals(total + without_denormals(halves[0] + halves[1]))
        return total

    rows, columns = (without_denormals(each.float().numpy()).astype(np.float64) for each in (x, weight))
    sums = [
        of_part(*pair)
        for pair in zip(np.split(rows, parts, axis=1), np.split(columns, parts, axis=1), strict=True)
    ]
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    return torch.from_numpy(sums[0])


def products(
    kernels: library.KernelLibrary,
    x: torch.Tensor,
    weight: torch.Tensor,
    parts: int = 1,
    *,
    compressed: bool = False,
) -> torch.Tensor:
    words, out = panels(weight, 32), torch.empty(len(x), len(weight))
    form = narrow(kernels, words) if compressed else words
    run(kernels, OperationKind.LINEAR, x, out, weights=form, n=len(weight), k=x.shape[1], b=parts, flags=AS_FLOAT)  # fmt: skip
    return out


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 75])
def test_sums_are_those_of_the_manual(
    kernels: library.KernelLibrary, rows: int, parts: int, compressed: bool
) -> None:
    x, weight = random(rows, 256, dtype=torch.bfloat16), random(70, 256, dtype=torch.bfloat16)
    expected = as_documented(x, weight, parts)
    assert same_bits(products(kernels, x, weight, parts, compressed=compressed), expected)
    assert not same_bits(expected, x.float() @ weight.float().T), "the order of the sums shows"


def test_denormals_are_zeros(kernels: library.KernelLibrary) -> None:
    x, weight = torch.zeros(1, 64), torch.zeros(32, 64)
    x[0, :2] = torch.tensor([1.0, 2.0**-70])
    weight[0, 0] = 2.0**-130  # a denormal, as it comes
    weight[1, 1] = 2.0**-60  # a denormal, as a product
    weight[2, 0], weight[2, 1] = 2.0**-126, 2.0**-56
    x, weight = x.bfloat16(), weight.bfloat16()
    found = products(kernels, x, weight)[0]
    assert found[:3].tolist() == [0, 0, 2.0**-125]
    assert torch.equal(found, as_documented(x, weight, 1)[0])


@pytest.mark.skipif(REAL is None or not REAL.has_tiles, reason="no AMX here")
@pytest.mark.parametrize("rows", [1, 17, 75])
def test_the_cpu_computes_the_same(kernels: library.KernelLibrary, rows: int) -> None:
    assert REAL is not None
    x, weight = random(rows, 256, dtype=torch.bfloat16), random(70, 256, dtype=torch.bfloat16)
    x[:, ::7] *= 1e-37
    weight[:, ::5] *= 1e-38
    assert same_bits(products(kernels, x, weight), products(REAL, x, weight))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("dim", "group"), [(64, 2), (64, 13), (128, 4), (192, 7)])
def test_attention(dim: int, group: int, apart: bool) -> None:
    test_kernels.test_attention(dim, group, apart, torch.bfloat16)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("step_in", [0, 64])
def test_products_of_groups(step_in: int) -> None:
    test_kernels.test_linear_of_groups(40, step_in, 32, torch.bfloat16)


@pytest.mark.usefixtures("kernels")
def test_experts() -> None:
    test_kernels.test_experts_compute_each_row_with_its_own(torch.bfloat16)


ids = test_bfloat16.ids


@pytest.mark.usefixtures("kernels")
def test_bits_of_a_step_do_not_depend_on_neighbours_chunks_or_threads(ids: np.ndarray) -> None:
    test_bfloat16.test_bits_do_not_depend_on_neighbours_chunks_or_threads(ids)


PROGRAM = """
int main(int count, char**) {
    struct alignas(64) { uint8_t palette = 1, reserved[15] = {}; uint16_t bytes[16] = {8, 8, 8}; uint8_t rows[16] = {3, 3, 2}; } config;
    if (count > 1) config.rows[2] = 3;  // more than the words of a row of the first tile
    _tile_loadconfig(&config);
    alignas(64) int8_t one[3][64] = {{-128, 127, 1, 0, 1, 2, 3, 4}, {1, 1, 1, 1}}, other[2][8] = {{-128, 2, 3, 4, 5, 6, 7, 8}, {1, 1, 1, 1, 2, 2, 2, -2}};
    alignas(64) int32_t sums[4][16] = {{7}, {0, 9}, {}, {5}};
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, one, 64);
    _tile_loadd(2, other, 8);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, sums, 64);
    for (auto& row : sums) std::printf("%d %d %d\\n", row[0], row[1], row[2]);
    _tile_release();
}
"""


@pytest.mark.nightly
def test_shapes_bytes_and_faults(tmp_path: Path) -> None:
    """Tiles that are not full, products of bytes, shapes that are refused."""
    source, made = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text(PROGRAM)
    command = [
        "g++",
        "-std=c++17",
        "-march=native",
        "-include",
        str(TILES.header),
        str(source),
        "-o",
        str(made),
    ]
    subprocess.run(command, check=True, timeout=120)
    printed = subprocess.run([made], check=True, capture_output=True, text=True, timeout=60).stdout
    # -128 * -128 + 127 * 2 + 3 + (1 + 2 + 3 + 4), and so on; what lies beyond a tile's shape stays
    assert printed == f"{7 + 16384 + 254 + 3 + 10} {-640 + 762 + 7 + 4} 0\n{-119} {9 + 26} 0\n0 0 0\n5 0 0\n"
    wrong = subprocess.run([made, "wrong"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode < 0
    assert "than rows in the second: invalid opcode" in wrong.stderr
