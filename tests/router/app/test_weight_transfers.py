"""Calls by which trainers hand over weights in parts, as vLLM and SGLang have them."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save, save_file

from coordinator.messages import InFlight, OperatorAnswer, OperatorCommand, StandingOrders, UpdateWeights
from coordinator.messages import WeightVersion as Version
from engine.trainer_group.wire import Announced
from engine.weight_versions.assembled import homes_of
from router.app import ordered
from router.app.admin import AdminGate, make_admin_app
from router.app.app import make_app
from router.app.trainer_group import GroupInfo
from router.config import HttpConfig
from router.errors import ApiError
from router.faults import Faults
from router.mesh import ServedModel
from tests.router.app.test_admin import ADMIN, ENDPOINT, World, ask
from tests.router.dispatch.test_mesh_parts import member, view
from tests.router.fake_mesh import FakeMesh, saying

SEGMENT = f"lockstep-test-{os.getpid()}"


class UpdatedWorld(World):
    """A mesh that goes over to each version that is ordered."""

    answer: tuple[int, str] | None = None
    number = 1
    """Number of a version whose trainer gives none."""

    async def command(self, wish: OperatorCommand) -> OperatorAnswer:
        self.wishes.append(wish)
        if self.answer is not None:
            status, text = self.answer
            return OperatorAnswer(command=wish.command, status=status, text=text)
        assert isinstance(wish, UpdateWeights)
        number = self.number if wish.number is None else wish.number
        version = Version(number, wish.label or str(number), wish.source, "d1", wish.command)
        assert self.view is not None
        self.view = msgspec.structs.replace(self.view, orders=StandingOrders(weights=version))
        return OperatorAnswer(command=wish.command, status=200, text="in use")


class Trainer:
    """A trainer beside a mesh whose model has the tensors a and b."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.room = directory, directory / "room"
        (directory / "model").mkdir()
        save_file(tensors(1, "a", "b"), directory / "model" / "model.safetensors")
        self.world = UpdatedWorld(view(member("a", 0)))
        self.world.answer = None
        self.world.model = ServedModel(("m",), str(directory / "model"), 10, 10)
        admin = make_admin_app(self.world, Faults, self.world.command, weights_room=self.room)
        self.app = AdminGate(make_app(FakeMesh(None, saying([])), HttpConfig()), admin, port=9000, keys=())

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        answer = ask(self.app, "POST", f"{ADMIN}{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        return ask(self.app, "GET", f"{ADMIN}{path}").json()

    def part(self, name: str, scale: float, *names: str) -> str:
        path = self.directory / name
        save_file(tensors(scale, *names), path)
        return str(path)

    def transfer(self, *infos: dict[str, Any], status: int = 200, **finish: Any) -> Any:
        self.post("/start_weight_update", {})
        for info in infos:
            self.post("/update_weights", {"update_info": info})
        return self.post("/finish_weight_update", finish, status)

    @property
    def wish(self) -> UpdateWeights:
        wish = self.world.wishes[-1]
        assert isinstance(wish, UpdateWeights)
        return wish

    def first(self, name: str) -> float:
        return float(self.post("/get_weights_by_name", {"name": name, "truncate_size": 1})[0])


def tensors(scale: float, *names: str) -> dict[str, torch.Tensor]:
    return {name: scale * torch.arange(1.0, 7.0).reshape(2, 3) for name in names}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "ASK_INTERVAL", 0.0)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_parts_make_the_next_version(trainer: Trainer) -> None:
    assert trainer.get("/weight_info") == {"weight_version": "default", "number": 0, "digest": "abc"}
    assert trainer.first("a") == 1
    trainer.post("/init_weight_transfer_engine", {"init_info": {}})
    answer = trainer.transfer(
        {"path": trainer.part("p.safetensors", 2, "a")},
        {"path": trainer.part("q.safetensors", 3, "b")},
        weight_version="step 1",
    )
    assert answer == {"message": "Weight update finished"}
    assert (trainer.wish.label, trainer.wish.number, trainer.wish.in_flight) == ("step 1", 1, InFlight.KEEP)
    assert trainer.get("/weight_info") == {"weight_version": "step 1", "number": 1, "digest": "d1"}
    assert (trainer.first("a"), trainer.first("b")) == (2, 3)
    trainer.transfer({"path": trainer.part("r.safetensors", 4, "b")}, in_flight="recompute")
    assert (trainer.first("a"), trainer.first("b")) == (2, 4)
    assert (trainer.wish.number, trainer.wish.in_flight) == (2, InFlight.RECOMPUTE)
    assert [each.name for each in trainer.room.iterdir()] == [trainer.wish.command]


def test_a_whole_directory_and_a_segment(trainer: Trainer, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    save_file(tensors(5, "a", "b"), new / "model.safetensors")
    trainer.transfer({"path": str(new)})
    assert trainer.wish.source == str(new)
    segment = Path("/dev/shm") / SEGMENT
    try:
        save_file(tensors(6, "a"), segment)
        trainer.transfer({"shared_memory": SEGMENT})
        assert (trainer.first("a"), trainer.first("b")) == (6, 5)
        homes = homes_of(Path(trainer.wish.source))
        assert homes["a"][0].resolve() == segment
    finally:
        segment.unlink(missing_ok=True)


def test_transfers_that_are_refused(trainer: Trainer) -> None:
    path = {"path": trainer.part("p.safetensors", 2, "a")}
    trainer.post("/update_weights", {"update_info": path}, status=409)
    trainer.post("/finish_weight_update", {}, status=409)
    trainer.post("/start_weight_update", {})
    assert "under way" in trainer.post("/start_weight_update", {}, status=409)["error"]["message"]
    for bad in ({}, {"path": "relative"}, {"shared_memory": "../x"}, {"path": "/a", "shared_memory": "b"}):
        trainer.post("/update_weights", {"update_info": bad}, status=400)
    trainer.post("/finish_weight_update", {}, status=400)
    trainer.post("/update_weights", {}, status=400)
    assert not trainer.world.wishes

    cut = Path(trainer.part("cut.safetensors", 3, "a"))
    cut.write_bytes(cut.read_bytes()[:-1])
    answer = trainer.transfer({"path": str(cut)}, status=400)
    assert "promises" in answer["error"]["message"]
    assert not trainer.world.wishes
    assert trainer.first("a") == 1


def test_a_trainer_that_died_leaves_nothing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"path": trainer.part("p.safetensors", 2, "a")}
    trainer.post("/start_weight_update", {})
    trainer.post("/update_weights", {"update_info": path})
    trainer.post("/init_weight_transfer_engine", {"init_info": {}})
    trainer.transfer({"path": trainer.part("q.safetensors", 3, "b")})
    assert (trainer.first("a"), trainer.first("b")) == (1, 3)
    trainer.post("/start_weight_update", {})
    monkeypatch.setattr("router.app.transfer_session.SESSION_TIMEOUT", 0.0)
    trainer.post("/start_weight_update", {})
    trainer.post("/shutdown_weight_transfer_engine")
    trainer.post("/finish_weight_update", {}, status=409)


@pytest.mark.parametrize(("given", "status"), [(500, 400), (409, 409), (503, 503)])
def test_what_the_mesh_refuses_leaves_no_files(trainer: Trainer, given: int, status: int) -> None:
    trainer.world.answer = (given, "instance 1: another shape")
    answer = trainer.transfer({"path": trainer.part("p.safetensors", 2, "a")}, status=status)
    assert answer["error"]["message"] == "instance 1: another shape"
    if given != 503:
        assert not list(trainer.room.iterdir())
    trainer.world.answer = None
    trainer.transfer({"path": trainer.part("q.safetensors", 3, "b")})
    assert (trainer.first("a"), trainer.first("b")) == (1, 3)


def test_tensors_in_a_body(trainer: Trainer) -> None:
    body = {
        "serialized_named_tensors": [base64.b64encode(save(tensors(7, "b"))).decode()],
        "load_format": "safetensors",
        "weight_version": "seven",
    }
    answer = trainer.post("/update_weights_from_tensor", body)
    assert (answer["success"], trainer.wish.label, trainer.first("b")) == (True, "seven", 7)
    pickled = trainer.post("/update_weights_from_tensor", body | {"load_format": None}, status=400)
    assert "pickled" in pickled["error"]["message"]
    trainer.post("/update_weights_from_tensor", body | {"serialized_named_tensors": ["!"]}, status=400)
    trainer.post("/update_weights_from_tensor", body | {"serialized_named_tensors": []}, status=400)
    trainer.world.answer = (500, "no")
    assert trainer.post("/update_weights_from_tensor", body, status=400)["success"] is False


def test_checks_of_the_weights_in_use(trainer: Trainer) -> None:
    checksums = trainer.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert checksums == {"weights": "abc"}
    same = {"action": "compare", "baseline": checksums}
    assert trainer.post("/weight_checker", same) == {"match": True, "mismatches": []}
    trainer.transfer({"path": trainer.part("p.safetensors", 2, "a")})
    assert trainer.post("/weights_checker", same) == {"match": False, "mismatches": ["weights"]}
    trainer.post("/weight_checker", {"action": "reset"}, status=400)
    trainer.post("/get_weights_by_name", {"name": "none"}, status=400)


def test_the_weights_in_use_have_another_label(trainer: Trainer) -> None:
    trainer.transfer({"path": trainer.part("p.safetensors", 2, "a")}, weight_version="one")
    source = trainer.wish.source
    trainer.world.number = 2
    answer = trainer.post("/update_weight_version", {"new_version": "uno"})
    assert (answer["success"], answer["new_version"]) == (True, "uno")
    assert (trainer.wish.source, trainer.wish.number, trainer.wish.in_flight) == (source, None, InFlight.KEEP)
    assert trainer.get("/weight_info")["weight_version"] == "uno"
    assert trainer.first("a") == 2
    trainer.post("/update_weight_version", {"new_version": ""}, status=400)


def test_they_are_for_trainers_alone(trainer: Trainer) -> None:
    for path in ("/start_weight_update", "/weight_info", "/update_weights_from_tensor"):
        assert ask(trainer.app, "POST", f"{ENDPOINT}{path}").status_code == 404


def call(method: str, **arguments: Any) -> dict[str, Any]:
    return {"method": method, "kwargs": arguments} if arguments else {"method": method}


def test_an_update_as_skyrl_makes_it(trainer: Trainer) -> None:
    path = trainer.part("p.safetensors", 2, "a")
    done = {"results": [None]}
    start = call("skyrl_start_weight_update", is_checkpoint_format=True)
    assert trainer.post("/collective_rpc", start) == done
    update = call("update_weights_ipc", update_info={"path": path})
    assert trainer.post("/collective_rpc", update) == done
    assert trainer.post("/collective_rpc", call("skyrl_finish_weight_update")) == done
    assert trainer.first("a") == 2


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (call("load_model"), "no method"),
        (call("__class__"), "no method"),
        (call("skyrl_start_weight_update", is_checkpoint_format="yes"), "by name"),
        (call("skyrl_start_weight_update", is_checkpoint_format=False), "names"),
        (call("update_weights_ipc"), "by name"),
        (call("update_weights_ipc", update_info={"ipc_handles_pickled": "gASV"}), "ipc_handles_pickled"),
        (call("update_weights_nccl", update_info={"path": 3}), "update_info"),
        (call("update_weights_nccl", update_info={"path": "/a"}, more=1), "by name"),
        ({"method": "skyrl_finish_weight_update", "args": [1]}, "by name"),
    ],
)
def test_calls_of_workers_are_few(trainer: Trainer, body: dict[str, Any], word: str) -> None:
    answer = trainer.post("/collective_rpc", body, status=400)
    assert word in answer["error"]["message"]
    assert not trainer.world.wishes


class ScriptedMember:
    """A member of a group whose trainer sends twos, unless it has died."""

    def __init__(self) -> None:
        self.joined: list[GroupInfo] = []
        self.is_joined = False
        self.dies = False

    async def join(self, info: GroupInfo) -> None:
        self.joined.append(info)
        self.is_joined = True

    async def receive(self, tensors: tuple[Announced, ...], path: Path) -> None:
        if self.dies:
            await self.leave()
            raise ApiError(400, "the trainer's tensors have not come: connection closed")
        save_file({each.name: torch.full(each.shape, 2.0) for each in tensors}, path)

    async def leave(self) -> None:
        self.is_joined = False


GROUP = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
SENT = {"names": ["b"], "dtype_names": ["float32"], "shapes": [[2, 3]]}


@pytest.fixture
def member_of_group(monkeypatch: pytest.MonkeyPatch) -> ScriptedMember:
    made = ScriptedMember()
    monkeypatch.setattr("router.app.weight_transfers.GroupMember", lambda: made)
    return made


def test_tensors_of_a_trainers_group(member_of_group: ScriptedMember, trainer: Trainer) -> None:
    trainer.post("/init_weight_transfer_engine", {"init_info": GROUP | {"packed": True}})
    (info,) = member_of_group.joined
    assert (info.master_port, info.world_size, info.packed, info.backend) == (29500, 3, True, "gloo")
    trainer.transfer(SENT)
    assert (trainer.first("a"), trainer.first("b")) == (1, 2)
    trainer.transfer({"path": trainer.part("p.safetensors", 3, "b")})
    assert [each.name for each in trainer.room.iterdir()] == [trainer.wish.command], "what came is gone"
    trainer.post("/shutdown_weight_transfer_engine")
    assert not member_of_group.is_joined


def test_tensors_of_a_group_as_sglangs_trainers_send_them(
    member_of_group: ScriptedMember, trainer: Trainer
) -> None:
    trainer.post("/init_weights_update_group", GROUP | {"group_name": "slime-pp_0", "backend": "nccl"})
    assert member_of_group.joined[0].group_name == "slime-pp_0"
    sent = {"names": ["a"], "dtypes": ["torch.float32"], "shapes": [[2, 3]], "weight_version": "7"}
    assert trainer.post("/update_weights_from_distributed", sent)["success"]
    assert (trainer.first("a"), trainer.wish.label) == (2, "7")
    trainer.post("/destroy_weights_update_group", {"group_name": "slime-pp_0"})
    assert not member_of_group.is_joined


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (SENT | {"shapes": [[3, 2]]}, "[3, 2]"),
        (SENT | {"dtype_names": ["bfloat16"]}, "BF16"),
        (SENT | {"names": ["c"]}, "no tensor"),
        (SENT | {"dtype_names": ["object"]}, "not known"),
        (SENT | {"shapes": []}, "one length"),
        (SENT | {"path": "/a"}, "or a path"),
    ],
)
def test_tensors_of_a_group_that_do_not_fit(
    member_of_group: ScriptedMember, trainer: Trainer, sent: dict[str, Any], word: str
) -> None:
    trainer.post("/init_weight_transfer_engine", {"init_info": GROUP})
    trainer.post("/start_weight_update", {})
    answer = trainer.post("/update_weights", {"update_info": sent}, status=400)
    assert word in answer["error"]["message"]
    assert not trainer.world.wishes


def test_a_trainer_that_dies_while_it_sends(member_of_group: ScriptedMember, trainer: Trainer) -> None:
    trainer.post("/init_weight_transfer_engine", {"init_info": GROUP})
    trainer.post("/update_weights", {"update_info": SENT}, status=409)
    member_of_group.dies = True
    trainer.post("/start_weight_update", {})
    answer = trainer.post("/update_weights", {"update_info": SENT}, status=400)
    assert "have not come" in answer["error"]["message"]
    trainer.post("/finish_weight_update", {}, status=409)
    assert not list(trainer.room.iterdir())
    member_of_group.dies = False
    trainer.post("/init_weight_transfer_engine", {"init_info": GROUP})
    trainer.transfer(SENT)
    assert trainer.first("b") == 2


@pytest.mark.parametrize(
    "info",
    [
        {"master_address": "a"},
        GROUP | {"world_size": 1},
        GROUP | {"rank_offset": 0},
        GROUP | {"master_port": 0},
        GROUP | {"backend": "mpi"},
        GROUP | {"backend": "nccl"},
        {"nccl_unique_id_b64": "AA=="},
    ],
)
def test_groups_that_are_not_possible(trainer: Trainer, info: dict[str, Any]) -> None:
    trainer.post("/init_weight_transfer_engine", {"init_info": info}, status=400)


def test_a_process_that_ends_is_a_reason(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app.trainer_group.sys.executable", "/bin/true")
    answer = trainer.post("/init_weight_transfer_engine", {"init_info": GROUP}, status=408)
    assert "the process that receives ended" in answer["error"]["message"]
