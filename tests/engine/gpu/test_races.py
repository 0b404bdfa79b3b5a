"""Races of the sampler by one kernel, in Triton's interpreter, against torch's operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.compute import torch_logits
from engine.compute.logits_backend import NEVER, SampleRow
from engine.compute.token_rules import TokenRules
from engine.compute.torch_logits import TorchLogits, is_race_right, race_by_kernel, race_of_nucleus
from engine.gpu import fused_kernels, fused_launches
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

    def wrong_limits(logits, best, temperatures, lowest, keys, limits) -> torch.Tensor:
        """As if top-k were 1."""
        one = limits and (torch.ones_like(limits[0]), limits[1])
        return race(logits, best, temperatures, lowest, keys, one)

    for wrong in (lambda logits, *rest: race(-logits, *rest), wrong_limits, lambda *_: 1 // 0):
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


def test_rows_are_raced_together_by_what_limits_them() -> None:
    params = [{"top_k": 5}, {}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 7, "top_p": 0.5}]
    rows = []
    for each in params:
        made = SamplingParams(**each)  # type: ignore[arg-type]
        rows.append(SampleRow(made, 0, 0, np.zeros(0, dtype=np.int64), 0, TokenRules(made)))
    ways = torch_logits._ways(rows, torch.device("cuda"), by_kernel=True)
    assert [indices for _, indices in ways] == [[3], [1], [0, 2, 4]]
    assert [choose for choose, _ in ways][1:] == [race_by_kernel, race_of_nucleus]
    ways = torch_logits._ways(rows, torch.device("cuda"), by_kernel=False)
    assert [indices for _, indices in ways] == [[3], [1], [0, 4], [2]], "few tokens are not sorted with all"
    ways = torch_logits._ways(rows, torch.device("cpu"), by_kernel=False)
    assert [indices for _, indices in ways] == [[3], [1], [0, 2, 4], []]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    by_kernel, plain = (TorchLogits(by_kernel=each).draw(logits, rows) for each in (True, False))
    assert torch.equal(by_kernel, plain)


LIMITS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 0.01},
    {"top_k": 40, "top_p": 0.6},
    {"top_p": 1e-6},
    {"top_k": 90_000, "top_p": 0.999},
    {"top_k": 3, "temperature": 1e-40},
    {"top_p": 0.95, "temperature": 20.0},
]


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        ("few may come", 50),
        pytest.param("smooth", 4100, marks=pytest.mark.nightly),
        pytest.param("many are equal", 4100, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("near", [fused_launches.NEAR_TOKENS, 64])
def test_without_a_sort_the_same_tokens_win(
    kind: str, width: int, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed by seed, and so with the same chances as where the vocabulary is sorted."""
    monkeypatch.setattr(fused_launches, "NEAR_TOKENS", near)
    params = [SamplingParams(**each) for each in LIMITS for _ in range(2)]  # type: ignore[arg-type]
    nothing = np.zeros(0, dtype=np.int64)
    rows = [SampleRow(each, 5 * i, 11 * i, nothing, 0, TokenRules(each)) for i, each in enumerate(params)]
    logits = 3 * torch.randn(len(rows), width, generator=torch.Generator().manual_seed(width)).to(DEVICE)
    if kind == "many are equal":
        logits = logits.round()
    if kind == "few may come":
        logits[:, 5:] = NEVER
    expected = torch_logits._draw_truncated(logits, rows)
    assert torch.equal(race_of_nucleus(logits, rows), expected)


@pytest.mark.parametrize("near", [0, 256, fused_launches.NEAR_TOKENS])
@pytest.mark.parametrize("equal", [False, True])
def test_the_tokens_left_are_those_of_a_sort(equal: bool, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very set, not only the winners of a few races.

    Whether or not tokens near the best are copied.
    """
    monkeypatch.setattr(fused_launches, "NEAR_TOKENS", near)
    numbers = torch.Generator().manual_seed(8)
    logits = torch.randn(3, 700, generator=numbers).to(DEVICE) * 2
    logits = logits.round() if equal else logits
    top_k, top_p = torch.tensor([700, 33, 120]), torch.tensor([0.7, 2.0, 0.4])
    scaled = logits - logits.amax(dim=1, keepdim=True)
    values, tokens, _ = torch_logits._truncate(
        scaled, top_k[:, None].to(DEVICE), top_p[:, None].double().to(DEVICE), 700
    )
    expected = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, tokens, values > NEVER)
    said: list[torch.Tensor] = []
    race = fused_kernels.race

    class Noting:
        def __getitem__(self, grid):
            return lambda *arguments, **sizes: (said.extend(arguments[3:5]), race[grid](*arguments, **sizes))

    monkeypatch.setattr(fused_kernels, "race", Noting())
    ones, keys = torch.ones(3, device=DEVICE), torch.full((3, 2), 77, dtype=torch.int32, device=DEVICE)
    limits = top_k.int().to(DEVICE), top_p.to(DEVICE)
    fused_launches.race(logits, logits.amax(dim=1), ones, ones.log() - torch.inf, keys, limits)
    cut, last = (each[:, None] for each in said)
    ids = torch.arange(700, device=DEVICE)[None]
    assert torch.equal((scaled > cut) | ((scaled == cut) & (ids <= last)), expected)


def test_top_k_and_top_p_sort_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(fused_launches, "kernels", Kernels(launches.names))
    monkeypatch.setattr(torch_logits, "upload", PretendedDevice().upload)
    with FakeTensorMode(), torch.no_grad(), launches, Indexing():
        logits = torch.empty(100, 151936, dtype=torch.bfloat16, device="cuda")
        TorchLogits(by_kernel=True).draw(logits, make_rows(100, top_p=0.9, top_k=50))
    launched = [name for name in launches.names if name not in VIEWS]
    assert not {"sort", "topk", "cumsum"} & {*launched}
    assert launched.count("nucleus") == launched.count("race") == 1
    assert len(launched) <= 12, launched
