"""Files and feed of the dashboard: access to them, what they cost, their end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
import uvicorn
import uvloop
from starlette.requests import Request

from coordinator.messages import Load, Member, State, View
from coordinator.numerics import Numerics
from engine.messages import Counters, InstanceReport, LockstepCounters
from router.app.app import make_app
from router.app.dashboard.feed import MAX_VIEWERS, Feed
from router.app.dashboard.frame import frame_of
from router.app.dashboard.page import FEED_PATH, STATIC, Dashboard, files
from router.app.dashboard.wire import MAX_FAULTS, MAX_INSTANCES, MAX_REQUESTS, Frame
from router.config import HttpConfig
from router.dispatch.ledger import Flight
from router.dispatch.pool import InstanceHealth
from router.errors import ApiError
from router.faults import FaultEvent, Faults
from router.mesh import ServedModel
from tests.coordinator.membership.test_registry import SETTINGS
from tests.router.fake_mesh import FakeMesh, saying
from tests.waiting import until

COUNTERS = Counters(prompt_tokens=10, generation_tokens=20, steps=3)
STEPS = LockstepCounters(5, 1, 2, 0.1, 0.2, 0.3, 0.4, 0.5, 30, 20.0, {0: 7, 1: 9}, rest_seconds=0.6)


NUMERICS = Numerics("fp_123456789abc", "amx", "bfloat16", True)


def member(rank: int) -> Member:
    load = Load(running=1, blocks_total=100)
    return Member(
        instance=f"i{rank}",
        rank=rank,
        state=State.READY,
        phase="serving",
        address="tcp://x",
        host="h",
        pid=7,
        load=load,
        numerics=NUMERICS,
        odd=rank,
    )


class Watched:
    """A mesh to look at."""

    def __init__(self, size: int) -> None:
        self.view: View | None = View(
            epoch=4,
            size=size,
            settings=SETTINGS,
            members=[member(rank) for rank in range(size)],
            waiting_for="",
        )
        self.coordinator_silent_for: float | None = 0.1
        self.num_in_flight = 1000

    def reports(self) -> dict[int, InstanceReport]:
        return {
            0: InstanceReport(1, 2, 0, 5, 10, 100, COUNTERS, STEPS),
            1: InstanceReport(1, 0, 0, 0, 0, 100, COUNTERS),
        }

    def instance_health(self) -> dict[int, InstanceHealth]:
        return {0: InstanceHealth(attached=True, failures=0, in_flight=2)}

    def flights(self, most: int) -> list[Flight]:
        return [Flight(f"r{number}", 0, 3, 4, 1, 0.5) for number in range(min(most, self.num_in_flight))]


@contextlib.contextmanager
def dashboard_served(served: ServedModel, **config: Any) -> Iterator[tuple[httpx2.Client, Dashboard]]:
    """The endpoint with a page, on a free port."""
    http = HttpConfig(**config)
    dashboard = Dashboard(Watched(2), Faults, lambda: 1001)
    app = make_app(FakeMesh(served, saying([])), http, dashboard=dashboard if http.dashboard else None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, loop="none", lifespan="off", log_config=None))

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            yield client, dashboard
    finally:
        dashboard.feed.close()
        server.should_exit = True
        thread.join()


def test_its_files_are_open_and_the_feed_wants_the_key(served: ServedModel) -> None:
    with dashboard_served(served, api_key=("secret",)) as (client, dashboard):
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert client.get("/", headers={"if-none-match": page.headers["etag"]}).status_code == 304
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(named) >= 5
        for path in named:
            assert client.get(f"/{path}").status_code == 200, path
        assert client.get("/dashboard/nothing.js").status_code in (401, 404)
        assert client.get("/dashboard/../app.py").status_code in (401, 404)
        assert client.get("/dashboard/feed").status_code == 401
        other = {"authorization": "Bearer secret", "sec-fetch-site": "cross-site"}
        assert client.get("/dashboard/feed", headers=other).status_code == 403
        assert repr(dashboard.feed) == "<Feed 0 viewers, 0 frames>"  # nobody has looked yet
        with client.stream("GET", "/dashboard/feed", headers={"authorization": "Bearer secret"}) as stream:
            data = next(line for line in stream.iter_lines() if line.startswith("data:"))
            frame = msgspec.json.decode(data[5:], type=Frame)
            assert (frame.epoch, frame.num_requests, len(frame.instances)) == (4, 1001, 2)
        until(lambda: " 0 viewers" in repr(dashboard.feed))


def test_a_place_is_taken_before_the_stream_begins() -> None:
    """Viewers that come at the same time are counted, too."""

    async def come(dashboard: Dashboard, count: int) -> list[int]:
        feed = next(route for route in dashboard.routes() if route.path == FEED_PATH)
        scope = {"type": "http", "method": "GET", "path": FEED_PATH, "headers": []}
        statuses = []
        for _ in range(count):
            try:
                statuses.append((await feed.endpoint(Request(scope))).status_code)
            except ApiError as error:
                statuses.append(error.status)
        return statuses

    dashboard = Dashboard(Watched(2), Faults, lambda: 0)
    assert asyncio.run(come(dashboard, MAX_VIEWERS + 2)) == [200] * MAX_VIEWERS + [503] * 2


def test_who_asks_for_the_head_of_the_feed_only_gets_it(served: ServedModel) -> None:
    with dashboard_served(served) as (client, dashboard):
        for _ in range(MAX_VIEWERS + 1):
            answer = client.head("/dashboard/feed")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-accel-buffering"] == "no"
        assert repr(dashboard.feed) == "<Feed 0 viewers, 0 frames>"
        with client.stream("GET", "/dashboard/feed") as stream:
            lines = stream.iter_lines()  # which ends the connection when it is no longer held
            assert next(lines).startswith("data:")
            assert " 1 viewers" in repr(dashboard.feed)
        until(lambda: " 0 viewers" in repr(dashboard.feed))


def test_paths_that_are_almost_those_of_files(served: ServedModel) -> None:
    with dashboard_served(served) as (client, _):
        for path in ("/%0A", "/dashboard/main.js%0A", "/dashboard/main.js//"):
            assert client.get(path).status_code == 404


def test_it_can_be_turned_off(served: ServedModel) -> None:
    with dashboard_served(served, dashboard=False) as (client, _):
        for path in ("/", "/dashboard/main.js", "/dashboard/feed"):
            assert client.get(path).status_code == 404


def test_it_asks_nobody_else() -> None:
    """No file of ours names another host; every import is relative."""
    for file in STATIC.glob("*.*"):
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), file
    assert (STATIC / "uplot" / "LICENSE").is_file()
    assert "/dashboard/uplot/uPlot.iife.min.js" in files()


def test_frames_are_bounded() -> None:
    faults = Faults()
    for number in range(100):
        faults.record(FaultEvent.RESUME, "connection_lost", "x" * 1000, float(number), 2)
    frame = frame_of(Watched(5000), faults, 1000, 0, 5.0)
    assert frame.num_instances == 5000
    assert len(frame.instances) == MAX_INSTANCES
    assert len(frame.requests) == MAX_REQUESTS
    assert len(frame.faults) == MAX_FAULTS
    assert frame.faults[-1].at == 99.0
    assert frame.resumes == 200
    assert frame.max_num_seqs == SETTINGS.max_num_seqs
    assert len(msgspec.json.encode(frame)) < 200_000
    assert frame.instances[0].told is not None
    assert frame.instances[0].told.lockstep is not None
    assert frame.instances[0].told.lockstep.tokens_per_expert == {0: 7, 1: 9}
    assert frame.instances[0].numerics == NUMERICS
    assert [each.odd for each in frame.instances[:3]] == [0, 1, 2]
    nothing = Watched(0)
    nothing.view = None
    silent = frame_of(nothing, Faults(), 0, 0, 5.0)
    assert (silent.waiting_for, silent.max_num_seqs) == ("the coordinator", None)


def test_one_computation_for_all_and_none_for_nobody() -> None:
    made = 0

    def make() -> bytes:
        nonlocal made
        made += 1
        return b"%d" % made

    async def scenario() -> None:
        feed = Feed(make, interval=0.02, max_viewers=8)
        for _ in range(8):
            feed.enter()
        with pytest.raises(ApiError, match="look at the page already"):
            feed.enter()
        viewers = [feed.frames() for _ in range(8)]
        firsts = [await anext(viewer) for viewer in viewers]
        assert set(firsts) <= {b"1", b"2"}
        for _ in range(5):
            await anext(viewers[0])
        assert repr(feed) == f"<Feed 8 viewers, {made} frames>"
        assert made < 16  # not 8 times as many
        before = made
        await asyncio.sleep(0.1)  # while nobody reads, frames are dropped, not kept
        assert int(await anext(viewers[1])) >= before
        for viewer in viewers:
            await viewer.aclose()
            feed.leave()
        assert " 0 viewers" in repr(feed)
        after = made
        await asyncio.sleep(0.1)
        assert made == after
        feed.enter()
        again = feed.frames()
        assert int(await anext(again)) == after + 1
        feed.close()
        assert [frame async for frame in again] == []

    asyncio.run(scenario())
