"""What one instance does about the low-rank adapters of its standing orders (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from coordinator.messages import AdapterSource, AdaptersReport, StandingOrders


class ReadAdapter(msgspec.Struct, frozen=True):
    """Instruction: read this adapter into memory, in the background."""

    key: str
    """Digest of a listed adapter, or id of the command that loads one."""
    source: AdapterSource


class DropAdapters(msgspec.Struct, frozen=True):
    """Instruction: forget these adapters, by digest."""

    digests: tuple[str, ...]


class AdapterFollowing:
    """Adapters in memory, and the one that is being read."""

    def __init__(self, held: Iterable[AdapterSource]) -> None:
        """``held``: those of the settings, which are in memory."""
        self._first = tuple(held)
        self._names = {each.digest: each.name for each in self._first}
        """Names of the adapters in memory by digest."""
        self.reading = ""
        """Key of the adapter that is being read."""
        self._failed: dict[str, str] = {}
        """Reasons by key, of adapters that the orders still have."""
        self._read: tuple[str, str] = ("", "")
        """Command whose adapter was read last, and the digest."""

    def __repr__(self) -> str:
        return f"<AdapterFollowing {len(self._names)} in memory, reading {self.reading!r}>"

    @property
    def names(self) -> dict[str, str]:
        """Names of the adapters in memory, by digest."""
        return self._names

    def next(self, orders: StandingOrders, in_use: Collection[str]) -> ReadAdapter | DropAdapters | None:
        """What to do now; the caller does it, and reports what came of it.

        ``in_use``: digests of adapters that requests here have.
        """
        wanted = self._wanted(orders)
        self._failed = {key: why for key, why in self._failed.items() if key in wanted}
        if not self.reading:
            gone = self._names.keys() - {self._digest_of(*each) for each in wanted.items()} - set(in_use)
            if gone:
                return DropAdapters(tuple(sorted(gone)))
        for key, source in wanted.items():
            is_here = self._digest_of(key, source) in self._names
            if not (self.reading or is_here or key in self._failed):
                return ReadAdapter(key, source)
        return None

    def stops(self, orders: StandingOrders) -> bool:
        """Whether what is being read is not wanted any more."""
        return bool(self.reading) and self.reading not in self._wanted(orders)

    def problem(self, orders: StandingOrders) -> str | None:
        """Why this instance cannot serve the list of the orders; None if it may."""
        reasons = (self._failed.get(each.digest) for each in self._listed(orders))
        return next((why for why in reasons if why is not None), None)

    def is_in_effect(self, orders: StandingOrders) -> bool:
        """Whether all adapters of the list are in memory."""
        return all(each.digest in self._names for each in self._listed(orders))

    def lacking(self, orders: StandingOrders) -> tuple[str, ...]:
        """Retired adapters that this instance does not have: it joined when they were gone."""
        return tuple(each.digest for each in orders.adapters.retired if each.digest not in self._names)

    def report(self, orders: StandingOrders) -> AdaptersReport:
        """How far this instance is with the adapter to read, for the coordinator."""
        command = orders.adapter_load.command if orders.adapter_load is not None else ""
        if command and command in self._failed:
            return AdaptersReport(failed=command, reason=self._failed[command])
        return AdaptersReport(*self._read) if command and self._read[0] == command else AdaptersReport()

    # ---- what came of it

    def begun(self, key: str) -> None:
        self.reading = key

    def read(self, source: AdapterSource) -> None:
        """Note that the adapter under way is in memory; ``source`` has its digest."""
        self._read = self.reading, source.digest
        self._names = {**self._names, source.digest: source.name}
        self.reading = ""

    def failed(self, reason: str) -> None:
        """Note that the adapter under way cannot be served; empty: it was stopped."""
        if reason:
            self._failed[self.reading] = reason
        self.reading = ""

    def dropped(self, digests: Collection[str]) -> None:
        """Note that these adapters are not in memory any more."""
        self._names = {digest: name for digest, name in self._names.items() if digest not in digests}

    # ----

    def _listed(self, orders: StandingOrders) -> tuple[AdapterSource, ...]:
        return orders.adapters.adapters if orders.adapters.number else self._first

    def _wanted(self, orders: StandingOrders) -> dict[str, AdapterSource]:
        """Adapters to have in memory by key, the most urgent first."""
        found = {each.digest: each for each in self._listed(orders)}
        if orders.adapter_load is not None:
            found[orders.adapter_load.command] = orders.adapter_load.source
        return found | {each.digest: each for each in orders.adapters.retired}

    def _digest_of(self, key: str, source: AdapterSource) -> str:
        """Digest of a wanted adapter; empty while it is not known."""
        return source.digest or (self._read[1] if key == self._read[0] else "")
