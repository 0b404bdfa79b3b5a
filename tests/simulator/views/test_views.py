"""Schedules of views with lost and reordered messages, and planted bugs that break their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pytest

from coordinator.messages import View, ViewChange, ViewCurrent
from coordinator.views import ViewCopy, ViewLog, ViewNews
from tests.simulator.views.world import Broken, World

SCHEDULES = 40
NIGHTLY_SCHEDULES = 3000


def test_every_watcher_has_the_view_of_its_number_and_ends_with_the_newest() -> None:
    assert sum(World(seed).run() for seed in range(SCHEDULES)) > SCHEDULES * 20


@pytest.mark.nightly
def test_many_schedules_of_views() -> None:
    for seed in range(SCHEDULES, NIGHTLY_SCHEDULES):
        World(seed).run()


class IgnoresGaps(ViewCopy):
    def _take_change(self, change: ViewChange) -> ViewNews | None:
        self._number = change.number - 1
        return super()._take_change(change)


class TakesOldWholes(ViewCopy):
    def _take_whole(self, view: View) -> ViewNews | None:
        self._number = 0
        return super()._take_whole(view)


class NeverLooksAtTheNewestNumber(ViewCopy):
    """A lost last change stays lost until the next one."""

    def take(self, message: View | ViewChange | ViewCurrent) -> ViewNews | None:
        return None if isinstance(message, ViewCurrent) else super().take(message)


class IgnoresTheSeries(ViewCopy):
    def _take_change(self, change: ViewChange) -> ViewNews | None:
        return super()._take_change(msgspec.structs.replace(change, series=self._series))


class AddsBeforeItRemoves(ViewCopy):
    def _take_change(self, change: ViewChange) -> ViewNews | None:
        news = super()._take_change(change)
        for name in change.left if news is not None else ():
            self._remove(name)
        return news


class ForgetsWhoCameBack(ViewLog):
    """An instance that came back at once is not sent as a new one."""

    def remove(self, instance: str) -> None:
        self._touched.discard(instance)
        self._is_dirty = True


class CountsUnsentViews(ViewLog):
    def current(self) -> ViewCurrent:
        return ViewCurrent(self._series, self._number + 1)


class ForgetsLoads(ViewLog):
    """Sends those of changed members only."""

    def change(self, *arguments: object) -> ViewChange | None:  # type: ignore[override]
        change = super().change(*arguments)  # type: ignore[arg-type]
        return None if change is None else msgspec.structs.replace(change, loads=[])


def run_all(
    seeds: Iterable[int], make_log: Callable[[str], ViewLog], make_copy: Callable[[], ViewCopy]
) -> None:
    for seed in seeds:
        World(seed, make_log, make_copy).run()


@pytest.mark.parametrize(
    ("make_log", "make_copy"),
    [
        (ViewLog, IgnoresGaps),
        (ViewLog, TakesOldWholes),
        (ViewLog, NeverLooksAtTheNewestNumber),
        (ViewLog, IgnoresTheSeries),
        (ViewLog, AddsBeforeItRemoves),
        (ForgetsWhoCameBack, ViewCopy),
        (CountsUnsentViews, ViewCopy),
        (ForgetsLoads, ViewCopy),
    ],
    ids=lambda planted: planted.__name__,
)
def test_planted_bugs_are_found(
    make_log: Callable[[str], ViewLog], make_copy: Callable[[], ViewCopy]
) -> None:
    with pytest.raises((Broken, KeyError)):
        run_all(range(5 * SCHEDULES), make_log, make_copy)
