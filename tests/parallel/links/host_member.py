"""One member of a group, as a process: forms it, then waits for its end.

    python -m tests.parallel.links.host_member RANK SIZE OWN_ADDRESS MEETING_PORT MEETING_ADDRESS

Rank 0 keeps the meeting place. Each prints a line when the group has formed, and one when a link has ended, with
the seconds from a line on its standard input until then; or the error of forming.
"""

from __future__ import annotations

import selectors
import sys
import time

from parallel.links.connecting import connect
from parallel.links.errors import CollectiveError
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting import MeetingClient, MeetingHost
from tests.parallel.links.forming import KEY

FORMING_SECONDS = 30.0


def main(rank: int, size: int, own: str, port: int, address: str) -> None:
    meeting = (
        MeetingHost(own, port, KEY)
        if rank == 0
        else MeetingClient(address, port, KEY, FORMING_SECONDS, may_be_early=True)
    )
    began = time.monotonic()
    try:
        forming = FormingGroup(meeting, rank, size, timeout=3.0, forming_timeout=FORMING_SECONDS)
        group = connect(forming, host=own, name="epoch/1/all/t", key=KEY)
    except CollectiveError as error:
        print(f"error after {time.monotonic() - began:.1f}: {error}", flush=True)
        time.sleep(2.0)  # others look for news at the meeting place, if it is here
        return
    print("formed", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    (data,), control = group.data[1 - rank], group.control[1 - rank]
    data.send(b"under way")  # what is never acknowledged
    selector = selectors.DefaultSelector()
    names = {data: "data", control: "control"}
    for link in names:
        selector.register(link, selectors.EVENT_READ)
    while names:
        for key, _ in selector.select():
            link = key.fileobj
            try:
                ended = "" if link.recv(100) else "closed"
            except OSError as error:
                ended = str(error.strerror)
            if ended:
                print(f"{names.pop(link)} after {time.monotonic() - began:.1f}: {ended}", flush=True)
                selector.unregister(link)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
