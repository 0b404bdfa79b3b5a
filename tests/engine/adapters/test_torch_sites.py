"""Adapters of models that torch computes: PEFT's tokens, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordinator.messages import AdapterSource
from engine.adapters.adapter_settings import AdapterError, settled
from engine.config import DeviceConfig, EngineConfig, ModelConfig
from engine.config.lora import LoraConfig
from engine.executor.uni import UniExecutor
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.sampling import SamplingParams
from tests.engine.adapters.made_adapters import PROJECTIONS, make_adapter
from tests.engine.driver import Driven, Driver
from tests.engine.native_families import make_family
from tests.engine.states.models import make_state_model

ATTENTION = PROJECTIONS[:4]
EVERYWHERE = [*PROJECTIONS, "embed_tokens", "lm_head"]
FAMILIES = {
    "llama": EVERYWHERE,
    "gemma3": [*PROJECTIONS, "embed_tokens"],  # with a factor on what it gives
    "qwen3_moe": [*ATTENTION, "lm_head"],
    "jamba": ATTENTION,  # with recurrent states, which torch alone computes
    "zamba2": ATTENTION,
}
AT_NIGHT = ("gemma3", "qwen3_moe", "zamba2")
OF_STATES = ("jamba", "zamba2")
PROMPTS = [[4 + (7 * index + 31 * each) % 60 for index in range(11 + 9 * each)] for each in range(4)]
ADAPTERS = [1, 0, 2, 1]
TOKENS = 12


class Served:
    """A model by torch with two adapters, and transformers' model with each of them."""

    def __init__(self, directory: Path, family: str, *, is_invariant: bool = False) -> None:
        self.model, self.directory = directory / "model", directory
        (make_state_model if family in OF_STATES else make_family)(self.model, family)
        targets = FAMILIES[family]
        self.truths = [
            make_adapter(self.model, directory / str(number), seed=number, target_modules=targets)
            for number in (1, 2)
        ]
        self.digests = ["", *(settled(self.source(str(number))).digest for number in (1, 2))]
        modules = tuple(f"{number}={directory / str(number)}" for number in (1, 2))
        self.executor = self.made(modules, is_invariant=is_invariant)

    def source(self, name: str) -> AdapterSource:
        return AdapterSource(name, str(self.directory / name))

    def made(self, modules: tuple[str, ...], *, is_invariant: bool) -> UniExecutor:
        config = EngineConfig(
            model=ModelConfig(model=str(self.model), dtype="float32"),
            device=DeviceConfig(device="cpu", numerics="torch", batch_invariant=is_invariant),
            lora=LoraConfig(enable_lora=True, lora_modules=modules),
        )
        made = UniExecutor(config, read_model_info(self.model), 1)
        made.load(lambda _phase: None)
        made.allocate(64, 16 if made._info.has_states else 0)
        return made

    def answers(self, wanted: list[int], chunk: int = 8) -> list[Driven]:
        """Requests of these prompts, computed together, at most ``chunk`` tokens of each at once."""

        def run(step: Any) -> Any:
            self.executor.begin(step)
            return self.executor.finish()

        driver = Driver(SimpleNamespace(run=run), 16, 64)  # type: ignore[arg-type]
        greedy = SamplingParams(temperature=0.0, logprobs=2)
        asked = [
            driver.add(PROMPTS[each], greedy, adapter=(number, self.digests[number]))
            for each in wanted
            for number in [ADAPTERS[each]]
        ]
        driver.generate(asked, TOKENS, chunk=chunk)
        return asked

    def truth(self, each: int) -> list[int]:
        model, number = self.truths[max(ADAPTERS[each], 1) - 1], ADAPTERS[each]
        given = {"input_ids": torch.tensor([PROMPTS[each]]), "max_new_tokens": TOKENS, "do_sample": False}
        given |= {"eos_token_id": None, "pad_token_id": 2}
        if number:
            found = model.generate(**given)
        else:
            with model.disable_adapter():
                found = model.generate(**given)
        ids: list[int] = found[0, len(PROMPTS[each]) :].tolist()
        return ids


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.nightly] * (each in AT_NIGHT)) for each in FAMILIES]
)
def test_rows_of_a_step_have_the_tokens_of_their_adapters(family: str, tmp_path: Path) -> None:
    served = Served(tmp_path, family)
    expected = [served.truth(each) for each in range(4)]
    for chunk in (8, 64):  # the latter: all prompts in one step, whose first tokens have no logits
        assert [each.output_ids for each in served.answers([0, 1, 2, 3], chunk)] == expected
    served.executor.close()


def test_bits_are_those_of_a_row_alone_with_batch_invariant(tmp_path: Path) -> None:
    served = Served(tmp_path, "llama", is_invariant=True)
    together = served.answers([0, 1, 2, 3])
    for each, beside in enumerate(together):
        (alone,) = served.answers([each])
        assert (alone.output_ids, alone.logprobs) == (beside.output_ids, beside.logprobs)
    served.executor.close()


def test_what_torch_does_not_compute_is_refused(tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen3_moe")
    parameters = ["experts.gate_up_proj"]
    make_adapter(served.model, tmp_path / "experts", target_modules=[], target_parameters=parameters)
    held = served.executor.adapters
    assert held is not None
    with pytest.raises(AdapterError, match=r"adapts .*experts.gate_up_proj: of this model, adapters of emb"):
        held.read(served.source("experts"))
    executor = served.executor
    assert executor._model is not None
    executor._shard = replace(executor._shard, size=2)
    with pytest.raises(CheckpointError, match="--enable-lora with -tp"):
        executor._check_kernels(executor._model)
