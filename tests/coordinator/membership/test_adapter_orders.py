"""Adapters of the mesh: served once all instances have them, or refused without a trace."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from coordinator.member_state import MemberState
from coordinator.membership import adapter_orders
from coordinator.membership.operations import ACCEPTED, DONE, NOT_FOUND
from coordinator.messages import (
    AdapterList,
    AdapterSource,
    Exited,
    Load,
    LoadAdapter,
    Lora,
    OperatorAnswer,
    State,
    UnloadAdapter,
    Watch,
)
from engine.adapters.following import AdapterFollowing, DropAdapters, ReadAdapter
from tests.coordinator.membership.test_registry import SETTINGS, register, to
from tests.coordinator.membership.test_standing_orders import Mesh
from tests.nightly import NIGHTLY

FIRST = AdapterSource("first", "/first", "digest of /first")


class AdaptedMesh(Mesh):
    """Instances that read the adapters of their orders from directories."""

    def __init__(self, size: int, chance: random.Random | None = None, most: int = 8) -> None:
        self.lora = Lora((FIRST,), 2, 16, max_cpu_loras=most)
        self.following: dict[str, AdapterFollowing] = {}
        self.directories = {"/first": FIRST.digest, "/a": "digest a", "/b": "digest b"}
        self.in_use: dict[str, set[str]] = {}
        self.chance = chance
        self._under_way: dict[str, AdapterSource] = {}
        super().__init__(size)

    def join(self) -> MemberState:
        number = self._num_started
        settings = msgspec.structs.replace(SETTINGS, lora=self.lora)
        member = MemberState(register(f"m{number}", number, settings=settings))
        self._num_started += 1
        self.members.append(member)
        self.following[f"m{number}"] = AdapterFollowing([FIRST])
        self.talk(member)
        member.state, member.address = State.READY, f"tcp://m{number}:1"
        self.talk(member)
        return member

    def talk(self, member: MemberState, *, follows: bool = True) -> None:
        for _ in range(5):
            if follows:
                self.follow(member)
            for message in member.outgoing(Load()):
                for answer in self.send(member.register.instance, message):
                    member.take(answer)

    def follow(self, member: MemberState) -> None:
        """One turn of an instance's loop."""
        name, orders = member.register.instance, member.orders
        mine = self.following[name]
        if mine.reading and (self.chance is None or self.chance.random() < 0.2):
            self.finish(name)
        match mine.next(orders, self.in_use.get(name, ())):
            case ReadAdapter(key, source):
                mine.begun(key)
                self._under_way[name] = source
                if self.chance is None:
                    self.finish(name)
            case DropAdapters(digests):
                mine.dropped(digests)
        member.adapters = mine.report(orders)
        if mine.is_in_effect(orders):
            member.in_effect = max(member.in_effect, orders.revision)

    def finish(self, name: str) -> None:
        """What was being read is in memory, or cannot be served."""
        mine, source = self.following[name], self._under_way[name]
        digest = self.directories.get(source.path, "")
        if not digest:
            mine.failed(f"No adapter found for {source.path}")
        elif source.digest not in ("", digest):
            mine.failed("it has changed")
        else:
            mine.read(msgspec.structs.replace(source, digest=digest))

    def command(self, wish: LoadAdapter | UnloadAdapter) -> OperatorAnswer:
        done = self.registry.handle(b"o", wish, self.now)
        for member in self.members:
            for message in to(member.register.instance.encode(), done):
                member.take(message)
        (answer,) = to(b"o", done)
        assert isinstance(answer, OperatorAnswer)
        return answer

    def load(self, name: str, path: str, command: str, *, in_place: bool = False) -> OperatorAnswer:
        return self.command(LoadAdapter(command=command, name=name, path=path, in_place=in_place))

    def carry_out(self, wish: LoadAdapter | UnloadAdapter) -> OperatorAnswer:
        """The last answer to a command that is repeated while instances follow."""
        for _ in range(8):
            answer = self.command(wish)
            if answer.status != ACCEPTED:
                break
            self.talk_all()
        return answer

    @property
    def listed(self) -> AdapterList:
        return self.registry.view().orders.adapters

    def holds(self, member: MemberState) -> set[str]:
        return set(self.following[member.register.instance].names)


def test_an_adapter_is_served_once_all_have_it() -> None:
    mesh = AdaptedMesh(2)
    assert mesh.load("a", "/a", "1").status == ACCEPTED
    mesh.talk(mesh.members[0])
    assert not mesh.listed.number
    assert "instance 1" in mesh.load("a", "/a", "1").text
    mesh.talk(mesh.members[1])
    assert [each.name for each in mesh.listed.adapters] == ["first", "a"]
    mesh.talk_all()
    assert mesh.load("a", "/a", "1").status == DONE
    assert all(mesh.holds(member) == {FIRST.digest, "digest a"} for member in mesh.members)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda mesh: mesh.directories.pop("/a"), "No adapter found for /a"),
        (lambda mesh: mesh.directories.update({"/a": "digest c"}), "different files in /a"),
    ],
)
def test_a_load_that_one_instance_cannot_follow_leaves_nothing(
    spoil: Callable[[AdaptedMesh], object], why: str
) -> None:
    mesh = AdaptedMesh(2)
    mesh.load("a", "/a", "1")
    mesh.talk(mesh.members[0])
    assert "digest a" in mesh.holds(mesh.members[0])
    spoil(mesh)
    mesh.talk_all()
    answer = mesh.load("a", "/a", "1")
    assert (answer.status, why in answer.text) == (400, True), answer
    mesh.talk_all()
    assert not mesh.listed.number
    assert mesh.registry.view().orders.adapter_load is None
    assert all(mesh.holds(member) == {FIRST.digest} for member in mesh.members)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("m", "conflicts with a served base model"),
        ("first", "already been loaded"),
        (" ", "must be provided"),
    ],
)
def test_names_that_are_taken_are_refused_at_once(name: str, why: str) -> None:
    mesh = AdaptedMesh(1)
    revision = mesh.registry.view().orders.revision
    answer = mesh.load(name, "/a", "1")
    assert (answer.status, why in answer.text) == (400, True)
    assert mesh.registry.view().orders.revision == revision


def test_as_many_adapters_as_memory_is_meant_for() -> None:
    mesh = AdaptedMesh(1, most=2)
    assert mesh.carry_out(LoadAdapter(command="1", name="a", path="/a")).status == DONE
    answer = mesh.load("b", "/b", "2")
    assert (answer.status, "--max-cpu-loras is 2" in answer.text) == (400, True)


def test_a_replaced_adapter_stays_in_memory_while_requests_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = AdaptedMesh(2)
    wish = LoadAdapter(command="1", name="first", path="/a", in_place=True)
    assert mesh.carry_out(wish).status == DONE
    assert [each.digest for each in mesh.listed.adapters] == ["digest a"]
    assert [each.digest for each in mesh.listed.retired] == [FIRST.digest]
    for _ in range(4):
        mesh.now += adapter_orders.KEPT_FOR / 2 + 1
        mesh.registry.handle(b"w", Watch("w", adapters=(FIRST.digest,)), mesh.now)
        mesh.talk_all()
    assert all(mesh.holds(member) == {FIRST.digest, "digest a"} for member in mesh.members)
    mesh.now += adapter_orders.KEPT_FOR + 1
    mesh.talk_all()
    mesh.talk_all()
    assert mesh.listed.retired == ()
    assert all(mesh.holds(member) == {"digest a"} for member in mesh.members)


def test_an_instance_drops_nothing_that_its_requests_have() -> None:
    mesh = AdaptedMesh(1)
    mesh.in_use["m0"] = {FIRST.digest}
    assert mesh.carry_out(UnloadAdapter(command="1", name="first")).status == DONE
    mesh.now += adapter_orders.KEPT_FOR + 1
    mesh.talk_all()
    mesh.talk_all()
    assert mesh.listed.retired == ()
    assert mesh.holds(mesh.members[0]) == {FIRST.digest}
    mesh.in_use["m0"] = set()
    mesh.talk_all()
    assert mesh.holds(mesh.members[0]) == set()


def test_a_joiner_is_ready_when_it_has_all_adapters() -> None:
    mesh = AdaptedMesh(1)
    assert mesh.carry_out(LoadAdapter(command="1", name="a", path="/a")).status == DONE
    joiner = mesh.join()
    assert mesh.holds(joiner) == {FIRST.digest, "digest a"}
    late = AdaptedMesh(1)
    late.carry_out(LoadAdapter(command="1", name="a", path="/a"))
    late.follow = lambda member: None  # type: ignore[method-assign]
    assert late.shown(late.join()) is State.LOADED


def test_unloading_what_is_not_there_is_a_404() -> None:
    mesh = AdaptedMesh(1)
    answer = mesh.command(UnloadAdapter(command="1", name="b"))
    assert (answer.status, answer.text) == (NOT_FOUND, "The lora adapter 'b' cannot be found.")


def test_the_list_and_a_load_under_way_outlive_the_coordinator() -> None:
    mesh = AdaptedMesh(2)
    mesh.carry_out(LoadAdapter(command="1", name="a", path="/a"))
    mesh.load("b", "/b", "2")
    mesh.restart()
    mesh.talk_all()
    mesh.talk_all()
    assert {each.name for each in mesh.listed.adapters} == {"first", "a", "b"}
    assert mesh.load("a", "/a", "1").status == DONE
    assert mesh.load("b", "/b", "2").status == DONE
    mesh.restart()
    mesh.talk_all()
    assert mesh.load("b", "/b", "2").status == DONE


@pytest.mark.parametrize("seed", range(10_000 if NIGHTLY else 40))
def test_random_commands_deaths_joins_and_restarts(seed: int) -> None:
    """Ready instances have all adapters that are served, and in the end no others."""
    chance = random.Random(seed)
    mesh = AdaptedMesh(2, chance)
    wishes: list[LoadAdapter | UnloadAdapter] = []
    for turn in range(40):
        match chance.randrange(8):
            case 0:
                name, path = (
                    chance.choice(["first", "x", "y"]),
                    chance.choice(["/a", "/b", "/none", "/first"]),
                )
                wishes.append(
                    LoadAdapter(command=f"{turn}", name=name, path=path, in_place=chance.random() < 0.7)
                )
            case 1:
                wishes.append(UnloadAdapter(command=f"{turn}", name=chance.choice(["first", "x", "y"])))
            case 2 if len(mesh.members) > 1:
                gone = mesh.members.pop(chance.randrange(len(mesh.members)))
                mesh.registry.handle(b"l", Exited(gone.register.instance, "died"), mesh.now)
            case 3 if len(mesh.members) < 4:
                mesh.join()
            case 4:
                mesh.restart()
            case 5:
                mesh.now += 20.0
        for member in chance.sample(mesh.members, chance.randint(1, len(mesh.members))):
            mesh.talk(member, follows=chance.random() < 0.8)
        if wishes:
            mesh.command(chance.choice(wishes))
        served = {each.digest for each in mesh.listed.adapters}
        names = [each.name for each in mesh.listed.adapters]
        assert len(set(names)) == len(names)
        view = mesh.registry.view()
        ready = {each.instance for each in view.members if each.state is State.READY}
        for member in mesh.members:
            if view.orders.adapters.number and member.register.instance in ready:
                assert served <= mesh.holds(member), member
    mesh.chance = None
    for _ in range(4):
        for wish in wishes:
            mesh.command(wish)
            mesh.talk_all()
        mesh.now += adapter_orders.KEPT_FOR + 1
        mesh.talk_all()
    assert mesh.registry.view().orders.adapter_load is None
    assert all(mesh.command(wish).status != ACCEPTED for wish in wishes[-5:])
    mesh.talk_all()
    mesh.now += adapter_orders.KEPT_FOR + 1
    for _ in range(3):
        mesh.talk_all()
    listed = mesh.listed.adapters if mesh.listed.number else (FIRST,)
    for member in mesh.members:
        assert mesh.holds(member) == {each.digest for each in listed}
