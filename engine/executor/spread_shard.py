"""A shard whose experts are spread over the instances of a group.

Experts change with each group, and tokens of other members are served in every step. Knows nothing of the KV
cache. Base of :mod:`engine.executor.uni`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch

from coordinator.messages import GroupPlan
from engine.attention.base import AttentionUse
from engine.executor.loaded_shard import LoadedShard
from engine.executor_contract import ExpertTimes, Progress
from engine.host import memory
from engine.host.cache_size import experts_after_loss, leave_room
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError
from engine.model.expert_change import Expert
from engine.model.expert_exchange import exchange
from engine.model.weights import LoadedModel
from parallel.communicators.base import Communicator
from parallel.expert_moves import from_peers
from parallel.links.counts import LinkCount
from parallel.placement import Placement, held_by_rank
from parallel.replicas import replicas_at

logger = logging.getLogger(__name__)

SOURCE = "LOCKSTEP_EXPERTS_FROM"
"""Environment variable: with ``peers`` experts come from other hosts, however fast the disk is."""
KERNEL_COPIES = 2
"""Copies of each spread expert in memory: native kernels lay out their own."""


class SpreadShard(LoadedShard):
    """A :class:`.LoadedShard` with the experts of a group's member, if experts are spread."""

    _prepared: GroupPlan | None = None
    """Plan whose experts were prepared last."""
    _joined: GroupPlan | None = None
    """Plan of the group that steps use."""
    _program: Program | None = None
    """Native kernels, if they compute the model."""
    _untouched: memory.Untouched
    """Part of the KV cache that no step has written yet."""
    _attention: AttentionUse
    """Time in attention so far."""
    _attention_before: AttentionUse
    """Time in attention before the last step."""

    def join(self, group: Communicator, placement: Placement) -> None:
        """See :class:`.SpreadExecutor`."""
        assert self._model is not None
        assert self._model.experts is not None
        assert self._held is not None
        prepared = self._prepared
        self._joined = prepared if prepared is not None and prepared.placement == placement else None
        mine = held_by_rank(placement, 1, group.rank)
        self._held.install(mine[0], self.spare_memory)
        self._model.experts.join(group, placement)
        if self._program is not None:
            self._program.join(group, placement)

    def prepare(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        """See :class:`.SpreadExecutor`."""
        assert self._held is not None, "experts are not spread"
        experts = held_by_rank(form.placement, form.ranks, place)[self._shard.rank]
        replicas_at(form.placement, place * form.ranks + self._shard.rank)  # what the change asks for
        elsewhere = self._at_peers(form, place, experts)
        self._prepared = form
        return self._held.prepare(experts, free_bytes, should_stop, elsewhere)

    def _at_peers(self, form: GroupPlan, place: int, experts: Sequence[Sequence[int]]) -> set[Expert]:
        """Experts that come from instances of other hosts, which hold them now and stay."""
        held, now = self._held, self._joined
        assert held is not None
        if now is None or not goes_between_hosts(form) or not held.can_be_given:
            return set()
        hosts = {peer.instance: peer.host for peer in form.peers}
        copies = [now.placement.copies(layer) for layer in range(len(held.experts))]
        holders = {
            (layer, expert): {
                host
                for rank in copies[layer][expert]
                if (host := hosts.get(now.peers[rank // now.ranks].instance)) is not None
            }
            for layer, expert in held.missing(experts)
        }
        rates = held.disk_rate, held.link_rate
        return from_peers(holders, form.peers[place].host, *rates, always=os.environ.get(SOURCE) == "peers")

    def connect(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> Communicator:
        """See :class:`.SpreadExecutor`. One group carries headers and tokens."""
        try:
            self.exchange(form, group, should_stop)
        except BaseException:
            group.abort()
            group.close()
            raise
        return group

    def exchange(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> None:
        """Give experts to members on other hosts, and get those that :meth:`prepare` left out.

        All members of the group, which was just formed, call this.
        """
        held = self._held
        assert held is not None, "experts are not spread"
        assert self._model is not None
        if goes_between_hosts(form) and self._model.device.type == "cpu":
            hosts = [peer.host for peer in form.peers for _ in range(form.ranks)]
            exchange(group, held, hosts, should_stop)

    def weights_digest(self, progress: Progress = lambda text: None) -> str:
        """See :class:`.LoadedShard`; loaded experts are named by it, as those of an update are."""
        found = super().weights_digest(progress)
        if self._held is not None and not self._held.weights:  # at start: nothing is switched to yet
            self._held.weights = found
        return found

    def link_counts(self) -> list[LinkCount]:
        """See :class:`.SpreadExecutor`. One group carries headers and tokens."""
        return []

    def experts_held(self) -> list[list[list[int]]]:
        """See :class:`.SpreadExecutor`; of a shard, of its own rank alone."""
        return [[list(of_layer) for of_layer in self._held.experts]] if self._held is not None else []

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in all layers computed here, in all copies held."""
        return self._held.bytes_per_expert * self._held.copies if self._held is not None else 0

    def max_experts(self, free_bytes: int) -> int:
        """See :class:`.SpreadExecutor`."""
        assert self._held is not None, "experts are not spread"
        return self._held.max_experts(free_bytes)

    def spare_memory(self) -> int:
        """See :class:`.SpreadExecutor`."""
        assert self._model is not None
        if self._model.device.type == "cpu":
            return memory.spare_memory(self._untouched)
        free, _ = torch.cuda.mem_get_info(self._model.device)
        device = self._model.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + unused) * (1 - memory.MARGIN))

    def expert_times(self) -> ExpertTimes | None:
        """See :class:`.Executor`."""
        if self._model is None or self._model.experts is None:
            return None
        times, use, before = self._model.experts.times, self._attention, self._attention_before
        return ExpertTimes(
            times.dispatch,
            times.experts,
            times.combine,
            use.seconds - before.seconds,
            use.calls - before.calls,
        )

    def tokens_per_expert(self) -> dict[int, int]:
        """See :class:`.Executor`."""
        if self._model is None or self._model.experts is None:
            return {}
        experts = self._model.experts
        experts.take_counts()
        counts = experts.tokens_per_expert
        held = {e for layer in range(len(counts)) for e in experts.placement.experts_of(experts.rank, layer)}
        total = counts.sum(axis=0).tolist()
        return {expert: total[expert] for expert in sorted(held)}

    def expert_loads(self) -> list[list[int]]:
        """See :class:`.SpreadExecutor`."""
        experts = self._model.experts if self._model is not None else None
        if experts is None:
            return []
        experts.take_counts()
        loads: list[list[int]] = experts.tokens_per_expert.tolist()
        return loads

    def _pass_expert_layers(self, model: LoadedModel) -> None:
        """Serve the other instances' tokens in every expert layer, without any of our own."""
        assert model.experts is not None
        hidden = torch.empty(0, model.hidden_size, dtype=model.dtype, device=model.device)
        ids = torch.empty(0, model.experts_per_token, dtype=torch.int64, device=model.device)
        weights = torch.empty(0, model.experts_per_token, dtype=model.dtype, device=model.device)
        with torch.inference_mode():
            for layer in model.expert_layers:
                model.experts.forward(layer, hidden, ids, weights)

    def _leave_room(self, share: int, left: int) -> int:
        """Bytes of the KV cache, with room beside it for a lost instance's experts."""
        if self._held is None or self._place is None:
            return share
        wanted = experts_after_loss(self._info.num_experts, self._place[1], self._shard.size)
        if not wanted:
            return share
        more = max(0, wanted - self._held.most) * self.expert_bytes
        room = int(more / (1 - memory.MARGIN))
        smaller = leave_room(share, left, room)
        if left + share - smaller < room:
            logger.warning(
                "experts: the %.1f GiB of those of a lost instance do not fit beside the KV cache: after a "
                "loss the mesh waits for another instance; lower --gpu-memory-utilization, or use more "
                "instances",
                more / 2**30,
            )
        elif more:
            logger.info("experts: %.1f GiB are left for those of one lost instance", more / 2**30)
        return smaller

    def _bytes_for_copies(self, others: int = 0) -> int:
        """Bytes of copies of experts that are still to come.

        ``others``: bytes of what is still to come beside them.

        Raises:
            CheckpointError: that is more than is free.
        """
        held = self._held
        if held is None or not held.bytes_per_expert:
            return 0
        more = max(0, self._most_held - held.most)
        needed = more * held.bytes_per_expert * KERNEL_COPIES * self._shard.neighbours
        free = max(0, memory.available_memory() - others)
        if needed > free:
            raise CheckpointError(
                f"--eplb-config: {more} more experts of each layer on a worker take {needed / 2**20:.0f} "
                f"MiB, of which {free / 2**20:.0f} MiB are free: lower num_redundant_experts or "
                "--kv-cache-memory-bytes"
            )
        return needed


def goes_between_hosts(form: GroupPlan) -> bool:
    """Whether members of a group are on several hosts."""
    return len({peer.host for peer in form.peers}) > 1
