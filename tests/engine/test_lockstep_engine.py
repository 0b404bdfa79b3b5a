"""Engines in lockstep with their experts spread: token for token what transformers says.

The instances are threads of one process, each with its own scheduler, cache and share of the experts, and
the real agreement between them. Requests come to random instances at random times, with idle gaps, so
that instances take part without tokens, sleep and wake.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.checkpoint import read_model_info
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor import make_executor
from engine.executor.base import Executor
from engine.messages import Submit
from engine.pace import Agreement
from engine.recovery_times import RecoveryTimes
from engine.sampling import SamplingParams
from parallel.lockstep import Header, Lockstep, Run, Sleep, Wake
from parallel.placement import place
from tests.engine.tiny_models import VOCAB, make_tiny_model
from tests.parallel.thread_group import ThreadCommunicator, thread_group

FAMILIES = ["deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
NUM_REQUESTS = 24
BLOCK_SIZE = 4
ROUTER = b"router"


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]


def length(index: int) -> int:
    return 4 + index % 9


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(directory: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    outputs = []
    for index in range(NUM_REQUESTS):
        ids = torch.tensor([prompt(index)])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length(index),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        outputs.append(generated[0, ids.shape[1] :].tolist())
    return outputs


class ThreadPace:
    """:class:`engine.pace.InLockstep` with wakes that are calls."""

    def __init__(self, group: ThreadCommunicator, peers: list[ThreadPace]) -> None:
        self._group = group
        self._peers = peers
        self._lock = threading.Lock()
        self.lockstep = Lockstep(group.rank, group.size, epoch=1)
        self.times = RecoveryTimes()
        self.sleeps = 0
        self.empty_steps = 0

    @property
    def must_step(self) -> bool:
        return self.lockstep.awake

    def notice_work(self) -> None:
        with self._lock:
            wake = self.lockstep.wake()
        if wake is not None:
            for peer in self._peers:
                peer.on_wake(wake)

    def on_wake(self, wake: Wake) -> None:
        with self._lock:
            self.lockstep.on_wake(wake)

    def agree(self, num_tokens: int, queued_prefill: int, longest: int) -> Agreement:
        header = self.lockstep.header(num_tokens, queued_prefill=queued_prefill, longest=longest)
        rows = self._group.all_gather_ints(header.ints())
        with self._lock:
            decision = self.lockstep.advance([Header.of(row) for row in rows])
        match decision:
            case Run(sizes):
                self.empty_steps += num_tokens == 0
                return Agreement(runs=True, sizes=sizes)
            case Sleep():
                self.sleeps += 1
        return Agreement(runs=False)

    def close(self) -> None:
        return


def run_instances(
    directory: Path, size: int, strategy: Any, backend: Any
) -> tuple[dict[int, list[int]], list[ThreadPace], list[Executor]]:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8),
        device=DeviceConfig(expert_placement_strategy=strategy, all2all_backend=backend),
    )
    info = read_model_info(directory)
    peers: list[ThreadPace] = []
    executors, cores = [], []
    for member in thread_group(size):
        executor = make_executor(config, info, 1, (member.rank, size))
        executor.load(lambda _phase: None)
        executor.allocate(40)
        executor.join(member, place(info.num_experts, size, strategy))
        pace = ThreadPace(member, peers)
        peers.append(pace)
        executors.append(executor)
        cores.append(EngineCore(config, info, executor, pace, num_blocks=40, max_model_len=512))
    rng = random.Random(size)
    inboxes: list[list[tuple[float, Submit]]] = [[] for _ in range(size)]
    for index in range(NUM_REQUESTS):
        params = SamplingParams(temperature=0.0, max_tokens=length(index), ignore_eos=True)
        submit = Submit(request=index, request_id=str(index), prompt_ids=prompt(index), params=params, seed=0)
        inboxes[rng.randrange(size)].append((rng.choice([0.0, 0.05, 0.3, 0.6]), submit))
    outputs: dict[int, list[int]] = {index: [] for index in range(NUM_REQUESTS)}
    done = threading.Event()
    threads = [
        threading.Thread(target=_loop, args=(core, inbox, outputs, done))
        for core, inbox in zip(cores, inboxes, strict=True)
    ]
    for thread in threads:
        thread.start()
    _wait(lambda: all(len(outputs[index]) == length(index) for index in outputs))
    _wait(lambda: not any(pace.must_step for pace in peers))
    done.set()
    for thread in threads:
        thread.join(60)
    assert all(core.report(0, 0).blocks_used == 0 for core in cores)
    return outputs, peers, executors


def _loop(
    core: EngineCore, inbox: list[tuple[float, Submit]], outputs: dict[int, list[int]], done: threading.Event
) -> None:
    """The step loop of :class:`engine.server.Server`, without its sockets."""
    began = time.monotonic()
    while not done.is_set():
        for due, submit in list(inbox):
            if time.monotonic() - began >= due:
                inbox.remove((due, submit))
                assert core.submit(ROUTER, submit) is None
        if core.has_work:
            core.pace.notice_work()
        if core.has_work or core.pace.must_step:
            for delta in core.step().get(ROUTER, []):
                outputs[delta.request] += delta.token_ids
        else:
            time.sleep(0.002)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("size", "strategy", "backend"),
    [
        (1, "linear", "allgather_reducescatter"),
        (2, "linear", "allgather_reducescatter"),
        (2, "round_robin", "all_to_all"),
        (3, "linear", "all_to_all"),
        (4, "round_robin", "allgather_reducescatter"),
    ],
)
def test_spread_experts_give_the_same_tokens(
    directory: Path, reference: list[list[int]], size: int, strategy: str, backend: str
) -> None:
    outputs, paces, _ = run_instances(directory, size, strategy, backend)
    assert [outputs[index] for index in range(NUM_REQUESTS)] == reference
    assert len({pace.lockstep.step for pace in paces}) == 1, "all have passed through the same steps"
    assert all(pace.sleeps > 0 for pace in paces)
    if size > 1:
        assert sum(pace.empty_steps for pace in paces) > 0, "nobody took part without tokens"
