"""Perplexity of all formats on held-out text, within 1 % of their libraries'."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType, quants

from engine.config.quantization import ONLINE, QuantizationName
from engine.model.gguf.reading import TYPES
from examples.training.corpus import stage_text
from examples.training.held_out_loss import loss_of, windows
from tests.engine.model.gguf.k_quants import k_quantized
from tests.engine.model.quantization import perplexity, reference
from tests.engine.model.quantization.perplexity import FORMATS, LIMIT, SHIPPED, Work

CACHE_LIMIT = 0.005
"""Largest part by which a perplexity may change with keys and values as codes."""
STORY = list(range(40, 140))
"""Tokens of no text at all, for what does not need one."""


@pytest.mark.parametrize(("kind", "lost"), [("Q4_K", 0.08), ("Q5_K", 0.04), ("Q6_K", 0.02)])
def test_k_types_that_are_written_here_are_near_the_weights(kind: str, lost: float) -> None:
    numbers = np.random.default_rng(3).standard_normal((3, 512)).astype(np.float32)
    numbers[0, :32], numbers[1, 32:64] = 0, numbers[1, 32:64] + 3
    found = quants.dequantize(k_quantized(numbers, kind), GGMLQuantizationType[kind])
    assert np.linalg.norm(found - numbers) < lost * np.linalg.norm(numbers)
    assert not found[0, :32].any()


def test_the_padded_model_computes_what_the_shipped_one_does(tmp_path: Path) -> None:
    perplexity.write_padded(tmp_path / "padded")
    losses = [reference.loss_by_torch(each, [STORY]) for each in (SHIPPED, tmp_path / "padded")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_inputs_of_all_matrices_are_rounded(tmp_path: Path) -> None:
    """Each expert that is chosen, and what stays as it is gives the same."""
    seen: set[str] = set()

    def note(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.add(name)
        return x

    plain = reference.loss_by_torch(SHIPPED, [STORY])
    assert reference.loss_by_torch(SHIPPED, [STORY], note) == pytest.approx(plain, rel=1e-5)
    assert {"model.layers.0.self_attn.q_proj", "model.layers.5.mlp.experts.0.down_proj"} <= seen
    assert not any("lm_head" in name or name.endswith("mlp.gate") for name in seen)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of the training, from Debian's archive."""
    work = tmp_path_factory.mktemp("text")
    if shutil.which("apt-get") is None:
        pytest.skip("the text is in a Debian package, and there is no apt-get here")
    try:
        stage_text(work, None)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the text is in a Debian package, which cannot be loaded: {error}")
    return work


@pytest.mark.nightly
@pytest.mark.mesh
@pytest.mark.parametrize("name", FORMATS)
def test_perplexity_is_that_of_the_library(name: str, text: Path, tmp_path: Path) -> None:
    found = perplexity.measure(name, Work(tmp_path, perplexity.training_windows(text)), windows(text))
    assert abs(found.change) < LIMIT
    assert math.exp(found.served) < 60, "still the model of the card"


@pytest.fixture(scope="module")
def plain_loss(text: Path) -> float:
    """With keys and values in bfloat16."""
    return loss_of(str(SHIPPED), "auto", "auto", windows(text))


@pytest.mark.nightly
@pytest.mark.mesh
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_perplexity_with_a_cache_of_codes(kept: str, text: Path, plain_loss: float) -> None:
    found = loss_of(str(SHIPPED), kept, "auto", windows(text))
    assert found != plain_loss
    assert abs(math.exp(found - plain_loss) - 1) < CACHE_LIMIT


def test_every_format_that_is_read_is_measured() -> None:
    """Types of GGUF files, ways to quantise while reading, and methods of checkpoints."""
    measured = {name.removeprefix("gguf ") for name in FORMATS if name.startswith("gguf ")}
    assert measured == {kind.name for kind in TYPES.values()} - {"F32"}
    assert {f"--quantization {name}" for name in ONLINE} <= FORMATS.keys()
    methods = [name.partition(" ")[0].rstrip(",") for name in FORMATS]
    assert {*get_args(QuantizationName)} - {*ONLINE, "mxfp4"} <= {*methods}
