"""Engines in lockstep with spread experts: the tokens of transformers.

The instances are threads of one process, each with its own scheduler, cache and share of the experts, and
the real agreement between them. Requests come to random instances at random times, with idle gaps, so
that instances take part without tokens, sleep and wake.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.groups.recovery_times import RecoveryTimes
from engine.groups.stepping import Agreement
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.pieces.kinds import BoundarySlots
from engine.sampling import SamplingParams
from parallel.links.counts import LinkCount
from parallel.lockstep import Lockstep, RunStep, Sleep, StepHeader, Wake
from parallel.placement import assign_experts
from tests.engine.greedy import greedy_outputs
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import VOCAB, make_tiny_model
from tests.nightly import NIGHTLY
from tests.parallel.thread_group import ThreadCommunicator, thread_group
from tests.waiting import until

FAMILIES = ["deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
NUM_REQUESTS = 24
BLOCK_SIZE = 4
NUM_BLOCKS = 22
"""Cache blocks of each instance: so few that requests are preempted."""
NUM_STATES = 12
"""Slots of recurrent states of each instance, for models that have such."""
ROUTER = b"router"
SHARED = [random.Random(99).randrange(3, VOCAB) for _ in range(17)]


@dataclass(frozen=True)
class Layout:
    """One configuration of the table."""

    dp: int
    tp: int = 1
    pp: int = 1
    strategy: Any = "linear"
    backend: Any = "allgather_reducescatter"
    split: tuple[int, ...] | None = None
    dtype: Any = "float32"
    batch_invariant: bool = False
    block_size: int = BLOCK_SIZE

    @property
    def is_sharded(self) -> bool:
        return self.tp * self.pp > 1


LAYOUTS = {
    "dp1": Layout(1),
    "dp2": Layout(2),
    "dp2_round_robin_all_to_all": Layout(2, strategy="round_robin", backend="all_to_all"),
    "dp3_all_to_all": Layout(3, backend="all_to_all"),
    "dp4_round_robin": Layout(4, strategy="round_robin"),
    "dp2_tp2": Layout(2, tp=2),
    "dp2_pp2": Layout(2, pp=2, strategy="round_robin"),
}


def prompt(index: int) -> list[int]:
    """Prompts, a third of which have a common beginning."""
    rng = random.Random(index)
    return (SHARED if index % 3 == 0 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]


def length(index: int) -> int:
    return 4 + index % 9


def generated(model: Any, **options: Any) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone.

    ``options``: further ones of ``generate``.
    """
    outputs = []
    for index in range(NUM_REQUESTS):
        ids = torch.tensor([prompt(index)])
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length(index),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
            **options,
        )
        outputs.append(result[0, ids.shape[1] :].tolist())
    return outputs


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(directory: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    requests = range(NUM_REQUESTS)
    return greedy_outputs(model, list(map(prompt, requests)), list(map(length, requests)))


@pytest.fixture(autouse=True, scope="module")
def quick_turns() -> Iterator[None]:
    """Make threads switch often: these workers compute in turns.

    Otherwise each would wait 5 ms for the other.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


class ThreadStepping:
    """:class:`engine.groups.stepping.InLockstep` with wakes that are calls."""

    def __init__(self, group: ThreadCommunicator, peers: list[ThreadStepping]) -> None:
        self._group = group
        self._peers = peers
        self._lock = threading.Lock()
        self.lockstep = Lockstep(group.rank, group.size, epoch=1)
        self.times = RecoveryTimes()
        self.sleeps = 0
        self.empty_steps = 0

    def link_totals(self) -> dict[int, LinkCount]:
        return {}

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

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        header = self.lockstep.header(
            num_tokens, queued_prefill=queued_prefill, longest=longest, in_flight=in_flight
        )
        rows = self._group.all_gather_ints(header.ints())
        with self._lock:
            decision = self.lockstep.advance([StepHeader.of(row) for row in rows])
        match decision:
            case RunStep(sizes):
                self.empty_steps += num_tokens == 0
                return Agreement(runs=any(sizes), sizes=sizes)
            case Sleep():
                self.sleeps += 1
        return Agreement(runs=False, pauses=True)

    def close(self) -> None:
        return


class Mesh:
    """Instances in one process, each of which schedules by itself."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype=layout.dtype),
            cache=CacheConfig(block_size=layout.block_size),
            device=DeviceConfig(
                expert_placement_strategy=layout.strategy,
                all2all_backend=layout.backend,
                batch_invariant=layout.batch_invariant,
            ),
        )
        self.info = read_model_info(directory)
        self.placement = assign_experts(self.info.num_experts, layout.dp * layout.tp, layout.strategy)
        self.steppings: list[ThreadStepping] = []
        self.executors: list[Any] = []
        self.cores: list[EngineCore] = []
        groups = [thread_group(layout.dp * layout.tp) for _ in range(layout.pp)]
        for member in thread_group(layout.dp):
            limits = SchedulerConfig(
                max_num_batched_tokens=16 + 5 * member.rank, max_num_seqs=8 - member.rank
            )
            own = msgspec.structs.replace(config, scheduler=limits)
            executor = self._executor(own, layout, member.rank)
            facts = executor.load(lambda _phase: None)
            executor.allocate(NUM_BLOCKS, NUM_STATES)
            if isinstance(executor, ThreadedShards):
                executor.join(groups, self.placement)
            else:
                executor.join(groups[0][member.rank], self.placement)
            stepping = ThreadStepping(member, self.steppings)
            self.steppings.append(stepping)
            self.executors.append(executor)
            place = ModelPlace(boundaries=[BoundarySlots(kind, NUM_STATES) for kind in facts.boundaries])
            core = EngineCore(own, self.info, executor, num_blocks=NUM_BLOCKS, max_model_len=512, place=place)
            core.stepping = stepping
            self.cores.append(core)

    def _executor(self, config: EngineConfig, layout: Layout, rank: int) -> Any:
        place = (rank, layout.dp)
        if not layout.is_sharded:
            return UniExecutor(config, self.info, 1, place)
        return ThreadedShards(config, self.info, tp=layout.tp, pp=layout.pp, split=layout.split, place=place)

    def close(self) -> None:
        for executor in self.executors:
            executor.close()


def run_instances(
    directory: Path, layout: Layout, requests: int = NUM_REQUESTS
) -> tuple[list[list[int]], Mesh]:
    """Outputs of all requests, and the mesh that served them."""
    mesh, size = Mesh(directory, layout), layout.dp
    cores, peers = mesh.cores, mesh.steppings
    rng = random.Random(size)
    inboxes: list[list[tuple[float, Submit]]] = [[] for _ in range(size)]
    for index in range(requests):
        params = SamplingParams(temperature=0.0, max_tokens=length(index), ignore_eos=True)
        submit = Submit(request=index, request_id=str(index), prompt_ids=prompt(index), params=params, seed=0)
        inboxes[rng.randrange(size)].append((rng.choice([0.0, 0.05, 0.3, 0.6]), submit))
    outputs: dict[int, list[int]] = {index: [] for index in range(requests)}
    done = threading.Event()
    failed: list[Exception] = []
    threads = [
        threading.Thread(target=_loop, args=(core, inbox, outputs, done, failed))
        for core, inbox in zip(cores, inboxes, strict=True)
    ]
    for thread in threads:
        thread.start()
    until(lambda: failed or all(len(outputs[index]) == length(index) for index in outputs))
    until(lambda: failed or not any(stepping.must_step for stepping in peers))
    done.set()
    if failed:
        raise failed[0]
    for thread in threads:
        thread.join(60)
    assert all(core.reports.report(0, 0).blocks_used == 0 for core in cores)
    mesh.close()
    return [outputs[index] for index in range(requests)], mesh


def _loop(
    core: EngineCore,
    inbox: list[tuple[float, Submit]],
    outputs: dict[int, list[int]],
    done: threading.Event,
    failed: list[Exception],
) -> None:
    """A core's step loop, whose error the test raises at once."""
    try:
        _steps(core, inbox, outputs, done)
    except Exception as error:  # noqa: BLE001 (of any step; the test raises it)
        failed.append(error)


def _steps(
    core: EngineCore, inbox: list[tuple[float, Submit]], outputs: dict[int, list[int]], done: threading.Event
) -> None:
    """The step loop of :class:`engine.serving.server.Server`, without its sockets."""
    began = time.monotonic()
    while not done.is_set():
        for due, submit in list(inbox):
            if time.monotonic() - began >= due:
                inbox.remove((due, submit))
                assert core.submit(ROUTER, submit) is None
        if core.has_work:
            core.stepping.notice_work()
        if core.has_work or core.stepping.must_step:
            for delta in core.step().get(ROUTER, []):
                outputs[delta.request] += delta.token_ids
        else:
            time.sleep(0.002)


@pytest.mark.diagonal("directory", "layout", columns=7, each=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_spread_experts_give_the_same_tokens(
    directory: Path, reference: list[list[int]], layout: str
) -> None:
    """With little room: chunks, preemption and the prefix cache at once."""
    shape = LAYOUTS[layout]
    outputs, mesh = run_instances(directory, shape)
    assert outputs == reference
    assert len({stepping.lockstep.step for stepping in mesh.steppings}) == 1, (
        "all have passed through the same steps"
    )
    assert all(stepping.sleeps > 0 for stepping in mesh.steppings)
    counters = [core.scheduler.counters() for core in mesh.cores]
    assert sum(each.preemptions for each in counters) > 0
    assert sum(each.prefix_cache_hits for each in counters) > 0
    if shape.dp > 1:
        assert sum(stepping.empty_steps for stepping in mesh.steppings) > 0, "nobody took part without tokens"


@pytest.mark.each_push
@pytest.mark.parametrize(
    ("family", "split"), [("deepseek_v3", (1, 2)), ("gpt_oss", None), ("qwen3_moe", None)]
)
def test_ranks_and_stages_together(family: str, split: tuple[int, ...] | None, tmp_path: Path) -> None:
    """DeepSeek-V3's first layer is dense: it is a stage of its own, without experts."""
    directory = make_tiny_model(tmp_path, family)
    requests = NUM_REQUESTS if NIGHTLY else NUM_REQUESTS // 2
    alone, _ = run_instances(directory, Layout(1), requests)
    layout = Layout(2, tp=2, pp=2, backend="all_to_all", split=split)
    assert run_instances(directory, layout, requests)[0] == alone
