"""A communicator for members on several hosts: shared memory on each host, links between hosts.

Its rounds (:mod:`parallel.communicators.host_rounds`) are made of those of two communicators: one over links
that has all members, so that all deaths are noticed there, and one in shared memory for the members of each
host. A group breaks as a whole: see :mod:`parallel.rounds.host_health`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace

from parallel.communicators.base import CollectiveError
from parallel.communicators.host_rounds import HostRounds
from parallel.communicators.network import NetworkCommunicator
from parallel.communicators.rounds_communicator import RoundsCommunicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.links.counts import LinkCount
from parallel.links.forming_group import FormingGroup
from parallel.rounds import memory_order
from parallel.rounds.host_health import HostHealth, MixedHealth
from parallel.rounds.host_routes import HostRoutes
from parallel.rounds.plans import Plans
from parallel.rounds.segments import this_host
from parallel.rounds.slots import USUAL_SIZES, SegmentSizes
from parallel.topology import usable_cores


class MixedCommunicator(RoundsCommunicator):
    """One member of several hosts' group; see :class:`parallel.communicators.base.Communicator`."""

    def __init__(
        self,
        forming: FormingGroup,
        network: NetworkCommunicator,
        *,
        host_name: str | None = None,
        sizes: SegmentSizes = USUAL_SIZES,
        native: bool = True,
    ) -> None:
        """``network`` connects all members, and is closed with this, also if forming fails.

        Without ``native`` this member keeps to Python in shared memory, whatever the others do.
        Members share memory if they can, and have the same ``host_name``.
        """
        self.local: SharedMemoryCommunicator | None = None
        """The members of this host; None if this is its only one."""
        self.network = network
        """The communicator that has all members."""
        whole = network.health

        def is_vain() -> bool:
            return whole.blame is not None or (forming.should_stop is not None and forming.should_stop())

        try:
            # Shared memory needs the same user, too. A member that cannot have it is on a host of its own.
            apart = f" {forming.rank}" if memory_order.fence_here() is None else ""
            name = f"{host_name or ''} {this_host()} {os.getuid()}{apart}".encode()
            digest = int.from_bytes(hashlib.sha256(name).digest()[:8], "big", signed=True)
            hosts = [str(row[0]) for row in network.all_gather_ints([digest])]
            self._routes = routes = HostRoutes(hosts, forming.rank)
            part = HostHealth(routes.local_rank, routes.local, forming.timeout, lambda: whole.blame, is_vain)
            if len(routes.local) > 1:
                beside = replace(
                    forming.at(f"host {routes.host}"), rank=routes.local_rank, size=len(routes.local),
                    should_stop=is_vain,
                )  # fmt: skip
                self.local = SharedMemoryCommunicator(beside, sizes=sizes, native=native, health=part)
        except BaseException as error:
            blame = whole.blame
            network.abort()
            network.close()
            if isinstance(error, CollectiveError) and blame is not None:
                reason, blamed, evidence = blame
                raise CollectiveError(f"forming the group: {reason}", blamed, evidence) from error
            raise
        self._health = health = MixedHealth(whole, part, routes.local)
        super().__init__(forming.rank, forming.size, health)
        self.processes = network.processes
        self.is_crowded = len(routes.local) > usable_cores()
        self.plans = Plans(HostRounds(routes, network, self.local, health), health.begin)

    def __repr__(self) -> str:
        hosts, state = len(self._routes.members), self.health.reason or "open"
        return f"<MixedCommunicator of {hosts} hosts, rank {self.rank} of {self.size}, {state}>"

    def link_counts(self) -> list[LinkCount]:
        """What the links to the others have carried, by rank."""
        return self.network.link_counts()

    @property
    def hosts(self) -> Sequence[int]:
        """Numbers of the members' hosts, by rank."""
        return self._routes.hosts

    @property
    def links_address(self) -> int:
        """Address of the table of links to all members; 0 if they are Python's."""
        return self.network.links_address

    def begin_exchange(self, call: str) -> None:
        super().begin_exchange(call)
        self._health.begin_on_host(call)

    def close(self) -> None:
        self.network.close()
        super().close()
        if self.local is not None:
            self.local.close()
