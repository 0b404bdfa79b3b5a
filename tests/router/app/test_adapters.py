"""Endpoints of adapters: where they are, their answers, and files that come as tensors."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.messages import AdapterList, AdapterSource, LoadAdapter, Lora, OperatorAnswer, UnloadAdapter
from engine.adapters.adapter_settings import CONFIG, WEIGHTS
from router.app.adapters import ADAPTER_PATHS, UNLISTED_FOR, loads_adapters
from router.app.admin import AdminGate, make_admin_app
from router.app.app import make_app
from router.app.middleware import KeyCheck
from router.app.refusals import Refusals
from router.config import HttpConfig
from router.faults import Faults
from tests.coordinator.membership.test_registry import SETTINGS
from tests.router.app.test_admin import ADMIN, ENDPOINT, World, ask, bearer
from tests.router.dispatch.test_mesh_parts import view
from tests.router.fake_mesh import FakeMesh, saying

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TENSORS = b"\x02\0\0\0\0\0\0\0{}"


class Adapted(World):
    """A mesh that follows commands about adapters, except of some names."""

    def __init__(self, folder: Path) -> None:
        settings = msgspec.structs.replace(SETTINGS, lora=Lora((), 2, 16, allowed_path=str(folder)))
        super().__init__(msgspec.structs.replace(view(), settings=settings, mesh="m"))

    async def command(self, wish: Any) -> OperatorAnswer:
        assert isinstance(wish, LoadAdapter | UnloadAdapter)
        self.wishes.append(wish)
        status = {"bad": 400, "gone": 404, "late": 503}.get(wish.name, 200)
        assert self.view is not None
        before = self.view.orders.adapters
        adapters = tuple(each for each in before.adapters if each.name != wish.name)
        if isinstance(wish, LoadAdapter):
            adapters += (AdapterSource(wish.name, wish.path, "digest"),)
        if status == 200:
            found = AdapterList(before.number + 1, adapters, (), (*before.commands, wish.command))
            orders = msgspec.structs.replace(self.view.orders, adapters=found)
            self.view = msgspec.structs.replace(self.view, orders=orders)
        return OperatorAnswer(command=wish.command, status=status, text="because of this")


def gate(world: World, *keys: str, is_open: bool = False, api_key: str | None = None) -> AdminGate:
    http = HttpConfig(api_key=(api_key,) if api_key else ())
    admin = make_admin_app(world, lambda: Faults.merged([Faults()]), world.command)
    opened = KeyCheck(admin, http.api_key, Refusals()) if api_key else admin
    endpoint = make_app(FakeMesh(None, saying([])), http)
    return AdminGate(endpoint, admin, port=9000, keys=keys, adapters=opened if is_open else None)


def load(name: str, path: str = "/adapters/one", **more: Any) -> dict[str, Any]:
    return {"json": {"lora_name": name, "lora_path": path} | more}


def test_vllms_answers(tmp_path: Path) -> None:
    world = Adapted(tmp_path)
    app = gate(world, is_open=True)
    answer = ask(app, "POST", ENDPOINT + LOAD, **load("one", load_inplace=True))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'one' added successfully.")
    (wish,) = world.wishes
    assert isinstance(wish, LoadAdapter)
    assert (wish.name, wish.path, wish.in_place) == ("one", "/adapters/one", True)
    answer = ask(app, "POST", ENDPOINT + UNLOAD, json={"lora_name": "one", "lora_int_id": 3})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'one' removed successfully.")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "text"),
    [
        (LOAD, {"lora_name": "x"}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be"),
        (LOAD, load("bad")["json"], 400, "InvalidUserInput", "because of this"),
        (LOAD, load("one", "some/repo")["json"], 404, "NotFoundError", "No adapter found for some/repo"),
        (LOAD, load("late")["json"], 503, "ServiceUnavailableError", "because of this"),
        (UNLOAD, {}, 400, "InvalidUserInput", "'lora_name' needs to be provided"),
        (UNLOAD, {"lora_name": "gone"}, 404, "NotFoundError", "because of this"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], status: int, kind: str, text: str
) -> None:
    answer = ask(gate(Adapted(tmp_path), is_open=True), "POST", ENDPOINT + path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], text in error["message"]) == (status, kind, True)


def test_who_may_change_adapters(tmp_path: Path) -> None:
    world = Adapted(tmp_path)

    def status(app: AdminGate, place: str, key: str = "") -> int:
        return ask(app, "POST", place + LOAD, headers=bearer(key) if key else {}, **load("one")).status_code

    assert status(gate(world), ENDPOINT) == 404
    assert status(gate(world), ADMIN) == 200
    assert status(gate(world, is_open=True), ENDPOINT) == 200
    limited = gate(world, is_open=True, api_key="k")
    assert [status(limited, ENDPOINT), status(limited, ENDPOINT, "k")] == [401, 200]
    admin = gate(world, "a", is_open=True, api_key="k")
    assert [status(admin, ENDPOINT, key) for key in ("", "k", "a")] == [401, 401, 200]
    assert not world.model


@pytest.mark.parametrize(
    ("variables", "loads"),
    [({}, False), ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}, False),
     ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}, True), ({"LOCKSTEP_ALLOW_RUNTIME_LORA_UPDATING": "1"}, True)],
)  # fmt: skip
def test_the_switch_is_vllms(variables: dict[str, str], loads: bool) -> None:
    assert loads_adapters(variables) is loads
    assert "/load_lora_adapter" in ADAPTER_PATHS


def test_sglangs_answers_have_what_is_loaded(tmp_path: Path) -> None:
    world = Adapted(tmp_path)
    app = gate(world, is_open=True)
    answer = ask(app, "POST", f"{ENDPOINT}/load_lora_adapter", **load("one"))
    expected = {"success": True, "error_message": "", "loaded_adapters": {"one": "/adapters/one"}}
    assert (answer.status_code, answer.json()) == (200, expected)
    answer = ask(app, "POST", f"{ENDPOINT}/skyrl/v1/load_lora_adapter", **load("one"))
    assert answer.json() == {"lora_name": "one", "status": "ok"}
    assert world.wishes[-1].in_place
    answer = ask(app, "POST", f"{ENDPOINT}/load_lora_adapter", **load("bad"))
    expected |= {"success": False, "error_message": "because of this"}
    assert (answer.status_code, answer.json()) == (400, expected)
    answer = ask(app, "POST", f"{ENDPOINT}/unload_lora_adapter", json={"lora_name": "one"})
    assert answer.json()["loaded_adapters"] == {}


def test_tensors_become_files_that_are_removed_when_nobody_has_them(tmp_path: Path) -> None:
    world = Adapted(tmp_path)
    app = gate(world, is_open=True)

    def send(name: str, tensors: bytes = TENSORS, **more: Any) -> Any:
        body = {"lora_name": name, "config_dict": {"r": 4}} | more
        body["serialized_tensors"] = base64.b64encode(tensors).decode()
        return ask(app, "POST", f"{ENDPOINT}/load_lora_adapter_from_tensors", json=body)

    places = send("one").json()["loaded_adapters"]
    place = Path(places["one"])
    assert place.is_relative_to(tmp_path)
    assert (place / WEIGHTS).read_bytes() == TENSORS
    assert (place / CONFIG).read_bytes() == b'{"r":4}'
    assert send("two").json()["loaded_adapters"] == {"one": str(place), "two": str(place)}
    other = Path(send("two", TENSORS + b" ").json()["loaded_adapters"]["two"])
    for each in (place, other):
        os.utime(each, (1.0, 1.0))
    assert UNLISTED_FOR > 1
    ask(app, "POST", f"{ENDPOINT}/unload_lora_adapter", json={"lora_name": "two"})
    assert send("three", TENSORS + b"  ").status_code == 200
    assert (place.exists(), other.exists()) == (True, False)
    assert not list(place.parent.glob("new-*"))
    for wrong in (send("x", b"\x80\x04pickle"), send("x", load_format="flattened_bucket")):
        assert wrong.status_code == 400
