"""Low-rank adapters of the mesh: loaded, replaced and unloaded while it serves (pure).

Part of :mod:`coordinator.membership.registry`. An adapter to load is in the standing orders while instances
read it. Once all that serve have it in memory, with one digest, it is in the list that the orders have. Until
then the load can be given up, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from coordinator.membership.operations import ACCEPTED, DONE, NOT_FOUND, UNAVAILABLE
from coordinator.membership.records import Note, Record, Records
from coordinator.membership.standing_orders import Orders
from coordinator.messages import (
    AdapterList,
    AdapterLoad,
    AdapterSource,
    LoadAdapter,
    OperatorAnswer,
    Settings,
    State,
    UnloadAdapter,
)

BAD_REQUEST = 400
READ_TIMEOUT = 120.0
"""Seconds for all instances to read an adapter."""
KEPT_FOR = 30.0
"""Seconds for which a retired adapter stays in memory after its last request.

Requests whose tokens are being counted, and those of a router that is silent, may still come.
"""
MOST_REFUSED = 100
"""Commands whose refusals are remembered, for senders that ask again."""
MOST_COMMANDS = 32
"""Commands that the list remembers, over restarts of the coordinator."""


class AdapterOrders:
    """The mesh's list of adapters, the load under way, and why earlier ones were refused."""

    def __init__(self, orders: Orders, records: Records, settings: Callable[[], Settings | None]) -> None:
        """``settings``: those of the mesh; None as long as it has none."""
        self._orders = orders
        self._records = records
        self._settings = settings
        self._refused: dict[str, str] = {}
        """Reasons by id of the command."""
        self._watched: tuple[str, float] = ("", 0.0)
        """The load that is waited for, and until when."""
        self._used_at: dict[str, float] = {}
        """When a retired adapter was used last, by digest."""

    def __repr__(self) -> str:
        current = self.current
        return f"<AdapterOrders {len(current.adapters)}, {len(current.retired)} retired>"

    @property
    def current(self) -> AdapterList:
        """The list; that of the settings as long as it has not changed."""
        found, settings = self._orders.current.adapters, self._settings()
        if found.number or settings is None or settings.lora is None:
            return found
        return AdapterList(0, settings.lora.adapters)

    # ---- commands

    def load(self, wish: LoadAdapter) -> OperatorAnswer:
        """Begin to load an adapter; the same command again asks how far that is."""
        known = self._progress(wish.command)
        if known is not None:
            return known
        settings = self._settings()
        if settings is None or not (serving := self._serving()):
            return _answer(wish.command, UNAVAILABLE, "no instance serves")
        if (why := self._problem_with(wish, settings)) is not None:
            return _answer(wish.command, BAD_REQUEST, why)
        if (under_way := self._orders.current.adapter_load) is not None:
            return _answer(wish.command, ACCEPTED, f"waits until {under_way.source.name} is loaded")
        self._orders.change(adapter_load=AdapterLoad(wish.command, AdapterSource(wish.name, wish.path)))
        return _answer(wish.command, ACCEPTED, f"{len(serving)} instances read {wish.name}")

    def unload(self, wish: UnloadAdapter) -> OperatorAnswer:
        """Take an adapter out of the list; requests in flight keep it."""
        known = self._progress(wish.command)
        if known is not None:
            return known
        listed = self.current
        found = next((each for each in listed.adapters if each.name == wish.name), None)
        if found is None:
            return _answer(wish.command, NOT_FOUND, f"The lora adapter '{wish.name}' cannot be found.")
        left = tuple(each for each in listed.adapters if each is not found)
        self._give(listed, left, wish.command)
        return _answer(wish.command, ACCEPTED, f"{wish.name} takes no more requests")

    def heard(self, digests: Sequence[str], now: float) -> None:
        """Note that requests of a router have these retired adapters."""
        self._used_at.update(dict.fromkeys(digests, now))

    def go_on(self, now: float) -> Iterator[Note]:
        """Decide or give up the load under way; forget retired adapters without requests."""
        yield from self._decide(now)
        self._forget_unused(now)

    # ----

    def _problem_with(self, wish: LoadAdapter, settings: Settings) -> str | None:
        """Why no instance needs to be asked; None if they do."""
        if settings.lora is None:
            return "this mesh serves no adapters: start it with --enable-lora"
        if not wish.name.strip() or not wish.path:
            return "Both 'lora_name' and 'lora_path' must be provided."
        if wish.name in settings.served_model_name:
            return f"The lora adapter '{wish.name}' conflicts with a served base model."
        listed = self.current
        if not wish.in_place and any(each.name == wish.name for each in listed.adapters):
            return (
                f"The lora adapter '{wish.name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True."
            )
        if len(listed.adapters) + len(listed.retired) >= settings.lora.max_cpu_loras:
            return (
                f"{len(listed.adapters)} adapters are loaded, and {len(listed.retired)} are kept for "
                f"requests in flight: --max-cpu-loras is {settings.lora.max_cpu_loras}, unload one first"
            )
        return None

    def _progress(self, command: str) -> OperatorAnswer | None:
        """How far a command is; None if it is not known."""
        orders = self._orders.current
        if command in self._refused:
            return _answer(command, BAD_REQUEST, self._refused[command])
        if not self._orders.knows_all:
            return _answer(command, ACCEPTED, "waits for instances that have not registered again")
        under_way = orders.adapter_load
        if under_way is not None and under_way.command == command:
            missing = ", ".join(self._missing(self._serving(), under_way)) or "the coordinator's decision"
            return _answer(command, ACCEPTED, f"{under_way.source.name} is read; missing: {missing}")
        if command in orders.adapters.commands:
            if waits := self._orders.behind():
                return _answer(command, ACCEPTED, f"not yet known to {', '.join(waits)}")
            return _answer(command, DONE, "in effect on all instances")
        return None

    def _decide(self, now: float) -> Iterator[Note]:
        under_way = self._orders.current.adapter_load
        if under_way is None:
            return
        source = under_way.source
        if self._watched[0] != under_way.command:
            self._watched = under_way.command, now + READ_TIMEOUT
        serving = self._serving()
        why = self._problem(serving, under_way, is_late=now > self._watched[1])
        if why is not None:
            self._refused[under_way.command] = why
            while len(self._refused) > MOST_REFUSED:
                self._refused.pop(next(iter(self._refused)))
            self._orders.change(adapter_load=None)
            yield Note(f"adapter {source.name} is not loaded: {why}", warning=True)
            return
        if not serving or not self._orders.knows_all or self._missing(serving, under_way):
            return
        decided = msgspec.structs.replace(source, digest=serving[0].adapters.digest)
        listed = self.current
        others = tuple(each for each in listed.adapters if each.name != source.name)
        self._give(listed, (*others, decided), under_way.command, adapter_load=None)
        yield Note(f"adapter {source.name} is served, digest {decided.digest}")

    def _give(
        self, before: AdapterList, adapters: tuple[AdapterSource, ...], command: str, **fields: None
    ) -> None:
        """Order another list; what it lacks is retired."""
        served = {each.digest for each in adapters}
        gone = {each.digest: each for each in (*before.retired, *before.adapters)}
        found = AdapterList(
            number=before.number + 1,
            adapters=adapters,
            retired=tuple(each for digest, each in gone.items() if digest not in served),
            commands=(*before.commands, command)[-MOST_COMMANDS:],
        )
        self._orders.change(adapters=found, **fields)

    def _forget_unused(self, now: float) -> None:
        """Take adapters out of the list that no request has had for a while."""
        listed = self._orders.current.adapters
        self._used_at = {each.digest: self._used_at.get(each.digest, now) for each in listed.retired}
        kept = tuple(each for each in listed.retired if now - self._used_at[each.digest] <= KEPT_FOR)
        if len(kept) < len(listed.retired) and self._orders.knows_all:
            self._orders.change(
                adapters=msgspec.structs.replace(listed, number=listed.number + 1, retired=kept)
            )

    def _serving(self) -> list[Record]:
        """The instances that must have an adapter before it is served."""
        return [record for record in self._records.values() if record.state is State.READY]

    def _missing(self, serving: list[Record], under_way: AdapterLoad) -> list[str]:
        return [f"instance {each.rank}" for each in serving if each.adapters.command != under_way.command]

    def _problem(self, serving: list[Record], under_way: AdapterLoad, *, is_late: bool) -> str | None:
        """Why the load must be given up; None if it need not."""
        for record in serving:
            if record.adapters.failed == under_way.command:
                return record.adapters.reason
        if is_late:
            what = ", ".join(self._missing(serving, under_way)) or "instances that have not registered again"
            return f"not read within {READ_TIMEOUT:.0f} s: {what}"
        digests = {each.adapters.digest for each in serving if each.adapters.command == under_way.command}
        if len(digests) > 1:
            found = ", ".join(sorted(digests))
            return f"instances have read different files in {under_way.source.path} (digests {found})"
        return None


def _answer(command: str, status: int, text: str) -> OperatorAnswer:
    return OperatorAnswer(command=command, status=status, text=text)
