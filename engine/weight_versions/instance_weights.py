"""Weight versions of one instance: its workers, its requests, and names of blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from coordinator.messages import InFlight, WeightUpdate, WeightVersion
from engine.core import EngineCore
from engine.executor_contract import NewWeights
from engine.weight_versions.contract import WeightsRefused
from engine.weight_versions.requests_in_flight import RequestsInFlight

logger = logging.getLogger(__name__)


class InstanceWeights:
    """Implements :class:`engine.weight_versions.contract.WeightVersions` with an executor and a core."""

    def __init__(
        self,
        workers: NewWeights,
        core: EngineCore,
        end_requests: Callable[[], None],
        changed: Callable[[WeightVersion], None] = lambda version: None,
        digest: Callable[[], str] = lambda: "",
        *,
        in_groups: bool = False,
    ) -> None:
        """``end_requests``: ends all requests here with the reason ``abort``, and passes that on.

        ``changed`` is called at each switch with the new version: the numerics class and what routers know of
        the names of blocks follow it. ``digest``: that of the version in use; empty where it is not known.
        ``in_groups``: all members of a group switch at one step.
        """
        self._in_groups = in_groups
        self._digest = digest
        self._workers = workers
        self._requests = RequestsInFlight(core.scheduler, core.admission, core.sharing)
        self._end_requests = end_requests
        self._changed = changed
        self._prepared: tuple[str, str] | None = None
        """Id of the update that was prepared, and its digest."""
        self.in_use = WeightVersion()

    def __repr__(self) -> str:
        return f"<InstanceWeights {self.in_use.number}, next {self._prepared}>"

    def prepare(self, update: WeightUpdate, should_stop: Callable[[], bool]) -> str:
        """See :class:`.WeightVersions`."""
        version = update.version
        if self._prepared is not None and self._prepared[0] == version.update:
            return self._prepared[1]
        self._prepared = None
        if update.in_flight is InFlight.FINISH and self._in_groups:
            raise WeightsRefused(
                "requests in flight cannot end on the old weights where experts are spread (finish): all "
                "members switch at one step; choose keep, recompute or abort"
            )
        digest = self._workers.prepare(version.source, should_stop)
        if version.digest not in ("", digest):
            self._workers.discard()
            raise WeightsRefused(
                f"{version.source} has other weights (digest {digest}) than version {version.number} "
                f"({version.digest}): it was changed"
            )
        self._prepared = version.update, digest
        return digest

    def switch(self, update: WeightUpdate, in_flight: InFlight) -> None:
        """See :class:`.WeightVersions`."""
        assert self._prepared is not None, "prepare() comes first"
        began = time.perf_counter()
        name, digest = self._prepared
        assert name == update.version.update, f"{name} was prepared, not {update.version.update}"
        if in_flight is InFlight.ABORT:
            self._end_requests()
        self._workers.switch()
        self._requests.go_over(digest, in_flight)
        self._prepared, self.in_use = None, update.version
        self._changed(update.version)
        logger.info(
            "weights %d (%s) in use, digest %s: switched in %.1f ms",
            update.version.number, update.version.label or "no label", digest,
            1000 * (time.perf_counter() - began),
        )  # fmt: skip

    def read_again(self, should_stop: Callable[[], bool]) -> None:
        """Read the version in use, whose memory was given back; in a background thread.

        Raises:
            WeightsRefused: it cannot be read, or its source has other weights now.
            WeightsSuperseded: ``should_stop`` returned True.
        """
        wanted = self._digest()
        self._prepared = None
        digest = self._workers.prepare("", should_stop)
        if wanted not in ("", digest):
            self._workers.discard()
            raise WeightsRefused(f"the source has other weights now (digest {digest}, not {wanted})")

    def use_again(self) -> None:
        """Use what was read again from the next step on."""
        self._workers.switch()

    def discard(self, update: str) -> None:
        """See :class:`.WeightVersions`."""
        if self._prepared is not None and self._prepared[0] == update:
            self._prepared = None
            self._workers.discard()
