"""The admin API: access, answers, and the ends of commands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import msgspec
import pytest

from coordinator.messages import (
    Drain,
    InFlight,
    MemoryPart,
    OperatorAnswer,
    OperatorCommand,
    PauseMode,
    Rebalance,
    Role,
    Scale,
    SetPause,
    SetRole,
    SetSleep,
    StandingOrders,
    State,
    UpdateWeights,
    View,
    WakeUp,
)
from coordinator.numerics import Numerics
from coordinator.settings import flags
from engine.messages import Counters, EndRequests, FileCounters, InstanceReport
from router.app import admin, ordered
from router.app.admin import AdminGate, make_admin_app
from router.app.app import make_app
from router.config import HttpConfig, ServeConfig
from router.dispatch.ledger import Flight
from router.dispatch.pool import InstanceHealth
from router.faults import FaultEvent, Faults
from router.mesh import ServedModel
from tests.coordinator.membership.test_registry import SETTINGS
from tests.router.dispatch.test_mesh_parts import member, view
from tests.router.fake_mesh import FakeMesh, saying

ENDPOINT, ADMIN = "http://127.0.0.1:8000", "http://127.0.0.1:9000"


class World:
    """Knowledge of a mesh client, and a coordinator with scripted answers."""

    def __init__(self, view: View | None) -> None:
        self.view = view
        self.coordinator_silent_for: float | None = 0.25
        self.wishes: list[OperatorCommand] = []
        self.answer: tuple[int, str] | None = (202, "done")

    def instance_health(self) -> Mapping[int, InstanceHealth]:
        return {0: InstanceHealth(attached=True, failures=1, in_flight=3)}

    def reports(self) -> Mapping[int, InstanceReport]:
        report = InstanceReport(0, 0, 0, 0, 0, 10, Counters(), files=FileCounters(hung_seconds=4.5))
        return {0: report, 1: msgspec.structs.replace(report, files=None)}

    model: ServedModel | None = None

    def numerics(self) -> Mapping[Numerics, list[int]]:
        return {Numerics("fp", "native", "bfloat16", True, "abc"): [0, 1]}

    num_in_flight = 1200

    def flights(self, most: int) -> list[Flight]:
        return ([Flight("cmpl-x", rank, 5, 7, 2, 0.5) for rank in (1, None)] * 600)[:most]

    ended: tuple[list[str], bool] = ([], False)
    missing: Sequence[str] = ()
    """Instances that do not reset their caches."""

    async def reset_caches(self, timeout: float) -> list[str]:
        assert timeout > 1
        return list(self.missing)

    async def end_requests(
        self, request_ids: Sequence[str], timeout: float, *, everything: bool = False
    ) -> list[str]:
        self.ended = (list(request_ids), everything)
        return list(self.missing)

    async def command(self, wish: OperatorCommand) -> OperatorAnswer:
        self.wishes.append(wish)
        if self.answer is None:
            raise TimeoutError
        status, text = self.answer
        return OperatorAnswer(command=wish.command, status=status, text=text)


def gate(world: World, *keys: str, port: int | None = 9000, api_key: str | None = None) -> AdminGate:
    faults = Faults()
    faults.record(FaultEvent.RESTART, "engine", "Engine_1 is started again", 5.0)
    http = HttpConfig(api_key=(api_key,) if api_key else ())
    endpoint = make_app(FakeMesh(None, saying([])), http)
    admin = make_admin_app(world, lambda: Faults.merged([faults]), world.command, front_end=1)
    return AdminGate(endpoint, admin, port=port, keys=keys)


def ask(app: Any, method: str, url: str, **arguments: Any) -> httpx2.Response:
    async def send() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as client:
            return await client.request(method, url, **arguments)

    return asyncio.run(send())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_world() -> None:
    odd = msgspec.structs.replace(member("b", 1), odd=2, role=Role.DECODE)
    answer = ask(gate(World(view(member("a", 0), odd))), "GET", f"{ADMIN}/admin/world").json()
    assert (answer["epoch"], answer["size"], answer["front_end"]) == (1, 2, 1)
    assert answer["coordinator_silent_for"] == 0.25
    first, second = answer["instances"]
    assert (first["rank"], first["state"], first["load"]["running"]) == (0, "ready", 0)
    assert first["router"] == {"attached": True, "failures": 1, "in_flight": 3}
    assert second["router"] is None
    assert (first["kv_cache_dir_hung"], second["kv_cache_dir_hung"]) == (4.5, None)
    assert (first["odd"], second["odd"]) == (0, 2)
    assert (first["role"], second["role"]) == ("mixed", "decode")
    unknown = ask(gate(World(None)), "GET", f"{ADMIN}/admin/world")
    assert unknown.status_code == 503
    assert unknown.headers["retry-after"] == "1"


def test_the_requests() -> None:
    answer = ask(gate(World(None)), "GET", f"{ADMIN}/admin/requests").json()
    assert (answer["front_end"], answer["in_flight"], len(answer["requests"])) == (1, 1200, 1000)
    told = {"request_id": "cmpl-x", "prompt_tokens": 5, "output_tokens": 7, "attempts": 2, "age": 0.5}
    assert answer["requests"][:2] == [told | {"rank": rank} for rank in (1, None)]


def test_the_faults() -> None:
    assert ask(gate(World(None)), "GET", f"{ADMIN}/admin/faults").json() == {
        "detections": {},
        "restarts": {"engine": 1},
        "resumes": {},
        "recent": [
            {
                "at": 5.0,
                "event": "restart",
                "kind": "engine",
                "count": 1,
                "text": "Engine_1 is started again",
            }
        ],
    }


def test_commands_are_passed_on() -> None:
    world = World(None)
    done = ask(gate(world), "POST", f"{ADMIN}/admin/drain", json={"rank": 1, "timeout": 2.5, "force": True})
    assert (done.status_code, done.json()) == (202, {"accepted": True, "text": "done"})
    ask(gate(world), "POST", f"{ADMIN}/admin/scale", json={"n": 3})
    ask(gate(world), "POST", f"{ADMIN}/admin/role", json={"rank": 1, "role": "prefill"})
    drain, scale, role = world.wishes
    assert isinstance(role, SetRole)
    assert (role.rank, role.role) == (1, Role.PREFILL)
    assert isinstance(drain, Drain)
    assert (drain.rank, drain.timeout, drain.force) == (1, 2.5, True)
    assert isinstance(scale, Scale)
    assert (scale.size, scale.force) == (3, False)
    assert drain.command != scale.command


def test_a_wish_to_scale_in_the_form_of_vllm_needs_what_the_admin_api_needs() -> None:
    world = World(view(*(member(name, rank) for rank, name in enumerate("abc"))))
    url = ADMIN + "/scale_elastic_ep"
    done = ask(gate(world), "POST", url, json={"new_data_parallel_size": 3})
    assert (done.status_code, done.json()) == (200, {"message": "done"})
    (scale,) = world.wishes
    assert isinstance(scale, Scale)
    assert scale.size == 3
    for body in ({}, {"new_data_parallel_size": 0}, {"new_data_parallel_size": 2, "drain_timeout": 5}):
        assert ask(gate(world), "POST", url, json=body).status_code == 400
    assert ask(gate(world, "secret"), "POST", url, json={"new_data_parallel_size": 3}).status_code == 401
    assert len(world.wishes) == 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_wish_to_scale_in_the_form_of_vllm_is_answered_when_it_is_done_or_has_failed(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "LOOK_INTERVAL", 0.0)
    two = [member(name, rank) for rank, name in enumerate("ab")]
    third = msgspec.structs.replace(member("c", 2), state=State.LOADING)
    world = World(view(*two))
    now = iter([view(*two, third), view(*two, third), view(*two, member("c", 2))])

    async def answers(wish: OperatorCommand) -> OperatorAnswer:
        world.wishes.append(wish)
        if is_lost and len(world.wishes) == 3:
            return OperatorAnswer(
                command=wish.command, status=500, text="Engine_2 ended with status 3: it differs"
            )
        world.view = next(now)
        return OperatorAnswer(command=wish.command, status=202, text="starting instance 2")

    monkeypatch.setattr(world, "command", answers)
    done = ask(gate(world), "POST", ADMIN + "/scale_elastic_ep", json={"new_data_parallel_size": 3})
    assert len({wish.command for wish in world.wishes}) == 1, "the same command asks whether it can succeed"
    assert len(world.wishes) == 3
    if is_lost:
        assert (done.status_code, "Engine_2 ended with status 3: it differs" in done.text) == (500, True)
    else:
        assert (done.status_code, done.json()) == (200, {"message": "starting instance 2"})


def test_a_wish_to_scale_in_the_form_of_vllm_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(admin, "ELASTIC_TIMEOUT", 0.05)
    world = World(view(member("a", 0)))
    late = ask(gate(world), "POST", ADMIN + "/scale_elastic_ep", json={"new_data_parallel_size": 3})
    assert (late.status_code, "not done after 0.05 s" in late.text) == (408, True)


def test_a_wish_that_experts_move_needs_what_the_admin_api_needs() -> None:
    world = World(None)
    url = ADMIN + "/eplb/rebalance"
    for body in ({}, None):
        done = ask(gate(world), "POST", url, json=body)
        assert (done.status_code, done.json()) == (202, {"accepted": True, "text": "done"})
    assert all(isinstance(wish, Rebalance) for wish in world.wishes)
    assert ask(gate(world), "POST", url, json={"now": True}).status_code == 400
    assert ask(gate(world, "secret"), "POST", url, json={}).status_code == 401
    assert ask(gate(world), "POST", ENDPOINT + "/eplb/rebalance", json={}).status_code == 404
    world.answer = (409, "start the instances with --enable-eplb")
    refused = ask(gate(world), "POST", url, json={})
    assert (refused.status_code, "--enable-eplb" in refused.text) == (409, True)
    assert len(world.wishes) == 3


def test_a_wish_to_forget_prefixes_needs_what_the_admin_api_needs() -> None:
    world = World(None)
    url = ADMIN + "/reset_prefix_cache"
    done = ask(gate(world), "POST", url)
    assert (done.status_code, done.json()) == (200, {"success": True})
    world.missing = ["b", "a"]
    late = ask(gate(world), "POST", url)
    assert late.status_code == 503
    assert "a, b" in late.text
    assert ask(gate(world, "secret"), "POST", url).status_code == 401
    assert ask(gate(world), "POST", ENDPOINT + "/reset_prefix_cache").status_code == 404


@pytest.mark.parametrize("status", [404, 409, 503])
def test_what_is_in_the_way_is_told(status: int) -> None:
    world = World(None)
    world.answer = (status, "instance 0 is the last one")
    answer = ask(gate(world), "POST", f"{ADMIN}/admin/drain", json={"rank": 0})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "instance 0 is the last one"
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_coordinator_that_is_away() -> None:
    world = World(None)
    world.answer = None
    answer = ask(gate(world), "POST", f"{ADMIN}/admin/scale", json={"n": 2})
    assert answer.status_code == 503
    assert "it may have been done or begun" in answer.json()["error"]["message"], "serve answers late"


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("drain", {}, "rank"),
        ("drain", {"rank": -1}, "rank"),
        ("drain", {"rank": 0, "timeout": -1}, "timeout"),
        ("drain", {"rank": 0, "when": "now"}, "when"),
        ("drain", {"rank": 2**70}, "rank"),
        ("scale", {"n": 0}, "n"),
        ("scale", {"n": 2**70}, "n"),
        ("scale", {"n": "two"}, "n"),
        ("scale", [3], "object"),
    ],
)
def test_bad_bodies(path: str, body: object, word: str) -> None:
    world = World(None)
    answer = ask(gate(world), "POST", f"{ADMIN}/admin/{path}", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
    assert not world.wishes


def test_clients_of_the_endpoint_do_not_get_in() -> None:
    world = World(view(member("a", 0)))
    for app in (gate(world), gate(world, port=None)):
        answer = ask(app, "POST", f"{ENDPOINT}/admin/drain", json={"rank": 0})
        assert answer.status_code == 404
    assert not world.wishes


def test_the_admin_port_has_nothing_else() -> None:
    app = gate(World(None))
    assert ask(app, "GET", f"{ADMIN}/v1/models").status_code == 404
    assert ask(app, "GET", f"{ADMIN}/metrics").status_code == 200
    assert ask(app, "GET", f"{ADMIN}/admin/nothing").status_code == 404
    assert ask(app, "GET", f"{ADMIN}/admin/world/").status_code == 404
    assert ask(app, "GET", f"{ADMIN}/admin/drain").status_code == 405


def test_a_trainer_with_one_address_has_all_paths_on_the_admin_port() -> None:
    world = World(view(member("a", 0)))

    def served(*keys: str) -> AdminGate:
        http = HttpConfig(api_key=("client",))
        admin = make_admin_app(world, Faults, world.command)
        endpoint = make_app(FakeMesh(None, saying([])), http)
        return AdminGate(endpoint, admin, port=9000, keys=keys, serves_all=True)

    app, client = served(), bearer("client")
    assert ask(app, "GET", f"{ADMIN}/get_load").status_code == 401
    assert ask(app, "GET", f"{ADMIN}/get_load", headers=client).status_code == 200
    assert ask(app, "GET", f"{ADMIN}/admin/world").status_code == 200
    page = client | {"origin": "http://evil.example"}
    assert ask(app, "GET", f"{ADMIN}/get_load", headers=page).status_code == 403
    assert ask(app, "GET", f"{ENDPOINT}/admin/world", headers=client).status_code == 404
    assert ask(served("root"), "GET", f"{ADMIN}/get_load", headers=client).status_code == 404


def test_a_key_opens_it_on_both_ports_and_clients_keys_do_not() -> None:
    world = World(view(member("a", 0)))
    app = gate(world, "root", api_key="client")
    for url in (ENDPOINT, ADMIN):
        assert ask(app, "GET", f"{url}/admin/world").status_code == 401
        assert ask(app, "GET", f"{url}/admin/world", headers=bearer("client")).status_code == 401
        assert ask(app, "GET", f"{url}/admin/world", headers=bearer("root")).status_code == 200
    assert ask(app, "GET", f"{ENDPOINT}/v1/models", headers=bearer("root")).status_code == 401
    assert ask(gate(world, api_key="client"), "GET", f"{ADMIN}/admin/world").status_code == 200


def test_web_pages_need_the_key() -> None:
    world = World(view(member("a", 0)))
    origin = {"origin": "http://evil.example"}
    assert ask(gate(world), "GET", f"{ADMIN}/admin/world", headers=origin).status_code == 403
    form = ask(gate(world), "POST", f"{ADMIN}/admin/drain", data={"rank": "0"})
    assert form.status_code == 400
    assert not world.wishes
    app = gate(world, "root")
    assert ask(app, "GET", f"{ADMIN}/admin/world", headers={**origin, **bearer("root")}).status_code == 200


def test_sites_of_other_names_need_the_key() -> None:
    """DNS rebinding: a site may let its name mean 127.0.0.1 after its load."""
    world = World(view(member("a", 0)))
    for host, status in (("site.example:9000", 403), ("localhost:9000", 200), ("127.0.0.1", 200)):
        assert ask(gate(world), "GET", f"{ADMIN}/admin/world", headers={"host": host}).status_code == status
    drain = {"headers": {"host": "site.example"}, "json": {"rank": 0}}
    assert ask(gate(world), "POST", f"{ADMIN}/admin/drain", **drain).status_code == 403
    assert not world.wishes
    named = {"host": "site.example", **bearer("root")}
    assert ask(gate(world, "root"), "GET", f"{ADMIN}/admin/world", headers=named).status_code == 200


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--admin-port", "9000", "--admin-host", "0.0.0.0"], "give --admin-api-key"),
        (["--admin-port", "8000"], "--admin-port 8000 is --port, too"),
    ],
)
def test_settings_that_clash(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse(ServeConfig, argv, prog="serve", description="")
    assert problem in capsys.readouterr().err


def paused(world: World, mode: PauseMode | None) -> list[OperatorCommand]:
    """The commands so far, the last of which asks for this mode."""
    assert isinstance(world.wishes[-1], SetPause)
    assert world.wishes[-1].mode is mode
    return world.wishes


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "ASK_INTERVAL", 0.0)


@pytest.mark.usefixtures("quick")
def test_pauses_of_vllm_and_sglang() -> None:
    world = World(view(member("a", 0)))
    world.answer = (200, "all instances are paused")
    app = gate(world)
    for path, mode in (("", "abort"), ("?mode=keep", "keep"), ("?wait_for_inflight_requests=true", "wait")):
        answer = ask(app, "POST", f"{ADMIN}/pause{path}")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        paused(world, PauseMode(mode))
    assert ask(app, "POST", f"{ADMIN}/resume").json() == {"status": "resumed"}
    paused(world, None)
    for mode, meant in (("abort", "abort"), ("in_place", "keep"), ("retract", "keep")):
        answer = ask(app, "POST", f"{ADMIN}/pause_generation", json={"mode": mode})
        assert answer.json() == {"message": "Generation paused successfully.", "status": "ok"}
        paused(world, PauseMode(meant))
    answer = ask(app, "POST", f"{ADMIN}/continue_generation", json={})
    assert answer.json() == {"message": "Generation continued successfully.", "status": "ok"}
    paused(world, None)


def test_is_paused_is_what_the_coordinator_ordered() -> None:
    ordered = msgspec.structs.replace(view(member("a", 0)), orders=StandingOrders(pause=PauseMode.KEEP))
    assert ask(gate(World(ordered)), "GET", f"{ADMIN}/is_paused").json() == {"is_paused": True}
    assert ask(gate(World(view())), "GET", f"{ADMIN}/is_paused").json() == {"is_paused": False}
    assert ask(gate(World(None)), "GET", f"{ADMIN}/is_paused").status_code == 503


@pytest.mark.usefixtures("quick")
def test_a_pause_is_asked_for_until_it_is_in_effect() -> None:
    world = World(view(member("a", 0)))
    world.answer = (202, "not in effect yet: instance 0")

    async def command(wish: OperatorCommand) -> OperatorAnswer:
        if len(world.wishes) == 3:
            world.answer = (200, "done")
        if len(world.wishes) == 1:
            world.wishes.append(wish)
            raise TimeoutError
        return await World.command(world, wish)

    world.command = command  # type: ignore[method-assign]
    assert ask(gate(world), "POST", f"{ADMIN}/pause?mode=keep").status_code == 200
    assert len(world.wishes) == 4
    assert len({wish.command for wish in world.wishes}) == 1


def test_pauses_that_cannot_be() -> None:
    world = World(view(member("a", 0)))
    assert ask(gate(world), "POST", f"{ADMIN}/pause?mode=never").status_code == 400
    assert ask(gate(world), "POST", f"{ADMIN}/pause?clear_cache=perhaps").status_code == 400
    assert ask(gate(world), "POST", f"{ADMIN}/pause_generation", json={"mode": "keep"}).status_code == 400
    assert not world.wishes
    world.answer = (409, "a later command has taken its place")
    assert ask(gate(world), "POST", f"{ADMIN}/resume").status_code == 409
    assert ask(gate(world), "POST", f"{ENDPOINT}/pause").status_code == 404
    assert ask(gate(world, "secret"), "POST", f"{ENDPOINT}/pause").status_code == 401


def test_a_flushed_cache() -> None:
    world = World(None)
    for method in ("GET", "POST"):
        answer = ask(gate(world), method, f"{ADMIN}/flush_cache")
        assert (answer.status_code, answer.text) == (200, "Cache flushed.\n")
    world.missing = ["a"]
    assert ask(gate(world), "POST", f"{ADMIN}/flush_cache").status_code == 503


@pytest.mark.usefixtures("quick")
def test_weights_from_a_directory() -> None:
    world = World(view(member("a", 0)))
    world.answer = (200, "weights 1 (one) are in use on all instances")
    body = {"model_path": "/new", "weight_version": "one", "flush_cache": True, "abort_all_requests": False}
    url = f"{ADMIN}/update_weights_from_disk"
    answer = ask(gate(world), "POST", url, json=body)
    assert answer.json() == {"success": True, "message": world.answer[1], "num_paused_requests": 0}
    (wish,) = world.wishes
    assert isinstance(wish, UpdateWeights)
    assert (wish.source, wish.label, wish.in_flight) == ("/new", "one", InFlight.KEEP)
    ask(gate(world), "POST", url, json={"model_path": "/new", "abort_all_requests": True})
    ask(gate(world), "POST", url, json={"model_path": "/new", "in_flight": "recompute"})
    assert [each.in_flight for each in world.wishes[1:] if isinstance(each, UpdateWeights)] == [
        InFlight.ABORT,
        InFlight.RECOMPUTE,
    ]
    for status, expected in ((409, 409), (500, 400)):
        world.answer = (status, "not now")
        answer = ask(gate(world), "POST", url, json=body)
        assert (answer.status_code, answer.json()["success"]) == (expected, False)
        assert answer.json()["message"] == "not now"
    world.answer = (503, "no instance serves")
    assert ask(gate(world), "POST", url, json=body).status_code == 503
    assert ask(gate(world), "POST", url, json={"model_path": "new"}).status_code == 400
    assert ask(gate(world), "POST", url, json={}).status_code == 400


@pytest.mark.usefixtures("quick")
def test_sleep_of_vllm_and_sglang() -> None:
    world = World(view(member("a", 0)))
    world.answer = (200, "all instances are asleep")
    app, both = gate(world), (MemoryPart.WEIGHTS, MemoryPart.KV_CACHE)
    answer = ask(app, "POST", f"{ADMIN}/sleep?level=2&mode=wait")
    assert answer.json() == {"message": "all instances are asleep", "success": True}
    ask(app, "POST", f"{ADMIN}/sleep?tags=weights")
    ask(app, "POST", f"{ADMIN}/release_memory_occupation", json={"tags": ["kv_cache"]})
    ask(app, "POST", f"{ADMIN}/release_memory_occupation", json={"tags": None})
    asked = [(each.parts, each.level, each.mode) for each in world.wishes if isinstance(each, SetSleep)]
    assert asked == [
        (both, 2, PauseMode.WAIT),
        ((MemoryPart.WEIGHTS,), 1, PauseMode.ABORT),
        ((MemoryPart.KV_CACHE,), 1, PauseMode.KEEP),
        (both, 1, PauseMode.KEEP),
    ]
    world.wishes.clear()
    ask(app, "POST", f"{ADMIN}/wake_up")
    ask(app, "POST", f"{ADMIN}/wake_up?tags=weights&tags=kv_cache")
    ask(app, "POST", f"{ADMIN}/resume_memory_occupation", json={"tags": ["weights"]})
    woken = [each.parts for each in world.wishes if isinstance(each, WakeUp)]
    assert woken == [(), both, (MemoryPart.WEIGHTS,)]
    for path in (
        "/sleep?level=0",
        "/sleep?level=x",
        "/sleep?mode=never",
        "/sleep?tags=graphs",
        "/wake_up?tags=x",
    ):
        assert ask(app, "POST", f"{ADMIN}{path}").status_code == 400
    world.answer = (409, "instances with spread experts cannot sleep yet")
    assert ask(app, "POST", f"{ADMIN}/sleep").status_code == 409
    assert ask(app, "POST", f"{ENDPOINT}/sleep").status_code == 404


def test_requests_that_are_to_end() -> None:
    world = World(None)
    url = f"{ADMIN}/abort_request"
    assert ask(gate(world), "POST", url, json={"rid": "x"}).status_code == 200
    names, everything = world.ended
    assert (names[:3], everything) == (["x", "cmpl-x", "chatcmpl-x"], False)
    assert ask(gate(world), "POST", url, json={"rid": "", "abort_all": True}).status_code == 200
    assert world.ended == ([], True)
    assert ask(gate(world), "POST", url, json={}).status_code == 400
    world.missing = ["a"]
    assert ask(gate(world), "POST", url, json={"abort_all": True}).status_code == 503


def test_requests_that_are_to_end_as_vllm_asks() -> None:
    world = World(None)
    url = f"{ADMIN}/abort_requests"
    answer = ask(gate(world), "POST", url, json={"request_ids": ["x", "y"]})
    assert answer.json() == {"aborted": 2, "status": "aborted"}
    assert {"cmpl-x", "y", "chatcmpl-y"} < set(world.ended[0])
    assert ask(gate(world), "POST", url, json={}).json()["aborted"] == 0
    assert world.ended == ([], True)


def test_an_answer_is_named_with_all_its_samples() -> None:
    message = EndRequests(1, ("cmpl-x",))
    assert all(map(message.names, ("cmpl-x", "cmpl-x-0", "cmpl-x-12")))
    assert not any(map(message.names, ("cmpl-y", "cmpl-x-y", "cmpl-xx", "x", "cmpl-x-")))
    assert EndRequests(1, everything=True).names("anything")


def test_the_world_size() -> None:
    loading = msgspec.structs.replace(member("b", 1), state=State.LOADING)
    seen = view(member("a", 0), member("c", 2), loading)
    assert ask(gate(World(seen)), "GET", f"{ADMIN}/get_world_size").status_code == 503
    settings = msgspec.structs.replace(SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=3)
    world = World(msgspec.structs.replace(seen, settings=settings))
    assert ask(gate(world), "GET", f"{ADMIN}/get_world_size").json() == {"world_size": 12}
    one = ask(gate(world), "GET", f"{ADMIN}/get_world_size?include_dp=false").json()
    assert one == {"world_size": 6}
