"""``LLM`` with new weights: answers and scores are those of each version, on all instances."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from lockstep import LLM, RequestOutput, SamplingParams
from tests.engine.weight_versions.made import trained

pytestmark = pytest.mark.mesh

FLAGS: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_num_seqs": 32, "enable_expert_parallel": False}
PROMPTS = [[5 + 3 * index + place for place in range(40)] for index in range(8)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=0, ignore_eos=True)


def answers(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Token ids of each answer, and their log-probabilities."""
    found = []
    for output in outputs:
        (sample,) = output.outputs
        entries = zip(sample.token_ids, sample.logprobs or [], strict=True)
        found.append((sample.token_ids, [entry[token].logprob for token, entry in entries if entry]))
    return found


def generate(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Answers, whose scores are the numbers that they were sampled with."""
    found = answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert llm.score_tokens(PROMPTS, [ids for ids, _ in found]) == [logprobs for _, logprobs in found]
    return found


def test_an_llm_goes_over_to_new_weights(tmp_path: Path) -> None:
    old = MODELS_DIRECTORY / SHIPPED_MODEL
    new = trained(old, tmp_path / "new")
    with LLM(str(new), data_parallel_size=1, **FLAGS) as llm:
        after = generate(llm)
    with LLM(str(old), data_parallel_size=2, **FLAGS) as llm:
        before = generate(llm)
        with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
            llm.update_weights(tmp_path)
        with pytest.raises(ValueError, match="in_flight is one of keep, recompute, abort, finish"):
            llm.update_weights(new, in_flight="drain")
        assert generate(llm) == before
        running: list[list[RequestOutput]] = []
        longer = PARAMS.clone()
        longer.max_tokens = 200
        thread = threading.Thread(
            target=lambda: running.append(llm.generate(PROMPTS, longer, use_tqdm=False))
        )
        thread.start()
        assert "weights 1 (step 1) are in use" in llm.update_weights(new, label="step 1")
        thread.join()
        assert [len(output.outputs[0].token_ids) for output in running[0]] == [200] * len(PROMPTS)
        assert generate(llm) == after != before
        llm.update_weights(old, in_flight="recompute")
        assert generate(llm) == before


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_workers_go_over_to_new_weights(layout: dict[str, int], tmp_path: Path) -> None:
    old = MODELS_DIRECTORY / SHIPPED_MODEL
    new = trained(old, tmp_path / "new")
    with LLM(str(new), data_parallel_size=1, **FLAGS, **layout) as llm:
        after = generate(llm)
    with LLM(str(old), data_parallel_size=1, **FLAGS, **layout) as llm:
        before = generate(llm)
        llm.update_weights(new)
        assert generate(llm) == after != before
