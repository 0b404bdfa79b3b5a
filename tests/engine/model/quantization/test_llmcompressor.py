"""Checkpoints made by llmcompressor: ids are those of the weights that its own library finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.model.quantization.layers import INNER
from engine.model.weight_files import open_weights
from parallel.parts import parts_here
from tests.engine.compute.test_runner import make_prompts
from tests.engine.greedy import greedy_outputs
from tests.engine.model.quantization import made_by_llmcompressor, reference
from tests.engine.model.quantization.made_by_llmcompressor import SCHEMES
from tests.engine.model.quantization.writers import LINEAR
from tests.engine.model.test_weights import greedy_ids, load
from tests.engine.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[4]
VERSION = "0.14.0.1"
ENVIRONMENT = ROOT / "build" / "peers" / "llmcompressor"
INSTALL_SECONDS, MAKE_SECONDS = 1500, 240
LENGTH, NEW = 29, 24
"""Tokens of a prompt, and of its answer."""
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Sizes that the tool's groups of 128 divide."""

pytestmark = [pytest.mark.nightly, pytest.mark.mesh, pytest.mark.timeout(INSTALL_SECONDS + MAKE_SECONDS)]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with llmcompressor, which is kept."""
    done, found = ENVIRONMENT / f".installed-{VERSION}", ENVIRONMENT / "bin" / "python"
    if done.exists():
        return found
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    packages = [f"llmcompressor=={VERSION}", next(line for line in lines if line.startswith("torch=="))]
    try:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
            [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", "") or error).strip()[-600:]
        pytest.skip(f"llmcompressor {VERSION} cannot be installed in {ENVIRONMENT}: {told}")
    done.touch()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("plain")
    bfloat16 = {"dtype": torch.bfloat16}
    return {
        "llama": make_tiny_model(directory / "llama", "llama", **bfloat16, **WIDE),
        "qwen3_moe": make_tiny_model(
            directory / "moe", "qwen3_moe", **bfloat16, **WIDE, moe_intermediate_size=128
        ),
    }


def rounded_in_parts(name: str, x: torch.Tensor) -> torch.Tensor:
    """Inputs rounded as vLLM's kernels do it.

    Parts that ranks may share have scales of their own. The library's own scale is 0.4 % less, for its codes begin at -128.
    """
    parts = parts_here(x.shape[-1], 1) if name.rpartition(".")[2] in INNER else 1
    each = x.unflatten(-1, (parts, -1))
    scale = each.abs().amax(-1, keepdim=True) / 127
    return ((each / scale).round() * scale).flatten(-2)


def expected_ids(widened: Path, scheme: str) -> list[int]:
    """Ids by transformers in float32; activations are rounded where they are served so."""
    model = AutoModelForCausalLM.from_pretrained(widened, dtype=torch.float32).eval()
    if scheme == "W8A8":
        reference.change_inputs(model, rounded_in_parts)
    (ids,) = greedy_outputs(model, make_prompts((LENGTH,)), [NEW])
    return ids


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *(("llama", scheme) for scheme in SCHEMES),
        *(("qwen3_moe", each) for each in ("W4A16", "W8A8", "GPTQ")),
    ],
)
def test_ids_are_those_of_the_library(
    family: str, scheme: str, plain: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    """The tool and what widens its checkpoint again run in an environment of their own."""
    quantized, widened = tmp_path / "quantized", tmp_path / "widened"
    made = subprocess.run(
        [python, made_by_llmcompressor.__file__, scheme, plain[family], quantized, widened],
        cwd=tmp_path,
        env={name: each for name, each in os.environ.items() if not name.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=MAKE_SECONDS,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    said = json.loads((quantized / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    weights = load_file(widened / "model.safetensors")
    with open_weights(quantized, torch.float32) as (files,):
        assert sorted(files.keys()) == sorted(weights)
        assert sum(name in files.matrices for name in weights) == sum(map(bool, map(LINEAR.search, weights)))
        for name, weight in weights.items():
            torch.testing.assert_close(files.get_tensor(name).float(), weight, rtol=0, atol=0)
    assert greedy_ids(load(quantized), NEW, LENGTH) == expected_ids(widened, scheme)
