"""Checks of a cache with steps ahead: nothing is compared before it is computed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.messages import Submit
from engine.sampling import SamplingParams
from tests.engine.scheduling.ahead_schedules import INFO, LONGEST, PEER, SIZE, Device
from tests.engine.simulated_executor import VOCAB, expected_output


class Carrier:
    """The part of a mover that checks use; nothing moves."""

    has_ended = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def take_events(self) -> list[object]:
        return []

    def same(self, one: int, other: int) -> bool:
        """Whether two blocks are equal by now, whatever is still to be computed."""
        cache = self._device._cache
        return all(cache.get((one, i)) == cache.get((other, i)) for i in range(SIZE))


def serve(seed: int, *, spoilt: bool) -> tuple[tuple[int, int], int]:
    """Requests that share prefixes; returns cached pieces compared and wrong, and rows ahead."""
    rng = random.Random(seed)
    device: Any = Device(rng, ahead=True, max_rows=4, checks_reads=not spoilt)
    config = EngineConfig(
        cache=CacheConfig(block_size=SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
    )
    core = EngineCore(config, INFO, device, num_blocks=40, max_model_len=LONGEST)
    mover: Any = Carrier(device)
    core.sharing.exchange_blocks(
        mover, address="", identity="same", token_bytes=16.0, checks=True, check_interval=1
    )
    common = [rng.randrange(VOCAB - 1) for _ in range(16)]
    wanted: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    left = 10
    while left or core.has_work:
        if left and rng.random() < 0.3:
            left -= 1
            prompt = common[: rng.choice((4, 9, 16))] + [rng.randrange(VOCAB - 1) for _ in range(3)]
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            assert core.submit(PEER, Submit(left, str(left), prompt, params, 0)) is None
            wanted[left], found[left] = expected_output(prompt, 12), []
        if spoilt and left == 5:
            spoilt = False
            device.write([core.pool.slot_of(name) for name in list(core.pool.known)[:3]])
        core.sharing.take_fetched(lambda _: None)
        outgoing = core.step()
        assert set(outgoing) <= {PEER}, "a request of a check got a token"
        for delta in outgoing.get(PEER, []):
            found[delta.request] += delta.token_ids
    exchange = core.sharing.exchange
    assert exchange is not None
    if not exchange.num_checked[1]:
        assert found == wanted
    return exchange.num_checked, device.counts["rows ahead"]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_cache_is_found_healthy(seed: int) -> None:
    (checked, wrong), ahead = serve(seed, spoilt=False)
    assert checked > 0
    assert wrong == 0
    assert ahead > 0, "steps without anything to compare are scheduled ahead all the same"


def test_spoilt_pieces_are_found() -> None:
    assert sum(serve(seed, spoilt=True)[0][1] for seed in range(20)) > 0
