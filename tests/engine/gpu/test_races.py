"""Races of the sampler by one kernel, in Triton's interpreter, against torch's operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.compute import torch_logits
from engine.compute.logits_backend import NEVER, SampleRow
from engine.compute.token_rules import TokenRules
from engine.compute.torch_logits import TorchLogits, is_race_right, race_by_kernel
from engine.gpu import fused_launches
from engine.sampling import SamplingParams
from tests.engine.attention.test_transfer import PretendedDevice
from tests.engine.gpu.recorder import Kernels
from tests.engine.gpu.test_launches import VIEWS
from tests.engine.pretended_device import Indexing, Launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEMPERATURES = (0.0001, 0.3, 1.0, 1.7, 1e-40, 20.0)


def make_rows(count: int, **params: float) -> list[SampleRow]:
    made = [SamplingParams(temperature=TEMPERATURES[i % 6], **params) for i in range(count)]  # type: ignore[arg-type]
    nothing = np.zeros(0, dtype=np.int64)
    return [SampleRow(each, 3 * i, 11 * i, nothing, 0, TokenRules(each)) for i, each in enumerate(made)]


@pytest.mark.parametrize("width", [1, 50, 4096, 9001])
@pytest.mark.parametrize("params", [{}, {"min_p": 0.2}])
def test_the_kernel_finds_the_same_winners(width: int, params: dict[str, float]) -> None:
    logits = torch.randn(48, width, generator=torch.Generator().manual_seed(width)).to(DEVICE) * 3
    logits[5, 1:] = NEVER
    logits[:, width // 2] = NEVER if width > 1 else 0.0
    rows = make_rows(48, **params)
    expected = torch_logits._draw(logits, rows)
    found = race_by_kernel(logits, rows)
    assert (found == expected).sum() >= 47, "near ties may go either way"
    assert found[5] == 0
    assert (found != width // 2).all() or width == 1


def test_the_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    is_race_right.cache_clear()
    assert is_race_right(DEVICE)
    race = fused_launches.race
    for wrong in (lambda logits, *rest: race(-logits, *rest), lambda *_: 1 // 0):
        monkeypatch.setattr(fused_launches, "race", wrong)
        is_race_right.cache_clear()
        assert not is_race_right(DEVICE)
    is_race_right.cache_clear()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_race_goes_over_all_logits_four_times(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are picked, widened, searched for the best, and raced."""
    launches = Launches()
    monkeypatch.setattr(fused_launches, "kernels", Kernels(launches.names))
    monkeypatch.setattr(torch_logits, "upload", PretendedDevice().upload)
    with FakeTensorMode(), torch.no_grad(), launches, Indexing():
        logits = torch.empty(100, 151936, dtype=torch.bfloat16, device="cuda")
        TorchLogits(by_kernel=by_kernel).draw(logits, make_rows(100))
    counted = [launches.names.count(name) for name in ("index_select", "_to_copy", "amax", "race")]
    assert counted == [1, 1, 1, 1] if by_kernel else counted[3] == 0
    launched = [name for name in launches.names if name not in VIEWS]
    assert len(launched) == 8 if by_kernel else len(launched) > 35, launched


def test_on_a_gpu_rows_with_top_k_are_not_sorted_with_those_without() -> None:
    params = [{"top_k": 5}, {}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 7, "top_p": 0.5}]
    rows = []
    for each in params:
        made = SamplingParams(**each)  # type: ignore[arg-type]
        rows.append(SampleRow(made, 0, 0, np.zeros(0, dtype=np.int64), 0, TokenRules(made)))
    ways = torch_logits._ways(rows, torch.device("cuda"), by_kernel=True)
    assert [indices for _, indices in ways] == [[3], [1], [0, 4], [2]]
    assert ways[1][0] is race_by_kernel
    ways = torch_logits._ways(rows, torch.device("cpu"), by_kernel=False)
    assert [indices for _, indices in ways] == [[3], [1], [0, 2, 4], []]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    by_kernel, plain = (TorchLogits(by_kernel=each).draw(logits, rows) for each in (True, False))
    assert torch.equal(by_kernel, plain)
