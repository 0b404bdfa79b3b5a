"""The code for AVX-512 without bfloat16 on any CPU with AVX2, emulated if need be."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.core import library
from engine.kernels.make import make_program
from parallel import compiler
from parallel.kernel_kinds import AVX512F_OPTIONS, KINDS, CpuTarget, architecture
from parallel.native_source import NativeSource
from tests.engine.kernels import test_kernels
from tests.engine.kernels.emulation import WIDE
from tests.engine.kernels.test_kernels import BLOCK_SIZE, SCENARIO, everything, packed_rows, program_of
from tests.engine.model.quantization.writers import write_quantized
from tests.engine.model.test_weights import load
from tests.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    not WIDE.is_possible or library.load() is None, reason="no AVX2, or no g++, here"
)
DTYPES = [torch.float32, torch.bfloat16]
FUNCTIONS = """
#include "core/contract.hpp"
#include "core/vectors.hpp"
extern "C" void round_one(uint16_t* out, const float* in) { store_bfloat16(out, load(in), Mask(0xffff)); }
extern "C" void round_two(uint16_t* out, const float* in) { store_bfloat16(out, load(in), load(in + 16)); }
extern "C" void round_and_widen(float* out, const float* in) { store(out, rounded_to_bfloat16(load(in))); }
extern "C" void multiply_pairs(float* sum, const void* a, const void* b) {
    store(sum, BFloat16Parts::madd(load(sum), load_words(a), load_words(b)));
}
extern "C" void multiply_bytes(float* sum, const void* a, const void* b) {
    store(sum, BytesParts::madd(load(sum), load_words(a), load_words(b)));
}
"""
"""A source with the functions that other CPUs have instructions for."""


@pytest.fixture(scope="module")
def emulated() -> Iterator[library.KernelLibrary]:
    with WIDE.for_each_push() as kernels:
        yield kernels


@pytest.fixture
def kernels(emulated: library.KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> library.KernelLibrary:
    monkeypatch.setattr(test_kernels, "KERNELS", emulated)
    return emulated


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("functions")
    source, built = directory / "functions.cpp", directory / "functions.so"
    source.write_text(FUNCTIONS)
    places = [f"-I{library.KERNELS}", f"-I{compiler.INCLUDE}"]
    options = [
        *compiler.native_options(),
        "-mno-avx512bf16",
        "-O1",
        "-std=c++17",
        "-w",
        "-fopenmp",
        "-fPIC",
        "-shared",
    ]
    command = [*shlex.split(WIDE.command()), *options, *places, str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(built))


def as_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The nearest ones of floats, ties to even, as bits; NaN stays NaN."""
    bits = numbers.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), bits >> 16 | 0x40, nearest).astype(np.uint16)


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
def test_each_upper_half_is_rounded_to_the_nearest_bfloat16(functions: ctypes.CDLL, lower: int) -> None:
    """Denormals, infinities and NaN as well; ties go to the even one."""
    numbers = ((np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(lower)).view(np.float32)
    expected = as_bfloat16(numbers)
    is_number = ~np.isnan(numbers)
    torchs = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(expected[is_number], torchs[is_number]), "the model of this test is right"
    for name, step in (("round_one", 16), ("round_two", 32)):
        found = np.zeros(1 << 16, dtype=np.uint16)
        for at in range(0, 1 << 16, step):
            getattr(functions, name)(
                ctypes.c_void_p(found[at:].ctypes.data), ctypes.c_void_p(numbers[at:].ctypes.data)
            )
        assert np.array_equal(found, expected), name
    wide = np.zeros(1 << 16, dtype=np.float32)
    for at in range(0, 1 << 16, 16):
        functions.round_and_widen(
            ctypes.c_void_p(wide[at:].ctypes.data), ctypes.c_void_p(numbers[at:].ctypes.data)
        )
    assert np.array_equal(wide.view(np.uint32), expected.astype(np.uint32) << 16)


def test_products_of_pairs_are_two_multiply_adds(functions: ctypes.CDLL) -> None:
    """Lower halves first; each sum is rounded once, so float64 has the same number."""
    generator = np.random.default_rng(7)
    for _ in range(200):
        a, b = (as_bfloat16(generator.standard_normal(32).astype(np.float32)) for _ in range(2))
        sums = generator.standard_normal(16).astype(np.float32)
        wide = [(each.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for each in (a, b)]
        expected = sums.copy()
        for half in (0, 1):
            expected = (expected.astype(np.float64) + wide[0][half::2] * wide[1][half::2]).astype(np.float32)
        functions.multiply_pairs(*(ctypes.c_void_p(each.ctypes.data) for each in (sums, a, b)))
        assert np.array_equal(sums, expected)


def test_products_of_bytes_are_whole_numbers(functions: ctypes.CDLL) -> None:
    """The greatest ones as well, which 16 bits do not hold."""
    generator = np.random.default_rng(8)
    for number in range(200):
        weights = generator.integers(-128, 128, 64).astype(np.int8)
        inputs = generator.integers(0, 256, 64).astype(np.uint8)
        if number < 4:
            weights[:], inputs[:] = (-128, 127)[number % 2], (255, 128)[number // 2]
        sums = generator.integers(-(2**30), 2**30, 16).astype(np.int32)
        products = weights.astype(np.int32) * inputs.astype(np.int32)
        expected = sums + products.reshape(16, 4).sum(axis=1)
        functions.multiply_bytes(*(ctypes.c_void_p(each.ctypes.data) for each in (sums, weights, inputs)))
        assert np.array_equal(sums, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_equal_torchs(kernels: library.KernelLibrary, dtype: torch.dtype) -> None:
    test_kernels.test_linear(21, 50, 34, dtype)
    test_kernels.test_linear(3, 32, 64, dtype)
    test_kernels.test_linear_of_groups(8, 64, 32, dtype)
    test_kernels.test_attention(64, 4, False, dtype)
    for width in (16, 192, 200):
        test_kernels.test_norm(width, dtype)
    test_kernels.test_experts_with_biases_and_a_clipped_gate(dtype)


@pytest.mark.parametrize("written", [None, "w8a8 per channel"], ids=["bfloat16", "bytes"])
def test_a_model_has_the_same_bits_in_any_batch(
    written: str | None, emulated: library.KernelLibrary, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path / "plain", "llama", dtype=torch.bfloat16)
    if written is not None:
        write_quantized(directory, written, tmp_path / "quantized", tmp_path / "wide")
        directory = tmp_path / "quantized"
    program = make_program(load(directory), BLOCK_SIZE)
    assert program is not None, "it computes what the model's own code does"
    assert program.kind == "avx512f"
    model = load(directory)
    together, alone = (program_of(model, kernels=emulated) for _ in range(2))
    for rows in SCENARIO:
        packed, ids = packed_rows(rows)
        found = together.forward(packed, ids, everything(ids)).clone()
        begin = 0
        for row in rows:
            packed, ids = packed_rows([row])
            expected = alone.forward(packed, ids, everything(ids))
            assert torch.equal(found[begin : begin + len(ids)], expected)
            begin += len(ids)


def test_the_compilers_command_has_the_last_word_on_the_level() -> None:
    """So the kernels of whole test runs compile within the time that a start allows."""
    command = [*shlex.split(WIDE.command()), "-O3", "-###", "-c", "-x", "c++", "/dev/null"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    (compiled,) = (line for line in shown.splitlines() if "cc1plus" in line and "-quiet" in line)
    assert [each.strip('"') for each in compiled.split() if each.strip('"').startswith("-O")][-1] == "-O1"


@pytest.mark.skipif(architecture() != "x86_64", reason="a kind of x86-64")
def test_the_fastest_kind_is_opened_without_what_it_must_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, ...]] = []

    def open_noted(self: NativeSource, *options: str) -> None:
        opened.append(options)

    features = KINDS["avx512f"].needs | {"avx512_bf16"}
    monkeypatch.setattr(compiler, "cpu_flags", lambda: features)
    monkeypatch.setattr(NativeSource, "open", open_noted)
    monkeypatch.setattr(library, "KernelLibrary", lambda native: native)
    library.opened()
    assert opened == [("-mno-avx512bf16",)]


HALF_OF_AVX512 = CpuTarget("no VNNI", (*AVX512F_OPTIONS, "-mavx512bf16"), KINDS["avx512f"].needs)
"""A CPU with instructions for bfloat16, but not for bytes: ``avx512`` needs both."""


@pytest.mark.parametrize(
    "target", [*KINDS["avx512f"].targets, HALF_OF_AVX512], ids=lambda target: target.name
)
def test_its_targets_compile_without_a_warning(target: CpuTarget, tmp_path: Path) -> None:
    """Products, of which each function differs by target; nothing has instructions that the CPU lacks."""
    source, built = tmp_path / "functions.cpp", tmp_path / "functions.o"
    source.write_text(FUNCTIONS)
    places = [f"-I{library.KERNELS}", f"-I{compiler.INCLUDE}"]
    options = [
        "-O1",
        "-std=c++17",
        "-Wall",
        "-Werror",
        "-Wno-unused-function",
        "-fopenmp",
        *library.SOURCE.flags,
    ]
    subprocess.run(
        ["g++", *options, *target.options, *places, "-c", str(source), "-o", str(built)], check=True
    )
    if shutil.which("objdump") is None:
        return
    shown = ["objdump", "-d", "--no-show-raw-insn", str(built)]
    text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
    assert "vdpbf16ps" not in text
    assert "vcvtne" not in text
    assert ("vpdpbusd" in text) == ("avx512_vnni" in target.needs)
    assert ("vpermb" in text) <= ("avx512vbmi" in target.needs)
    assert "zmm" in text
