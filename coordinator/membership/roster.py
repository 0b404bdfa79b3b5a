"""Roster of the mesh: its instances, size and common settings (pure)."""

from __future__ import annotations

from coordinator.membership.records import Record, Records, Rules
from coordinator.messages import Register, Settings, State
from coordinator.numerics import Numerics

SILENT_INTERVALS = 4
"""Least heartbeats of an instance that are missed before it is taken out."""
ALIVE_INTERVALS = 1.2
"""An instance is alive if its last heartbeat is at most this many intervals old."""


class Roster:
    """The instances that are here, and what the mesh expects of them."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.records = Records()
        self.size = rules.size
        self.settings: Settings | None = rules.settings
        self._reserved = set(rules.reserved)
        self._drained: set[int] = set()
        """Ranks whose instances were drained: they are not waited for."""

    def __repr__(self) -> str:
        ranks = " ".join(f"{rank}:{record.state}" for rank, record in sorted(self.records.items()))
        return f"<Roster {ranks}>"

    # ---- who comes and goes

    def free_rank(self) -> int:
        """The lowest rank that an instance may have which wants none."""
        return self.records.free_rank(self._reserved)

    def add(self, record: Record, message: Register) -> None:
        """Add an instance; the first one's settings and size become those of the mesh."""
        self.settings = self.settings or message.settings
        self.size = self.size or message.size
        self.records.add(record)
        self._drained.discard(record.rank)
        self._reserved.discard(record.rank)  # came; should it go, anybody may take its place

    def drained(self, record: Record) -> None:
        """Note that an instance has left as intended."""
        self._drained.add(record.rank)

    # ---- heartbeats

    @property
    def longer_interval(self) -> float | None:
        """Seconds between two heartbeats of an instance where there are very many.

        Even then some are due before an instance counts as silent.
        """
        shared = len(self.records) / self.rules.most_heartbeats
        if shared <= self.rules.heartbeat_interval:
            return None
        return min(shared, max(self.rules.heartbeat_interval, self.rules.member_timeout / SILENT_INTERVALS))

    def may_be_dead(self, record: Record, now: float) -> bool:
        """Whether a heartbeat of this instance is overdue."""
        interval = self.longer_interval or self.rules.heartbeat_interval
        return now - record.heard_at > interval * ALIVE_INTERVALS

    def may_all_be_dead(self, numerics: Numerics | None, now: float) -> bool:
        """Whether heartbeats of all instances of other numerics classes are overdue.

        They answer or are taken out soon. Until then no instance is refused for their sake.
        """
        return all(
            self.may_be_dead(record, now)
            for record in self.records.values()
            if record.numerics not in (None, numerics)
        )

    # ---- questions

    @property
    def spreads(self) -> bool:
        """Whether experts are spread over the instances, which then step in groups."""
        return self.settings is not None and self.settings.enable_expert_parallel

    @property
    def balances(self) -> bool:
        """Whether the load of experts is balanced."""
        return self.spreads and self.settings is not None and self.settings.balancing is not None

    @property
    def num_ready(self) -> int:
        """Number of instances that are ready."""
        return sum(record.state is State.READY for record in self.records.values())

    def knows_all(self, age: float) -> bool:
        """Whether a coordinator of this age has heard of all live instances.

        They may need a while to find it.
        """
        all_serve = self.size is not None and self.num_ready >= self.size
        return age >= (self.rules.view_grace if all_serve else self.rules.member_timeout)

    def absent(self) -> list[int]:
        """Ranks of the mesh's size that nobody has, and that are waited for."""
        ranks = range(self.size or 0)
        return [rank for rank in ranks if rank not in self.records and rank not in self._drained]
