"""The in-process executor, from loading to a step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from engine.attention.base import LayerShape
from engine.attention.torch_paged import GATHER_BYTES
from engine.compute.sampler import Sampler
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.executor import loaded_shard, make_executor
from engine.executor.uni import CPU_KV_LIMIT, UniExecutor
from engine.host import memory
from engine.host.cache_size import size_cache
from engine.lifecycle.instance import memory_turn
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.sharding.shard import Shard
from engine.sampling import SamplingParams
from engine.step import Admit, Step
from tests.engine.tiny_models import VOCAB, make_tiny_model


def test_load_allocate_execute_close(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3_moe")
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="bfloat16"),
        cache=CacheConfig(block_size=8),
        device=DeviceConfig(device="cpu"),
    )
    phases: list[str] = []
    executor = make_executor(config, read_model_info(directory), 1)
    facts = executor.load(phases.append)
    assert torch.get_num_threads() == 1
    assert phases
    assert (facts.architecture, facts.dtype, facts.device) == ("Qwen3MoeForCausalLM", "bfloat16", "cpu")
    assert (facts.vocab_size, facts.weight_bytes) == (VOCAB, 2 * facts.num_parameters)
    assert (facts.kv.num_layers, facts.kv.bytes_per_token) == (2, 2 * 2 * (16 + 16) * 2)
    assert 0 < executor.free_kv_memory() <= CPU_KV_LIMIT
    executor.allocate(4)
    greedy = SamplingParams(temperature=0.0)
    step = Step([Admit(0, [5, 6, 7], 3, greedy, 0, ())], [0], [0], [3], {0: [2]})
    for _ in range(2):
        executor.begin(step)
    first = executor.finish()
    assert executor.finish() == first
    token = first.tokens[0]
    assert token is not None
    assert 0 <= token < VOCAB
    executor.begin(Step([], [0], [3], [1]))
    assert len(executor.finish().tokens) == 1
    executor.close()


def test_codes_of_the_kv_cache_take_half_the_room(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama", head_dim=64)
    blocks = []
    for kept in ("auto", "int8"):
        config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype="bfloat16", max_model_len=128),
            cache=CacheConfig(kv_cache_dtype=kept, kv_cache_memory_bytes=1 << 22),  # type: ignore[arg-type]
            device=DeviceConfig(device="cpu"),
        )
        executor = UniExecutor(config, read_model_info(directory), 1)
        facts = executor.load(lambda _phase: None)
        blocks.append(size_cache(config, facts, executor.free_kv_memory, 1)[0])
        executor.close()
    assert 1.9 * blocks[0] < blocks[1] < 2 * blocks[0]


def test_what_a_step_writes_to_the_cache_is_taken_from_memory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    config = EngineConfig(model=ModelConfig(model=str(directory)), device=DeviceConfig(device="cpu"))
    executor = UniExecutor(config, read_model_info(directory), 1)
    facts = executor.load(lambda _phase: None)
    executor.allocate(8)
    block_bytes = 16 * facts.kv.bytes_per_token
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 30)
    before = executor.spare_memory()
    greedy = SamplingParams(temperature=0.0)
    executor.begin(Step([Admit(0, [5] * 40, 40, greedy, 0, ())], [0], [0], [40], {0: [0, 1, 2]}))
    monkeypatch.setattr(memory, "available_memory", lambda: (1 << 30) - 3 * block_bytes)
    assert executor.spare_memory() == before < 0.9 * ((1 << 30) - 7 * block_bytes)
    executor.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    config = EngineConfig(model=ModelConfig(model=str(directory)), device=DeviceConfig(device="cuda"))
    with pytest.raises(CheckpointError, match="torch finds no CUDA device"):
        make_executor(config, read_model_info(directory), 1).load(print)


class Stop(Exception):
    """Raised when the model is about to be read."""


@pytest.mark.parametrize(
    ("wanted", "number", "size", "device"),
    [("cuda", 0, 1, "cuda:0"), ("auto", 0, 1, "cuda:0"), ("auto", 1, 2, "cuda:1"), ("cpu", 1, 2, "cpu")],
)
def test_a_worker_computes_on_its_device_and_makes_it_the_current_one(
    wanted: Literal["auto", "cpu", "cuda"],
    number: int,
    size: int,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is current in the thread that loads and steps, before anything is allocated.

    Triton launches on the current device.
    """
    current: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda chosen: current.append((chosen, threading.get_ident()))
    )

    def stop(*_: Any, device: torch.device, **__: Any) -> None:
        raise Stop(str(device))

    monkeypatch.setattr(loaded_shard, "load_model", stop)
    directory = make_tiny_model(tmp_path, "llama")
    config = EngineConfig(model=ModelConfig(model=str(directory)), device=DeviceConfig(device=wanted))
    executor = UniExecutor(
        config, read_model_info(directory), 1, shard=Shard(rank=number, size=size, device=number)
    )
    with pytest.raises(Stop, match=device):
        executor.load(lambda phase: None)
    expected = [] if wanted == "cpu" else [(torch.device(device), threading.get_ident())]
    assert current == expected
    beyond = UniExecutor(config, read_model_info(directory), 1, shard=Shard(rank=2, size=3, device=2))
    if wanted != "cpu":
        with pytest.raises(CheckpointError, match=r"at least 3 workers on this host.* torch finds 2 here"):
            beyond.load(lambda phase: None)


def test_the_largest_step_chooses_a_token_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if that is more than a context has tokens."""
    directory = make_tiny_model(tmp_path, "llama")
    info = read_model_info(directory)
    most = info.context_length + 9
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        device=DeviceConfig(device="cpu", attention_backend="TORCH_SDPA"),
        scheduler=SchedulerConfig(max_num_seqs=most),
    )
    rehearsed: list[tuple[int, ...]] = []
    monkeypatch.setattr(Sampler, "rehearse", lambda _, logits: rehearsed.append(tuple(logits.shape)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    executor = UniExecutor(config, info, 1)
    executor.load(lambda phase: None)
    executor._run_largest_step()
    assert rehearsed == [(most, VOCAB)]
    executor.close()


def test_an_attention_backend_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    directory = make_tiny_model(tmp_path, "llama")
    config = EngineConfig(
        model=ModelConfig(model=str(directory)),
        device=DeviceConfig(device="cpu", attention_backend="TRITON_ATTN"),
    )
    with pytest.raises(CheckpointError, match=r"TRITON_ATTN cannot serve: .*or use TORCH_SDPA"):
        make_executor(config, read_model_info(directory), 1).load(lambda phase: None)
    with pytest.raises(ValueError, match="--enforce-eager captures nothing"):
        DeviceConfig(enforce_eager=True, cudagraph_capture_sizes=(1, 2))


@pytest.mark.parametrize(
    ("share", "left", "found", "said"),
    [
        (400, 0, 289, "0.0 GiB are left for those of one lost instance"),
        (400, 200, 400, "are left for those of one lost instance"),
        (130, 0, 130, "do not fit beside the KV cache: after a loss the mesh waits for another instance"),
    ],
)
def test_the_cache_leaves_room_for_the_experts_of_a_lost_instance(
    share: int, left: int, found: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight experts on four instances: two more come to each of three.

    They have 50 bytes, and a tenth is kept free."""
    caplog.set_level("INFO")
    executor = UniExecutor.__new__(UniExecutor)
    executor._info = SimpleNamespace(num_experts=8)
    executor._place = (1, 4)
    executor._shard = SimpleNamespace(size=1)
    executor._held = SimpleNamespace(experts=[2], most=1, bytes_per_expert=50, copies=1)
    assert executor._leave_room(share, left) == found
    assert said in caplog.text
    executor._place = None
    assert executor._leave_room(share, left) == share


class SharedDevice:
    """A pretended GPU; threads stand for processes, each with its own allocator."""

    total, peak = 1000, 30

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock, self._own = threading.Lock(), threading.local()
        self.taken, self.measuring, self.most_measuring = 0, 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.total - self.taken, self.total))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self._own.taken)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self._own.taken + self.peak)

    def take(self, count: int) -> None:
        with self._lock:
            self._own.taken = getattr(self._own, "taken", 0) + count
            self.taken += count
            assert self.taken <= self.total, "out of memory"

    def serve(self, executor: UniExecutor, weights: int, found: list[int]) -> None:
        """Load, then measure and take the cache as an instance does."""
        self.take(weights)
        with memory_turn("cuda:0"):
            self.measuring += 1
            self.most_measuring = max(self.most_measuring, self.measuring)
            share = executor.free_kv_memory()
            time.sleep(0.05)  # graphs are captured
            self.take(share + self.peak)
            self.measuring -= 1
        found.append(share)


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (0, 330),  # of 460 each has 100 of weights, and 30 for its largest step
        (30, 330),  # 80 of the device are neither's: 40 for each one's lost experts
        (60, 304),  # 60 and a margin are 66, of which 40 are there
    ],
)
def test_two_instances_on_one_device_share_its_memory_in_turn(
    experts: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sees what the other will take, nor do both count on the same room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_DEVICE_SHARERS", "2")
    monkeypatch.setattr("engine.lifecycle.instance.cuda_devices", lambda: ("0",))
    monkeypatch.setattr(UniExecutor, "_run_largest_step", lambda _: None)
    device, found, failed = SharedDevice(monkeypatch), [], []

    def run() -> None:
        executor = UniExecutor.__new__(UniExecutor)
        executor._config = EngineConfig()
        executor._model = SimpleNamespace(device=torch.device("cuda", 0))
        executor._backend = "TRITON_ATTN"
        executor._info = SimpleNamespace(num_experts=4)
        executor._shard = SimpleNamespace(size=1)
        executor._place = (0, 2) if experts else None
        executor._held = SimpleNamespace(most=2, bytes_per_expert=experts // 2, copies=1)
        try:
            device.serve(executor, 100, found)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert failed == []
    assert device.most_measuring == 1
    assert found == [expected, expected]


def test_what_gathered_contexts_will_take_is_not_given_to_the_cache() -> None:
    executor = UniExecutor.__new__(UniExecutor)
    executor._config = EngineConfig(model=ModelConfig(max_model_len=4096))
    executor._info = SimpleNamespace(context_length=8192)
    executor._model = SimpleNamespace(layers=[LayerShape(8, 128, 128, None)], dtype=torch.bfloat16)
    executor._backend = "TORCH_SDPA"
    assert executor._gather_bytes() == 2 * GATHER_BYTES * 5 // 4
    executor._backend = "TRITON_ATTN"
    assert executor._gather_bytes() == 0


def test_accelerators_of_other_kinds_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = UniExecutor.__new__(UniExecutor)
    executor._config = EngineConfig()
    for kind, module in (("MPS", torch.backends.mps), ("XPU", torch.xpu)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(module, "is_available", lambda: True)
            assert executor._device() == torch.device("cpu")
        assert f"computing on the CPU: {kind} devices are not supported" in caplog.text
        caplog.clear()
