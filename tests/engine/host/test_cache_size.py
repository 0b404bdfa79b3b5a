"""Number of KV blocks of an instance, and refusals."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.host import cache_size
from engine.host.cache_size import (
    CacheSize,
    TooLittleMemory,
    experts_after_loss,
    leave_room,
    share_of_device,
    size_cache,
)
from engine.pieces.kinds import BoundaryKind
from engine.step import KVSpec, ModelFacts

FACTS = ModelFacts(
    architecture="A",
    num_parameters=1,
    weight_bytes=1,
    vocab_size=1,
    dtype="float32",
    device="cpu",
    kv=KVSpec(num_layers=1, bytes_per_token=64),
)
BLOCK = 16 * 64


def sized(**cache: int) -> tuple[int, int]:
    config = EngineConfig(model=ModelConfig(max_model_len=2048), cache=CacheConfig(**cache))
    return size_cache(config, FACTS, lambda: 100 * BLOCK, 2)[:2]


STATE = 10 * BLOCK


def sized_with_states(asked_requests: int | None = None, **cache: int) -> CacheSize:
    """The same of a model with two kinds of state, of ten blocks' bytes together."""
    kinds = [BoundaryKind(label=label, grid=64, num_bytes=STATE // 2) for label in ("one", "other")]
    config = EngineConfig(
        model=ModelConfig(max_model_len=160),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=2),
    )
    facts = msgspec.structs.replace(FACTS, boundaries=kinds)
    return size_cache(config, facts, lambda: 10_000 * BLOCK, 1, asked_requests)


def test_states_and_blocks_share_memory_by_what_requests_can_use() -> None:
    assert sized_with_states() == (20, 160, 16), "all that two requests can use"
    assert sized_with_states(kv_cache_memory_bytes=90 * BLOCK) == (10, 160, 8), "half of each"
    assert sized_with_states(kv_cache_memory_bytes=25 * BLOCK) == (5, 80, 2), "two states at least"
    assert sized_with_states(num_gpu_blocks_override=7) == (7, 112, 16)


def test_memory_without_room_for_states_is_refused_with_the_numbers() -> None:
    with pytest.raises(TooLittleMemory, match=r"19.0 KiB .* too little for 2 states of a request \(10.0 KiB"):
        sized_with_states(kv_cache_memory_bytes=19 * BLOCK)
    with pytest.raises(TooLittleMemory, match="too little for one block"):
        sized_with_states(kv_cache_memory_bytes=20 * BLOCK)


@pytest.mark.parametrize(("blocks", "slots"), [(90, 8), (45, 4), (42, 4)])
def test_states_of_all_requests_that_were_asked_for_fit(blocks: int, slots: int) -> None:
    size = sized_with_states(asked_requests=2, kv_cache_memory_bytes=blocks * BLOCK)
    assert size.num_boundaries == slots
    assert size.num_blocks == min(20, blocks - 10 * slots)


def test_more_requests_than_states_fit_are_refused_with_the_numbers() -> None:
    named = r"--max-num-seqs 2: 2 states of 10.0 KiB for each .* take 42.0 KiB, and 41.0 KiB .* hold 1: lower"
    with pytest.raises(TooLittleMemory, match=named):
        sized_with_states(asked_requests=2, kv_cache_memory_bytes=41 * BLOCK)


def test_states_count_in_what_is_more_than_there_is_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "most_memory", lambda: 20 * BLOCK)
    with pytest.raises(
        TooLittleMemory, match=r"7 KV blocks of 16 tokens and 16 recurrent states of 10.0 KiB"
    ):
        sized_with_states(num_gpu_blocks_override=7)


def test_free_memory_is_shared_and_what_is_asked_for_is_not() -> None:
    assert sized() == (50, 800)
    assert sized(kv_cache_memory_bytes=70 * BLOCK) == (70, 1120)
    assert sized(num_gpu_blocks_override=200) == (200, 2048)


def test_more_than_there_is_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache larger than memory is refused before it is allocated.

    Otherwise an allocation would fail, or the kernel would later kill some process.
    """
    monkeypatch.setattr(cache_size, "most_memory", lambda: 400 * BLOCK)
    assert sized(num_gpu_blocks_override=200) == (200, 2048)
    with pytest.raises(
        TooLittleMemory,
        match=r"201 KV blocks of 16 tokens .* for each of 2 instances.* lower --num-gpu-blocks-override",
    ):
        sized(num_gpu_blocks_override=201)
    with pytest.raises(TooLittleMemory, match="too little for one block"):
        sized(kv_cache_memory_bytes=1)


def test_more_is_asked_for_than_there_is_though_requests_could_not_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_size, "most_memory", lambda: 24 * 2**30)
    assert sized(kv_cache_memory_bytes=24 * 2**30) == (128 * 128, 2048), "what 128 requests can use"
    with pytest.raises(
        TooLittleMemory,
        match=r"--kv-cache-memory-bytes asks for 900\.0 GiB .* all memory here is 24\.0 GiB",
    ):
        sized(kv_cache_memory_bytes=900 * 2**30)


def test_more_than_is_free_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cache_size, "available_memory", lambda: 30 * BLOCK)
    sized(num_gpu_blocks_override=30)
    assert "are free" not in caplog.text
    sized(num_gpu_blocks_override=31)
    assert "31 KV blocks of 16 tokens would take 31.0 KiB, and 30.0 KiB are free" in caplog.text


def test_a_share_of_a_gpu_means_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    sized()
    assert "ignored" not in caplog.text
    sized(gpu_memory_utilization=0.5)
    assert "--gpu-memory-utilization is ignored on a CPU: give --kv-cache-memory-bytes" in caplog.text


@pytest.mark.parametrize(
    ("free", "utilization", "left"),
    [
        (78, 0.9, 62),  # 90 for this one, of which its largest step takes 28
        (34, 0.45, 17),  # another one has 45: that does not count as this one's
        (34, 0.9, 26),  # but what it has cannot be had
        (0, 0.9, 0),
        (60, 0.2, 0),
    ],
)
def test_a_share_of_a_device_is_of_what_others_leave(free: int, utilization: float, left: int) -> None:
    found = share_of_device(total=100, free=free, reserved=20, peak=28, utilization=utilization)
    assert found == left


def test_instances_on_one_device_share_its_memory_unless_a_share_is_given() -> None:
    """Two that measure one after the other both find room.

    It does not matter in which order they load and measure."""
    assert CacheConfig().utilization(1) == 0.92
    assert CacheConfig(gpu_memory_utilization=0.7).utilization(2) == 0.7
    each = CacheConfig().utilization(2)
    first = share_of_device(total=100, free=60, reserved=20, peak=22, utilization=each)  # both have loaded
    second = share_of_device(total=100, free=60 - first - 2, reserved=20, peak=22, utilization=each)
    assert first == second == 24
    alone = share_of_device(total=100, free=80, reserved=20, peak=22, utilization=each)  # it loaded first
    late = share_of_device(total=100, free=80 - alone - 2 - 20, reserved=20, peak=22, utilization=each)
    assert alone == late == 24


@pytest.mark.parametrize(
    ("cache", "left", "room", "leaves"),
    [
        (60, 8, 0, 60),
        (60, 8, 8, 60),  # what is left of the device suffices
        (60, 8, 28, 40),
        (60, 8, 53, 15),
        (60, 8, 54, 60),  # less than a quarter of the cache is too dear
    ],
)
def test_room_for_a_lost_instance_is_left_beside_the_cache(
    cache: int, left: int, room: int, leaves: int
) -> None:
    assert leave_room(cache, left, room) == leaves


def test_experts_of_a_worker_after_a_loss() -> None:
    assert [experts_after_loss(128, workers, lost) for workers, lost in ((2, 1), (8, 1), (8, 2), (1, 1))] == [
        128, 19, 22, 0,
    ]  # fmt: skip


def test_memory_that_nobody_could_use_is_not_taken_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sized(kv_cache_memory_bytes=70 * BLOCK)
    assert "not all of --kv-cache-memory-bytes" not in caplog.text
    assert sized(kv_cache_memory_bytes=100_000 * BLOCK) == (128 * 128, 2048)
    assert "can use: not all of --kv-cache-memory-bytes" in caplog.text
