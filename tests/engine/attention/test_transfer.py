"""A step on a pretended device: nothing asks it for numbers before the final fetch.

(``pretended_device`` raises where something else would.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from engine.attention.transfer import begin_fetch, upload
from engine.compute import runner as runner_module
from engine.compute import sampler, token_rules, torch_logits
from engine.compute.runner import ModelRunner
from engine.compute.sampler import Sampler
from engine.gpu import fused_launches
from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams
from engine.step import Admit, Masks, Step
from tests.engine.gpu.recorder import Kernels
from tests.engine.pretended_device import Indexing, Launches

VOCAB = 50


def params_of_all_kinds() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.8),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(temperature=0.0, logit_bias={3: 2.0}, allowed_token_ids=[3, 4, 5]),
        SamplingParams(temperature=0.0, min_tokens=4, logprobs=3),
        SamplingParams(temperature=0.5, prompt_logprobs=2),
    ]


class PretendedDevice:
    """A device whose uploads become fake tensors, and whose downloads are zeros."""

    def __init__(self) -> None:
        self.begun = self.fetched = 0

    def upload(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        dtype = torch.from_numpy(np.zeros(1, dtype=array.dtype)).dtype
        return torch.empty(array.shape, dtype=dtype, device=device)

    def begin_fetch(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        assert tensor.device.type == "cuda"
        self.begun += 1

        def numbers() -> np.ndarray:
            self.fetched += 1
            return np.zeros(tuple(tensor.shape), np.float64 if tensor.is_floating_point() else np.int64)

        return numbers


@pytest.mark.parametrize(
    ("kinds", "by_kernel"), [(slice(0, 1), False), (slice(0, 3), True), (slice(None), False)]
)
def test_a_step_waits_once(kinds: slice, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = PretendedDevice()
    launched: list[str] = []
    monkeypatch.setattr(sampler, "is_race_right", lambda _: by_kernel)
    monkeypatch.setattr(fused_launches, "kernels", Kernels(launched))
    monkeypatch.setattr(runner_module, "upload", device.upload)
    monkeypatch.setattr(runner_module, "begin_fetch", device.begin_fetch)
    for module in (sampler, torch_logits, token_rules):
        monkeypatch.setattr(module, "upload", device.upload)
    made = torch.tensor
    monkeypatch.setattr(
        torch,
        "tensor",
        lambda *a, device=None, **k: made(*a, **k) if device is None else pytest.fail("waits"),
    )
    all_params = params_of_all_kinds()[kinds]
    step = Step(
        [Admit(i, [1, 2, 3, 4], 4, params, i, (7,)) for i, params in enumerate(all_params)],
        list(range(len(all_params))),
        [0] * len(all_params),
        [4] * len(all_params),
        {i: [i] for i in range(len(all_params))},
        masks=Masks([0], bytes([255] * 7)),
    )

    class Computed(ModelRunner):
        def _forward(self, packed, input_ids, wanted, hidden, followed=None, **options):
            return torch.empty(len(wanted), VOCAB, dtype=torch.bfloat16, device="cuda")

    class Model:
        device = torch.device("cuda")
        states = None
        hidden_size = 8

        class stage:
            class shard:
                size, rank, is_first, is_last = 1, 0, True, True

    runner = Computed(Model(), None, 4)
    with FakeTensorMode(), Launches(), Indexing():
        finish = runner.begin(step)
        assert (device.begun, device.fetched) == (1, 0), "nothing was waited for yet"
        result = finish()
    assert (device.begun, device.fetched) == (1, 1)
    assert launched == (["race", "crowd", "pick_near", "nucleus", "race"] if by_kernel else [])
    assert len(result.tokens) == len(all_params)
    if len(all_params) > 3:
        assert isinstance(result.logprobs.get(6), TokenLogprobs)
        assert len(result.prompt_logprobs.get(7, [])) == 3


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_rehearsal_of_sampling_waits_for_nothing(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampler, torch_logits):
        monkeypatch.setattr(module, "upload", PretendedDevice().upload)
    monkeypatch.setattr(sampler, "is_race_right", lambda _: by_kernel)
    launched: list[str] = []
    monkeypatch.setattr(fused_launches, "kernels", Kernels(launched))
    with FakeTensorMode(), Launches() as launches, Indexing():
        Sampler(torch.device("cuda")).rehearse(torch.empty(6, VOCAB, dtype=torch.bfloat16, device="cuda"))
    assert ("sort" in launches.names) != by_kernel
    assert launched == ["crowd", "pick_near", "nucleus", "race"] * by_kernel


def test_the_pretended_device_notices() -> None:
    with FakeTensorMode(), Launches(), Indexing():
        logits = torch.empty(3, VOCAB, device="cuda")
        with pytest.raises(DataDependentOutputException):
            bool(logits.any())
        with pytest.raises(DataDependentOutputException):
            logits.argmax(dim=-1).tolist()
        with pytest.raises(AssertionError, match="between devices"):
            logits.cpu()


def test_on_a_cpu_nothing_is_copied() -> None:
    numbers = np.arange(6)
    tensor = upload(numbers, torch.device("cpu"))
    assert begin_fetch(tensor)().ctypes.data == numbers.ctypes.data
    assert upload(numbers[::2], torch.device("cpu")).tolist() == [0, 2, 4]
