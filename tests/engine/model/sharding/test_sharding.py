"""Instances cut into shards against transformers' ``generate``, token for token, for every family.

The workers are threads with the real shards and layers (shard_threads.py); the traffic is that of
test_exactness.py: 32 requests at once, prompts cut into chunks, a prefix found in the cache, and a KV
cache so small that requests are preempted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.messages import Counters, Submit
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.sampling import SamplingParams, ThinkingBudget
from tests.engine.compute.test_exactness import NUM_REQUESTS, PEER, greedy, oracle, output_length, prompts
from tests.engine.greedy import greedy_outputs
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import COMMON, FAMILIES, make_tiny_model, widen

LAYERS = 4
BLOCK_SIZE = 4
NUM_IN_TABLE = 9
"""Requests of each entry of the table."""


@dataclass(frozen=True)
class Layout:
    """One configuration of the table."""

    tp: int = 1
    pp: int = 1
    split: tuple[int, ...] | None = None
    depth: int | None = None
    """Steps under way at once; None: as many as stages."""


LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "pp2": Layout(pp=2),
    "pp3_uneven": Layout(pp=3, split=(1, 2, 1), depth=4),
    "tp2_pp2": Layout(tp=2, pp=2),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, layers=LAYERS)


@pytest.fixture(scope="module")
def reference(directory: Path) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    lengths = [length(index) for index in range(NUM_IN_TABLE)]
    return greedy_outputs(model, prompts()[:NUM_IN_TABLE], lengths)


def length(index: int) -> int:
    return 4 + index % 5


@pytest.fixture(autouse=True, scope="module")
def quick_turns() -> Iterator[None]:
    """Threads that compute in turns, as these workers do, else wait 5 ms for each."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def settings(directory: Path, budget: int = 2048, block_size: int = BLOCK_SIZE) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=min(budget, 32)),
    )


def shards(directory: Path, layout: Layout, block_size: int = BLOCK_SIZE, **more: Any) -> ThreadedShards:
    """A sharded instance in threads.

    ``more``: arguments of :class:`ThreadedShards`.
    """
    executor = ThreadedShards(
        settings(directory, block_size=block_size),
        read_model_info(directory),
        tp=layout.tp,
        pp=layout.pp,
        split=layout.split,
        depth=layout.depth,
        **more,
    )
    executor.load(lambda _phase: None)
    return executor


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def executor(request: pytest.FixtureRequest, directory: Path) -> Iterator[ThreadedShards]:
    executor = shards(directory, LAYOUTS[request.param])
    yield executor
    executor.close()


def run(
    executor: Any,
    directory: Path,
    params: list[SamplingParams],
    *,
    num_blocks: int,
    budget: int,
    drafts: list[list[int]] | None = None,
    block_size: int = BLOCK_SIZE,
) -> tuple[list[list[int]], Counters]:
    """Outputs of all requests, sent at once."""
    core = EngineCore(
        settings(directory, budget, block_size),
        read_model_info(directory),
        executor,
        num_blocks=num_blocks,
        max_model_len=512,
        speculation=None if drafts is None else oracle(prompts()[: len(params)], drafts),
    )
    executor.allocate(num_blocks)
    outputs: dict[int, list[int]] = {index: [] for index in range(len(params))}
    for index, param in enumerate(params):
        submit = Submit(
            request=index, request_id=str(index), prompt_ids=prompts()[index], params=param, seed=index
        )
        assert core.submit(PEER, submit) is None
    while core.has_work:
        for delta in core.step().get(PEER, []):
            outputs[delta.request] += delta.token_ids
    assert core.reports.report(0, 0).blocks_used == 0
    return [outputs[index] for index in range(len(params))], core.scheduler.counters()


@pytest.mark.diagonal("directory", "executor", columns=5, each=1)
def test_greedy_ids_equal_transformers(
    executor: ThreadedShards, directory: Path, reference: list[list[int]]
) -> None:
    """With little room: chunks, preemption and the prefix cache at once."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=length(index), ignore_eos=True)
        for index in range(NUM_IN_TABLE)
    ]
    outputs, counters = run(executor, directory, params, num_blocks=17, budget=24)
    assert outputs == reference
    assert counters.preemptions > 0, "the cache was not small enough to prove anything"
    assert counters.prefix_cache_hits > 0, "the shared beginning was not found"


def mixed() -> list[SamplingParams]:
    """Greedy, races, top-k, top-p, penalties, biases, allowed tokens and log-probabilities in one batch."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 1.1, "top_k": 30},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "logit_bias": {7: 9.0, 200: 9.5, 383: 9.2}},
        {"temperature": 1.0, "allowed_token_ids": (5, 190, 191, 192, 370)},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": tuple(range(180, 240))},
        {"temperature": 0.9, "thinking": ThinkingBudget(tokens=2, begin=(), end=(7, 8))},
        {"temperature": 0.0, "bad_words": ((7,), *((token, 9) for token in range(200)))},
    ]
    return [
        SamplingParams(**kinds[index % len(kinds)], max_tokens=output_length(index), ignore_eos=True)
        for index in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp2", marks=pytest.mark.nightly),
        "tp4",
        pytest.param("tp2_pp2", marks=pytest.mark.nightly),
        "pp3_uneven",
    ],
)
def test_sampling_chooses_what_one_worker_would(
    layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """385 tokens do not divide: the ranks have parts of the vocabulary of different size."""
    directory = make_tiny_model(tmp_path_factory.mktemp(layout), "qwen3", layers=LAYERS, vocab_size=385)
    alone = UniExecutor(settings(directory), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    expected, _ = run(alone, directory, mixed(), num_blocks=600, budget=512)
    executor = shards(directory, LAYOUTS[layout])
    found, _ = run(executor, directory, mixed(), num_blocks=600, budget=512)
    drafted, counters = run(executor, directory, mixed(), num_blocks=600, budget=512, drafts=expected)
    executor.close()
    assert found == expected
    assert drafted == expected
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0


@pytest.mark.diagonal("layout", "tied", columns=2, each=1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_worker_holds_its_share_of_the_bytes(layout: str, tied: bool, tmp_path: Path) -> None:
    shape = LAYOUTS[layout]
    changes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 512, "num_key_value_heads": 4}
    changes["head_dim"] = 32
    layers = 3 * shape.pp * 2
    directory = make_tiny_model(tmp_path, "llama", layers=layers, tie_word_embeddings=tied, **changes)
    executor = shards(directory, Layout(tp=shape.tp, pp=shape.pp))
    on_disk = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    share = on_disk / (shape.tp * shape.pp)
    models = executor.facts()
    executor.close()
    assert all(abs(model.weight_bytes - share) < 0.1 * share for model in models), (
        [model.weight_bytes for model in models],
        share,
    )
    kv = {model.kv_bytes_per_token() for model in models}
    assert kv == {layers * 4 * 2 * 32 * 4 // (shape.tp * shape.pp)}, "KV heads of this worker's layers only"


def test_kv_heads_fewer_than_ranks_are_held_by_several(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")  # 4 heads, 2 KV heads
    executor = shards(directory, LAYOUTS["tp4"])
    assert [model.layers[0].kv_heads for model in executor.facts()] == [1, 1, 1, 1]
    executor.close()


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.nightly), "tp2_pp2"])
def test_a_tied_embedding_is_cut_once(layout: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "gemma3", tie_word_embeddings=True)
    alone = UniExecutor(settings(directory), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    expected, _ = run(alone, directory, greedy(), num_blocks=600, budget=512)
    executor = shards(directory, LAYOUTS[layout])
    assert run(executor, directory, greedy(), num_blocks=600, budget=512)[0] == expected
    executor.close()


def test_a_plan_that_gathers_is_followed(tmp_path: Path) -> None:
    """Phi-3: fused projections on disk, apart in the model, left whole by its plan."""
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**COMMON))
    widen(model, 0)
    model.save_pretrained(tmp_path)
    alone = UniExecutor(settings(tmp_path), read_model_info(tmp_path), 1)
    alone.load(lambda _phase: None)
    expected, _ = run(alone, tmp_path, greedy()[:6], num_blocks=600, budget=512)
    executor = shards(tmp_path, LAYOUTS["tp2"])
    assert run(executor, tmp_path, greedy()[:6], num_blocks=600, budget=512)[0] == expected
    executor.close()


def test_random_weights_are_cut_too(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3_moe")
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", load_format="dummy"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
    )
    executor = ThreadedShards(config, read_model_info(directory), tp=2, pp=2)
    executor.load(lambda _phase: None)
    outputs, _ = run(executor, directory, greedy(), num_blocks=600, budget=512)
    executor.close()
    assert all(len(output) == output_length(index) for index, output in enumerate(outputs))


def refusal(directory: Path, **layout: Any) -> str:
    executor = ThreadedShards(settings(directory), read_model_info(directory), **layout)
    with pytest.raises(CheckpointError) as caught:
        executor.load(lambda _phase: None)
    return str(caught.value)


def test_what_cannot_be_cut_says_why(tmp_path: Path) -> None:
    llama = make_tiny_model(tmp_path / "llama", "llama")
    assert "4 attention heads and 2 KV heads cannot be divided by 3. Sizes that do: 1, 2, 4" in refusal(
        llama, tp=3
    )
    assert "3 pipeline stages are more than the 2 layers" in refusal(llama, pp=3)
    assert "the split 1,2 adds up to 3 layers, but the model has 2" in refusal(llama, pp=2, split=(1, 2))
    opt = tmp_path / "opt"
    config = transformers.OPTConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, word_embed_proj_dim=32, vocab_size=96
    )
    transformers.OPTForCausalLM(config).save_pretrained(opt)
    assert "has no tensor-parallel plan" in refusal(opt, tp=2)
    assert "has no list of layers that could be split into stages" in refusal(opt, pp=2)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_the_worker_that_needs_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_tiny_model(tmp_path, "llama")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata=json.loads('{"format": "pt"}'))
    assert "lacks 1 tensor(s) that this model needs: model.layers.1.mlp.up_proj.weight" in refusal(
        directory, pp=2
    )
