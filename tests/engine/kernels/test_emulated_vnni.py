"""The code for AVX-VNNI on any CPU with AVX2, its one instruction emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from engine.kernels.core import library
from engine.kernels.make import make_program
from parallel import compiler
from parallel.kernel_kinds import KINDS
from tests.engine.kernels.emulation import VNNI
from tests.engine.kernels.test_kernels import BLOCK_SIZE, SCENARIO, everything, packed_rows, program_of
from tests.engine.model.quantization.writers import write_quantized
from tests.engine.model.test_weights import load
from tests.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    not VNNI.is_possible or library.load() is None, reason="no AVX2, or no g++, here"
)

ROWS_TIMES_PANELS = """
#include "core/contract.hpp"
#include "products/products.hpp"
extern "C" void six_rows(float* out, const uint32_t* words, const char* in, int64_t pitch, int64_t steps) {
    Floats sum[MAX_ROWS][2];
    multiply_panels<Bytes, 6, 1, false>(sum, 0, words, 0, in, pitch, steps, nullptr);
    for (int row = 0; row < 6; ++row) store(out + row * LANES, sum[row][0]);
}
"""
"""A source with the innermost loop of products of bytes alone."""


@pytest.mark.parametrize("written", ["w8a8 per channel", None], ids=["bytes", "bfloat16"])
def test_a_model_has_the_bits_of_avx2(written: str | None, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "plain", "llama", dtype=torch.bfloat16)
    if written is not None:
        write_quantized(directory, written, tmp_path / "quantized", tmp_path / "wide")
        directory = tmp_path / "quantized"
    model, narrow = load(directory), library.opened("avx2")
    with VNNI.kernels() as kernels:
        programs = [program_of(model, kernels=each) for each in (kernels, narrow)]
        assert [program.kind for program in programs] == ["avxvnni", "avx2"]
        for rows in SCENARIO:
            packed, ids = packed_rows(rows)
            found, expected = (each.forward(packed, ids, everything(ids)).clone() for each in programs)
            assert torch.equal(found, expected)
        program = make_program(load(directory), BLOCK_SIZE)
        assert program is not None, "it computes what the model's own code does"
        assert program.kind == "avxvnni"


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (binutils) here")
def test_the_compiler_has_the_instruction_without_avx512(tmp_path: Path) -> None:
    source, built = tmp_path / "rows.cpp", tmp_path / "rows.o"
    source.write_text(ROWS_TIMES_PANELS)
    (target,) = KINDS["avxvnni"].targets
    places = [f"-I{library.KERNELS}", f"-I{compiler.INCLUDE}"]
    command = ["g++", "-O3", "-std=c++17", "-w", "-fopenmp", *target.options, *places, "-c", str(source)]
    subprocess.run([*command, "-o", str(built)], check=True)
    shown = ["objdump", "-d", "--no-show-raw-insn", str(built)]
    lines = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.splitlines()
    assert sum("vpdpbusd" in line for line in lines) >= 12, "six rows, two registers each"
    assert not any("zmm" in line or "vpmaddwd" in line for line in lines)
