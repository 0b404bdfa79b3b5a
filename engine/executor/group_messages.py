"""Messages between engine and workers about the groups of an epoch (no torch).

They go over a channel of their own, so that a worker hears them while it waits in a step.
"""

from __future__ import annotations

import msgspec

from coordinator.messages import GroupPlan
from parallel.links.counts import LinkCount

# ---- engine -> worker


class PrepareGroups(msgspec.Struct, frozen=True, tag="prepare"):
    """Order to read the missing experts of an epoch, then form its groups."""

    form: GroupPlan
    place: int
    """Index of this instance among the plan's peers."""
    free_bytes: int
    """Memory that this worker may use for it."""


class AbandonGroups(msgspec.Struct, frozen=True, tag="abandon"):
    """Order to stop preparing this epoch and close its groups.

    Nothing happens if the epoch has been entered.
    """

    epoch: int


class AbortGroups(msgspec.Struct, frozen=True, tag="abort"):
    """Order to abort the groups of this epoch, wherever the worker waits in them."""

    epoch: int


class TellCounts(msgspec.Struct, frozen=True, tag="tell_counts"):
    """Question for the load of experts and free memory."""


ToGroups = PrepareGroups | AbandonGroups | AbortGroups | TellCounts

# ---- worker -> engine


class ExpertsRead(msgspec.Struct, frozen=True, tag="experts_read"):
    epoch: int
    num_read: int


class GroupsFormed(msgspec.Struct, frozen=True, tag="groups_formed"):
    epoch: int


class NotPrepared(msgspec.Struct, frozen=True, tag="not_prepared"):
    """Report that experts could not be read, or groups not formed."""

    epoch: int
    kind: str
    """Name of the exception's class."""
    text: str
    suspect: int | None = None
    """Index of the instance at fault, if any."""
    evidence: str = "closed"


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    tokens_per_expert: dict[int, int]
    """Tokens computed so far by each expert that this worker holds."""
    spare_bytes: int
    """Bytes of its device for more experts."""
    epoch: int = 0
    """Epoch of the groups that its steps use."""
    links: list[LinkCount] = []
    """Bytes that its links in these groups have carried, by instance."""
    expert_loads: list[list[int]] = []
    """Rows computed so far by layer and expert, if their load is balanced."""


FromGroups = ExpertsRead | GroupsFormed | NotPrepared | Counts
