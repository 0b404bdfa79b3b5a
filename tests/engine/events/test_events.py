"""Subscribers that follow the prefix cache of an instance, over real sockets."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import zmq

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.config.kv_events import KvEventsConfig
from engine.core import EngineCore
from engine.events.messages import AllBlocksCleared, BlockStored
from engine.events.publisher import EventPublisher
from engine.events.recording import EventRecorder, name_of
from engine.messages import Submit
from engine.model.checkpoint import ModelInfo
from engine.pieces.pool import PiecePool, hash_block, prefix_names, rooted
from engine.sampling import SamplingParams
from engine.scheduling.request import from_submit
from tests.engine.core.test_engine_core import PEER, submit
from tests.engine.events.follower import Follower
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor
from tests.mesh.harness import free_port, wait_until

SIZE = 4


def config_of(**settings: object) -> KvEventsConfig:
    ports = free_port(), free_port()
    return KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://*:{ports[0]}",
        replay_endpoint=f"tcp://*:{ports[1]}",
        **settings,  # type: ignore[arg-type]
    )


def follower_of(config: KvEventsConfig, topic: str = "") -> Follower:
    assert config.replay_endpoint is not None
    endpoints = [each.replace("*", "127.0.0.1") for each in (config.endpoint, config.replay_endpoint)]
    return Follower(*endpoints, topic=topic)


def test_a_follower_of_a_crowded_cache_has_what_the_engine_has() -> None:
    config = config_of(topic="kv@tested")
    info = ModelInfo(
        directory="", architecture="", model_type="", vocab_size=VOCAB, context_length=64, dtype="float32",
        eos_token_ids=(VOCAB - 1,), num_experts=0,
    )  # fmt: skip
    engine = EngineConfig(
        cache=CacheConfig(block_size=SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
    )
    executor = SimulatedExecutor(block_size=SIZE, budget=32, max_rows=4)
    core = EngineCore(engine, info, executor, num_blocks=20, max_model_len=64)  # type: ignore[arg-type]
    recorder, publisher = core.sharing.record_events({}), EventPublisher(config, 0)
    publisher.start()
    chance = random.Random(3)
    prompts = [[chance.randrange(2, 40) for _ in range(30)] for _ in range(4)]
    with follower_of(config, "kv@tested") as follower:
        try:
            publisher.publish(recorder.take())
            for number in range(1, 60):
                prompt = chance.choice(prompts)[: chance.randrange(5, 31)]
                salt = chance.choice(["", "", "a salt"])
                assert core.submit(PEER, submit(number, prompt_ids=prompt, cache_salt=salt)) is None
                while core.has_work and (chance.random() < 0.9 or len(core.scheduler.queues.waiting) > 2):
                    core.step()
                    if events := recorder.take():
                        publisher.publish(events)
                if number == 30:
                    core.sharing.reset(PEER, 1)
            while core.has_work:
                core.step()
            publisher.publish(recorder.take())
            follower.follow(0.3)
            follower.catch_up()
            known = {name_of(each) for each in core.pool.known}
            assert set(follower.contexts) == known == recorder.published
            assert len(known) > 10
            assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(follower.kinds)
            assert set(follower.salts) == {"a salt"}
            assert follower.ranks == {0}
            named = 0
            for name, tokens in follower.contexts.items():
                if -1 not in tokens:  # a block whose parent was dropped tells its own tokens only
                    named += name in [prefix_names([*tokens, 1], SIZE, salt)[-1] for salt in ("", "a salt")]
                    assert named
        finally:
            publisher.close()


def test_blocks_from_elsewhere_are_told_once_their_tokens_are_known() -> None:
    recorder = EventRecorder(SIZE, {})
    pool = PiecePool(4, observer=recorder)
    assert recorder.take() == [AllBlocksCleared()]
    tokens = list(range(10))
    hashes = [hash_block(None, tokens[:4])]
    hashes.append(hash_block(hashes[0], tokens[4:8]))
    wanted = Submit(1, "a", tokens, SamplingParams(), seed=0)
    request = from_submit(wanted, PEER, arrival=0, eos_ids=(), max_model_len=64)
    request.hashes_up_to(2, SIZE)
    blocks = pool.take(2)
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.name(block, block_hash)
    assert recorder.take() == []
    assert recorder.lacks_tokens
    recorder.tell(request, 0, 2)
    names = prefix_names(tokens, SIZE)
    assert recorder.take() == [BlockStored(names, None, tokens[:8], SIZE, None, "GPU", None, group_idx=0)]
    recorder.tell(request, 0, 2)
    assert recorder.take() == []
    pool.unname(hashes[:1])
    pool.unname(hashes[1:])
    (removed,) = recorder.take()
    assert removed.block_hashes == names  # type: ignore[union-attr]
    assert recorder.published == frozenset()


def test_a_subscriber_that_reads_nothing_costs_the_engine_nothing(tmp_path: Path) -> None:
    config = KvEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r",
        hwm=5, max_queue_size=50, buffer_steps=20,
    )  # fmt: skip
    endpoint, replay = f"{config.endpoint}_dp2", f"{config.replay_endpoint}_dp2"
    publisher = EventPublisher(config, 2)
    publisher.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asleep = context.socket(zmq.SUB)
    try:
        asleep.setsockopt(zmq.RCVHWM, 1)
        asleep.setsockopt(zmq.SUBSCRIBE, b"")
        asleep.connect(endpoint)
        longest = 0.0
        for _ in range(3000):
            began = time.perf_counter()
            publisher.publish([BlockStored(list(range(64)), None, [7] * 1024, 16, None, "GPU", None)])
            longest = max(longest, time.perf_counter() - began)
        assert longest < 1.0
        wait_until(lambda: not publisher._queue, 5, "all is sent")
        with (
            Follower(endpoint, replay) as late,
            pytest.raises(AssertionError, match="batch 0 is missing"),
        ):
            late.catch_up()
        with Follower(endpoint, replay) as late:
            late.next = 2999
            late._apply = lambda event: None  # type: ignore[method-assign]
            if not publisher.num_dropped:
                late.catch_up()
                assert late.next == 3000
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_ports_that_are_taken_and_foolish_wishes() -> None:
    config = config_of()
    publisher = EventPublisher(config, 0)
    publisher.start()
    try:
        with pytest.raises(
            ValueError, match=r"--kv-events-config: endpoint tcp://.*: Address already in use"
        ):
            EventPublisher(config, 0)
        assert config.replay_endpoint is not None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(config.replay_endpoint.replace("*", "127.0.0.1"))
        for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""]):
            dealer.send_multipart(frames)
        publisher.publish([AllBlocksCleared()])
        with follower_of(config) as follower:
            wait_until(lambda: publisher._sent, 5, "it is sent")
            follower.catch_up()
            assert (follower.kinds, follower.next) == (["AllBlocksCleared"], 1)
        context.destroy(linger=0)
    finally:
        publisher.close()


def test_blocks_of_an_adapter_have_other_names_and_tell_it() -> None:
    recorder = EventRecorder(SIZE, {"d1": "poet"})
    pool = PiecePool(4, observer=recorder)
    tokens, names = list(range(5)), []
    for adapter in ("", "d1", "d2"):
        wanted = Submit(1, "a", tokens, SamplingParams(), seed=0, cache_salt="x", adapter=adapter)
        request = from_submit(wanted, PEER, arrival=0, eos_ids=(), max_model_len=64)
        (block,) = pool.take(1) or []
        pool.name(block, request.hashes_up_to(1, SIZE)[0])
        recorder.tell(request, 0, 1)
        names.append(name_of(request.hashes[0]))
        assert prefix_names(tokens, SIZE, rooted("x", adapter)) == names[-1:]
    stored = [event for event in recorder.take() if isinstance(event, BlockStored)]
    assert [event.lora_name for event in stored] == [None, "poet", "d2"]
    assert [event.block_hashes for event in stored] == [[name] for name in names]
    assert len(set(names)) == 3
