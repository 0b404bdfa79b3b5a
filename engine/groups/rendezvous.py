"""Rendezvous of a group: every instance hosts a store, the first member's is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch.distributed import TCPStore

from coordinator.messages import GroupPlan
from engine.config import DeviceConfig
from engine.groups.recovery import names
from parallel import groups
from parallel.communicators.base import CollectiveError, Communicator


class Rendezvous:
    """This instance's store, and the way into groups."""

    def __init__(self, host: str, device: DeviceConfig) -> None:
        self._host = host
        self._device = device
        self._stores: deque[TCPStore] = deque(maxlen=2)
        self.renew()

    @property
    def address(self) -> str:
        """Address of the store for the others, host:port."""
        return f"{self._host}:{self._stores[-1].port}"

    def renew(self) -> None:
        """A fresh store, so that what groups leave in one does not add up.

        The one before is kept a while, for those who have heard of it only.
        """
        self._stores.append(
            groups.open_store(self._host, None, is_host=True, timeout=self._device.forming_timeout)
        )

    def connect(self, form: GroupPlan, instance: str, should_stop: Callable[[], bool]) -> Communicator:
        """Form the group with all its members; waits for them.

        Raises:
            CollectiveError: a member did not come, or ``should_stop`` returned True.
            ValueError: the group is not possible; the message says why.
        """
        index, device = names(form).index(instance), self._device
        backend = groups.choose_backend(device.all2all_backend, [peer.host for peer in form.peers])
        return groups.form(
            self._store(form, index), form.epoch, index, len(form.peers), backend, device.collective_timeout,
            group=f"all/{form.token}", host=self._host, should_stop=should_stop,
            forming_timeout=device.forming_timeout,
        )  # fmt: skip

    def close(self) -> None:
        self._stores.clear()

    def _store(self, form: GroupPlan, index: int) -> TCPStore:
        if index > 0:
            return groups.join_store(form.store)
        for store in self._stores:
            if form.store == f"{self._host}:{store.port}":
                return store
        raise CollectiveError(f"the store at {form.store} is gone", None, "aborted")
