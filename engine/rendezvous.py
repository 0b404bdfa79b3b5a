"""Where the instances of a group meet: each hosts a store, the group uses that of its first member."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch.distributed import TCPStore

from coordinator.messages import Form
from engine.recovery import names
from parallel import groups
from parallel.communicators import Backend
from parallel.communicators.base import CollectiveError, Communicator

FORMING_TIMEOUT = 60.0
"""Seconds that forming a group may take at least: others may have experts to read first."""
CONNECT_TIMEOUT = 5.0
"""Seconds within which the host of a store answers."""


class Rendezvous:
    """This instance's store, and the way into groups."""

    def __init__(self, host: str, asked_backend: str, timeout: float) -> None:
        """``timeout``: seconds for each collective of the groups."""
        self._host = host
        self._asked_backend = asked_backend
        self._timeout = timeout
        self._stores: deque[TCPStore] = deque(maxlen=2)
        self.renew()

    @property
    def address(self) -> str:
        """host:port, for others."""
        return f"{self._host}:{self._stores[-1].port}"

    def renew(self) -> None:
        """A fresh store, so that what groups leave in one does not add up. The one before is kept a while,
        for those who have heard of it only."""
        self._stores.append(
            groups.open_store(self._host, None, is_host=True, timeout=max(self._timeout, FORMING_TIMEOUT))
        )

    def connect(self, form: Form, instance: str, should_stop: Callable[[], bool]) -> Communicator:
        """Form the group with all its members; waits for them.

        Raises:
            CollectiveError: somebody did not come, or ``should_stop`` said so.
            ValueError: the group is not possible; the message says why.
        """
        index = names(form).index(instance)
        backend = self._backend(form)
        return groups.form(
            self._store(form, index), form.epoch, index, len(form.peers), backend, self._timeout,
            group=f"all/{form.token}", host=self._host, should_stop=should_stop,
            forming_timeout=max(self._timeout, FORMING_TIMEOUT),
        )  # fmt: skip

    def close(self) -> None:
        self._stores.clear()

    def _backend(self, form: Form) -> Backend:
        return groups.choose_backend(self._asked_backend, [peer.host for peer in form.peers])

    def _store(self, form: Form, index: int) -> TCPStore:
        host, _, port = form.store.rpartition(":")
        if index == 0:
            for store in self._stores:
                if store.port == int(port):
                    return store
            raise CollectiveError(f"the store at {form.store} is gone", None, "aborted")
        return groups.open_store(host, int(port), is_host=False, timeout=CONNECT_TIMEOUT)
