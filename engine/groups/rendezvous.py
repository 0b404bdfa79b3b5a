"""Rendezvous of a group: every instance hosts a meeting place, the first member's is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coordinator.messages import GroupPlan
from coordinator.rpc.keys import MeshKeys, link_key
from engine.config import DeviceConfig
from engine.groups.recovery import names
from parallel import groups
from parallel.communicators.base import CollectiveError, Communicator
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingHost, join_meeting
from parallel.links.meeting_contract import Meeting


class Rendezvous:
    """This instance's meeting place, and the way into groups."""

    def __init__(self, instance: str, host: str, device: DeviceConfig, keys: MeshKeys | None) -> None:
        """``host``: where the other instances reach this one."""
        self.instance = instance
        self.keys = keys
        self._host = host
        self._device = device
        self._key: LinkKey | None = None if keys is None else link_key(keys)
        self._meetings: deque[MeetingHost] = deque(maxlen=2)
        self.renew()

    @property
    def address(self) -> str:
        """Address of the meeting place for the others, host:port."""
        return f"{self._host}:{self._meetings[-1].port}"

    def renew(self) -> None:
        """Open a fresh meeting place, so that leftovers of groups do not add up.

        The one before is kept a while, for those who have heard of it only.
        """
        if len(self._meetings) == self._meetings.maxlen:
            self._meetings.popleft().close()
        self._meetings.append(MeetingHost(self._host, key=self._key))

    def __repr__(self) -> str:
        return f"<Rendezvous of {self.instance} at {self.address}>"

    def connect(self, form: GroupPlan, should_stop: Callable[[], bool]) -> Communicator:
        """Form the group with all its members; waits for them.

        Raises:
            CollectiveError: a member did not come, or ``should_stop`` returned True.
            ValueError: the group is not possible; the message says why.
        """
        index, device = names(form).index(self.instance), self._device
        meeting = self._meeting(form, index)
        hosts = [peer.host for peer in form.peers]
        backend = groups.choose_backend(device.all2all_backend, hosts, device.mesh_transport)
        group = groups.form(
            meeting, form.epoch, index, len(form.peers), backend, device.collective_timeout,
            group=f"all/{form.token}", host=self._host, should_stop=should_stop,
            forming_timeout=device.forming_timeout, key=self._key, host_name=hosts[index],
            between=device.mesh_transport,
        )  # fmt: skip
        if device.all2all_backend != "nccl" or device.uses_processes:  # then this one is for headers only
            return group
        return groups.on_devices(
            group, meeting, 0, device.collective_timeout, f"{form.epoch}/all/{form.token}"
        )

    def close(self) -> None:
        while self._meetings:
            self._meetings.popleft().close()

    def _meeting(self, form: GroupPlan, index: int) -> Meeting:
        if index > 0:
            return join_meeting(form.store, self._key)
        for meeting in self._meetings:
            if form.store == f"{self._host}:{meeting.port}":
                return meeting
        raise CollectiveError(f"the meeting place at {form.store} is gone", None, "aborted")
