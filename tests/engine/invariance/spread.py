"""Instances over which experts are spread, as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.config import SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.pieces.kinds import BoundarySlots
from parallel.communicators.base import Communicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting import MeetingHost
from parallel.placement import assign_experts
from tests.engine.groups.test_lockstep_engine import ThreadStepping
from tests.engine.invariance.answers import NGRAMS, PEER, Answer, Answers, settings, step
from tests.engine.shard_threads import ThreadedShards
from tests.parallel.thread_group import thread_group
from tests.waiting import until

PATIENCE = 60.0
NUM_BLOCKS = 200
"""KV blocks of each instance."""
NUM_STATES = 64
"""Slots of recurrent states of each instance, where the model has such."""
FEW = 24
"""Tokens of a step that cuts prompts."""

Group = Callable[[int], Sequence[Any]]


def in_shared_memory(size: int) -> list[SharedMemoryCommunicator]:
    """All members' ends of a group on one host, which exchange inside the native step."""
    meeting = MeetingHost("127.0.0.1")

    def member(rank: int) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(FormingGroup(meeting, rank, size, timeout=PATIENCE))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


class Members:
    """Instances of one group, each with its own scheduler, cache and share of the experts."""

    def __init__(
        self,
        directory: Path,
        size: int,
        group: Group = thread_group,
        ranks: int = 1,
        stages: int = 1,
        num_blocks: int = NUM_BLOCKS,
        in_pieces: bool = False,
        **device: Any,
    ) -> None:
        """``group``: makes what experts travel over; as :func:`thread_group`, hosts of their own.

        ``ranks``: tensor-parallel ones of each instance, in each of its ``stages``; ``num_blocks``: KV blocks
        of each instance. ``in_pieces``: steps of few tokens, with drafts.
        """
        info, config = read_model_info(directory), settings(directory, **device)
        if in_pieces:
            scheduler = SchedulerConfig(
                max_num_batched_tokens=FEW, max_num_seqs=FEW, speculative_config=NGRAMS
            )
            config = replace(config, scheduler=scheduler)
        placement = assign_experts(info.num_experts, size * ranks, config.device.expert_placement_strategy)
        ends: list[Sequence[Communicator]] = [group(size * ranks) for _ in range(stages)]
        is_whole = ranks * stages == 1
        self.executors: list[Any] = []
        self.cores: list[EngineCore] = []
        steppings: list[ThreadStepping] = []
        for member in thread_group(size):
            place = (member.rank, size)
            executor: Any = (
                UniExecutor(config, info, 1, place)
                if is_whole
                else ThreadedShards(config, info, tp=ranks, pp=stages, place=place)
            )
            facts = executor.load(lambda _phase: None)
            boundaries = [BoundarySlots(kind, NUM_STATES) for kind in facts.boundaries]
            executor.allocate(num_blocks, sum(each.count for each in boundaries))
            if is_whole:
                executor.join(ends[0][member.rank], placement)
            else:
                executor.join([list(each) for each in ends], placement)
            steppings.append(ThreadStepping(member, steppings))
            self.executors.append(executor)
            core = EngineCore(
                config,
                info,
                executor,
                num_blocks=num_blocks,
                max_model_len=1024,
                place=ModelPlace(boundaries=boundaries, keeps_experts=True),
            )
            core.stepping = steppings[-1]
            self.cores.append(core)

    def answers(self, submits: Sequence[Submit]) -> Answers:
        """All answers, to requests that come to the instances in turn."""
        found = {submit.request: Answer() for submit in submits}
        done, size = threading.Event(), len(self.cores)

        def serve(rank: int) -> None:
            core = self.cores[rank]
            for submit in submits[rank::size]:
                assert core.submit(PEER, submit) is None
            while not done.is_set():
                step(core, found, lambda: time.sleep(0.001))

        with ThreadPoolExecutor(size) as pool:
            running = [pool.submit(serve, rank) for rank in range(size)]
            until(
                lambda: (
                    any(each.done() for each in running)  # it has failed
                    or (
                        all(answer.ended[0] for answer in found.values())
                        and not any(core.stepping.must_step for core in self.cores)
                    )
                )
            )
            done.set()
            for each in running:
                each.result(PATIENCE)
        return found

    @property
    def workers(self) -> list[UniExecutor]:
        """Executors of all workers of all instances."""
        shards = [[one.executor for one in getattr(each, "workers", ())] or [each] for each in self.executors]
        return [worker for of_instance in shards for worker in of_instance]

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
