"""Groups whose members are threads, connected over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from parallel.links.connecting import connect
from parallel.links.errors import CollectiveError
from parallel.links.forming_group import FormingGroup
from parallel.links.keys import LinkKey
from parallel.links.meeting_contract import Meeting, Prefixed
from parallel.links.sockets import GroupSockets

KEY, OTHER_KEY = LinkKey.derive(b"one"), LinkKey.derive(b"another")
HOST = "127.0.0.1"
PATIENCE = 20.0


@dataclass(frozen=True)
class Settings:
    """One member's arguments of :func:`parallel.links.connecting.connect`."""

    host: str = HOST
    name: str = "epoch/1/all/t"
    key: LinkKey | None = KEY
    timeout: float = PATIENCE
    forming_timeout: float | None = None
    streams: int = 1
    size: int | None = None
    should_stop: Callable[[], bool] | None = None


def form(
    meeting: Meeting, count: int, *settings: Settings, first: int = 0, part: str = ""
) -> list[GroupSockets | CollectiveError]:
    """Sockets, or errors, of so many members from rank ``first`` on.

    The last of the settings counts for those that have none of their own.
    """
    place = Prefixed(meeting, part) if part else meeting

    def run(member: int) -> GroupSockets | CollectiveError:
        own = settings[min(member, len(settings) - 1)]
        try:
            forming = FormingGroup(
                place,
                first + member,
                own.size or count,
                timeout=own.timeout,
                forming_timeout=own.forming_timeout,
                should_stop=own.should_stop,
            )
            return connect(forming, host=own.host, name=own.name, key=own.key, streams=own.streams)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def formed(meeting: Meeting, count: int, *settings: Settings) -> list[GroupSockets]:
    """The same where nothing may go wrong."""
    found = form(meeting, count, *settings)
    errors = [each for each in found if isinstance(each, CollectiveError)]
    assert not errors, errors
    return [each for each in found if isinstance(each, GroupSockets)]
