"""Numerics classes: what decides one, and how instances of several are admitted and shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.member_state import MemberState
from coordinator.membership.admission import other_class
from coordinator.membership.records import Instruction, Note, Rules
from coordinator.membership.registry import Registry
from coordinator.messages import (
    AdmissionRefused,
    AdmissionWait,
    Beat,
    Heartbeat,
    Load,
    Register,
    State,
    Unknown,
    Welcome,
    ranks_by_class,
)
from coordinator.numerics import Arithmetic, Facts, Numerics, class_of, combined, slowest_kind
from tests.coordinator.membership.group_mesh import Mesh
from tests.coordinator.membership.test_registry import Follower, heartbeat, joined, register, to

AMX = Arithmetic("amx", "1", "native", (0, 4))
AVX2 = msgspec.structs.replace(AMX, kernels="avx2")
TORCH = Arithmetic("torch", "AVX512", "TORCH_SDPA", (0, 4))


def facts(*workers: Arithmetic, **fields: Any) -> Facts:
    given = {"model": "abc", "weights": "plain", "dtype": "bfloat16", "tensor_parallel_size": 1}
    versions = {"torch": "2.13.0"}
    return Facts(**{**given, "versions": versions, **fields, "workers": workers or (AMX,)})


def named(kernels: str) -> Numerics:
    return class_of(facts(msgspec.structs.replace(AMX, kernels=kernels)))


def notes(instructions: list[Instruction]) -> list[str]:
    return [item.text for item in instructions if isinstance(item, Note)]


# ---- the class


def test_a_class_is_named_by_a_fingerprint_that_only_the_facts_decide() -> None:
    first, again = class_of(facts()), class_of(facts())
    assert first == again
    assert first.fingerprint.startswith("fp_")
    assert len(first.fingerprint) == len("fp_") + 12
    assert (first.kernels, first.dtype, first.invariant) == ("amx", "bfloat16", True)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "def"},
        {"weights": "dummy"},
        {"dtype": "float32"},
        {"tensor_parallel_size": 2},
        {"versions": {"torch": "2.14.0"}},
    ],
)
def test_each_fact_makes_another_class(changed: dict[str, Any]) -> None:
    assert class_of(facts(**changed)).fingerprint != class_of(facts()).fingerprint


@pytest.mark.parametrize(
    "changed", [{"kernels": "avx2"}, {"version": "2"}, {"attention": "other"}, {"weights": "0a"}]
)
def test_each_part_of_a_workers_arithmetic_makes_another_class(changed: dict[str, str]) -> None:
    other = msgspec.structs.replace(AMX, **changed)
    assert class_of(facts(other)).fingerprint != class_of(facts()).fingerprint


def test_stages_and_ranks_that_compute_alike_do_not_count() -> None:
    first, second = (msgspec.structs.replace(AMX, layers=layers) for layers in ((0, 2), (2, 4)))
    assert class_of(facts(first, second)) == class_of(facts())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_count_only_where_sums_depend_on_their_number(ranks: int) -> None:
    """Also whole experts on ranks, and stages that compute differently."""
    fixed = msgspec.structs.replace(AMX, any_ranks=True)
    cut = {"tensor_parallel_size": ranks, "has_whole_experts": True}
    stages = fixed, msgspec.structs.replace(fixed, kernels="avx2", layers=(4, 8))
    for alone in ((fixed,), stages):
        several = [stage for stage in alone for _ in range(ranks)]
        assert class_of(facts(*several, **cut)) == class_of(facts(*alone))
    assert class_of(facts(*[AMX] * ranks, **cut)) != class_of(facts())
    assert class_of(facts(*[AMX] * ranks, tensor_parallel_size=ranks)) != class_of(facts())


def test_workers_that_compute_differently_make_a_class_of_their_own() -> None:
    first, second = (
        msgspec.structs.replace(AMX, layers=(0, 2)),
        msgspec.structs.replace(AVX2, layers=(2, 4)),
    )
    mixed = class_of(facts(first, second))
    assert (mixed.kernels, mixed.invariant) == ("amx+avx2", True)
    other = class_of(facts(msgspec.structs.replace(AMX, layers=(0, 3)), second))
    assert mixed.fingerprint != other.fingerprint, "a layer is computed by other kernels there"
    assert mixed.fingerprint not in (class_of(facts(AMX)).fingerprint, class_of(facts(AVX2)).fingerprint)


@pytest.mark.parametrize("workers", [(TORCH,), (AMX, TORCH), (msgspec.structs.replace(AMX, kernels="new"),)])
def test_a_class_is_invariant_only_where_native_kernels_compute_all_of_it(
    workers: tuple[Arithmetic, ...],
) -> None:
    found = class_of(facts(*workers))
    assert not found.invariant
    assert found.fingerprint.endswith("_variant")


def test_workers_that_name_no_kernels_promise_nothing() -> None:
    found = class_of(msgspec.structs.replace(facts(), workers=()))
    assert (found.kernels, found.invariant) == ("unknown", False)


def test_a_group_of_several_classes_is_of_none_of_them() -> None:
    amx, avx2 = named("amx"), named("avx2")
    assert combined([amx, amx]) == amx
    assert combined([loaded("0a"), loaded("0a", "avx2")]).weights == "0a"
    both = combined([amx, avx2])
    assert both == combined([avx2, amx, avx2])
    assert (both.kernels, both.invariant) == ("amx+avx2", False)
    assert both.fingerprint not in (amx.fingerprint, avx2.fingerprint)


def test_the_slowest_kind_is_what_all_can_use() -> None:
    assert slowest_kind([named("amx"), named("avx512")]) == "avx512"
    assert slowest_kind([named("avx2"), named("amx")]) == "avx2"
    assert slowest_kind([named("amx"), class_of(facts(TORCH))]) is None


# ---- admission


def test_what_is_said_of_another_class_names_both_and_a_way_out() -> None:
    amx, avx2 = named("amx"), named("avx2")
    assert other_class(amx, []) is None
    assert other_class(amx, [avx2, amx]) is None
    text = other_class(avx2, [amx]) or ""
    assert avx2.fingerprint in text
    assert amx.fingerprint in text
    assert "--numerics avx2" in text
    assert "versions" in (other_class(class_of(facts(versions={})), [amx]) or "")
    assert "--numerics" in (other_class(class_of(facts(TORCH)), [amx]) or "")
    assert "no numerics class" in (other_class(None, [amx]) or "")


def beat(instance: str, numerics: Numerics | None, state: State = State.READY) -> Heartbeat:
    return msgspec.structs.replace(heartbeat(instance, state), numerics=numerics)


def mesh(*, required: bool) -> Registry:
    """A ready instance of the AMX class, and one that loads."""
    registry = Registry(Rules(size=2, require_same_numerics=required))
    joined(registry, "a", 0)
    joined(registry, "b", 1)
    assert to(b"a", registry.handle(b"a", beat("a", named("amx"), State.LOADING), 1.0)) == [Beat(0, 2)]
    registry.handle(b"a", beat("a", named("amx")), 1.1)
    return registry


def loaded(weights: str, kernels: str = "amx") -> Numerics:
    """The class of an instance that has read weights of this digest."""
    return class_of(facts(msgspec.structs.replace(AMX, kernels=kernels, weights=weights)))


@pytest.mark.parametrize("kernels", ["amx", "avx2"])
@pytest.mark.parametrize("state", [State.LOADING, State.READY])
def test_other_weights_are_refused_whatever_is_required(state: State, kernels: str) -> None:
    registry = Registry(Rules(size=2))
    joined(registry, "a", 0)
    joined(registry, "b", 1)
    registry.handle(b"a", beat("a", loaded("0a")), 1.0)
    (refused,) = to(b"b", registry.handle(b"b", beat("b", loaded("0b", kernels), state), 1.2))
    assert isinstance(refused, AdmissionRefused)
    assert "the weights of this instance (digest 0b) are not those of the mesh (digest 0a)" in refused.reason
    assert [member.instance for member in registry.view().members] == ["a"]


def test_other_weights_are_refused_also_when_all_others_are_gone() -> None:
    """Streams of the dead would go on with them."""
    registry = Registry(Rules(size=2))
    joined(registry, "a", 0)
    registry.handle(b"a", beat("a", loaded("0a")), 1.0)
    registry.tick(1000.0)
    assert not registry.view().members
    joined(registry, "b", 0)
    (refused,) = to(b"b", registry.handle(b"b", beat("b", loaded("0b")), 1000.1))
    assert isinstance(refused, AdmissionRefused)
    joined(registry, "c", 0)
    registry.handle(b"c", beat("c", loaded("0a", "avx2")), 1000.2)
    assert [member.instance for member in registry.view().members] == ["c"], "other kernels may join"


def test_a_coordinator_that_was_started_again_learns_the_weights_from_the_first_to_come_back() -> None:
    registry = Registry(Rules(size=2))
    registry.handle(b"a", register("a", 0, numerics=loaded("0a"), epoch=3), 1.0)
    (refused,) = to(b"b", registry.handle(b"b", register("b", 1, numerics=loaded("0b"), epoch=3), 1.1))
    assert isinstance(refused, AdmissionRefused)
    assert "are not those of the mesh" in refused.reason


def test_random_weights_have_no_digest_and_join() -> None:
    registry = mesh(required=False)
    registry.handle(b"b", beat("b", named("avx2")), 1.2)
    assert len(registry.view().members) == 2


def test_another_class_joins_and_is_logged_once() -> None:
    registry = mesh(required=False)
    said = [
        *notes(registry.handle(b"b", beat("b", named("avx2"), State.LOADING), 1.2)),
        *notes(registry.handle(b"b", beat("b", named("avx2")), 1.3)),
        *notes(registry.handle(b"b", beat("b", named("avx2")), 1.4)),
    ]
    of_class = [line for line in said if named("avx2").fingerprint in line]
    assert len(of_class) == 1
    assert "instance 1" in of_class[0]
    members = registry.view().members
    assert [member.numerics for member in members] == [named("amx"), named("avx2")]
    assert ranks_by_class(members) == {named("amx"): [0], named("avx2"): [1]}


def test_the_same_class_is_no_news() -> None:
    registry = mesh(required=True)
    said = notes(registry.handle(b"b", beat("b", named("amx")), 1.2))
    assert said == ["instance 1 is ready; epoch 2"]
    assert len(registry.view().members) == 2


@pytest.mark.parametrize("state", [State.LOADING, State.READY])
def test_another_class_is_refused_where_one_is_required(state: State) -> None:
    registry = mesh(required=True)
    (refused,) = to(b"b", registry.handle(b"b", beat("b", named("avx2"), state), 1.2))
    assert isinstance(refused, AdmissionRefused)
    assert named("avx2").fingerprint in refused.reason
    assert "--numerics avx2" in refused.reason
    assert [member.instance for member in registry.view().members] == ["a"]
    assert to(b"b", registry.handle(b"b", beat("b", named("avx2"), state), 1.3)) == [Unknown()]


def test_an_older_instance_without_a_class_is_refused_where_one_is_required() -> None:
    registry = mesh(required=True)
    assert to(b"b", registry.handle(b"b", beat("b", None, State.LOADING), 1.2)) == [Beat(1, 2)]
    (refused,) = to(b"b", registry.handle(b"b", beat("b", None), 1.3))
    assert isinstance(refused, AdmissionRefused)
    assert "install the same version" in refused.reason


def test_who_registers_again_with_another_class_is_refused_at_once() -> None:
    registry = mesh(required=True)
    back = register("c", numerics=named("avx2"), epoch=3)
    (refused,) = to(b"c", registry.handle(b"c", back, 1.2))
    assert isinstance(refused, AdmissionRefused)
    tolerant = mesh(required=False)
    assert any(named("avx2").fingerprint in line for line in notes(tolerant.handle(b"c", back, 1.2)))
    assert tolerant.view().members[2].numerics == named("avx2"), "before its first heartbeat"


@pytest.mark.parametrize("returns", [False, True])
def test_none_is_refused_for_the_class_of_an_instance_that_is_dead(returns: bool) -> None:
    """All were killed, and start again with other kernels before their silence is noticed."""
    registry = mesh(required=True)
    late = 1.1 + registry._rules.member_timeout - 1.0
    registry.handle(b"b", beat("b", None, State.LOADING), late - 0.2)
    assert to(b"b", registry.handle(b"b", beat("b", named("avx2"), State.LOADED), late)) == [Unknown()]
    again = register("b", 1, numerics=named("avx2"), epoch=1)
    (waits,) = to(b"b", registry.handle(b"b", again, late + 0.1))
    assert isinstance(waits, AdmissionWait)
    assert named("amx").fingerprint in waits.reason
    if returns:
        registry.handle(b"a", beat("a", named("amx")), late + 1.2)
    registry.tick(late + 1.2)
    (answer,) = to(b"b", registry.handle(b"b", again, late + 1.3))
    assert isinstance(answer, AdmissionRefused if returns else Welcome)


def test_watchers_hear_of_a_class_as_soon_as_it_is_known() -> None:
    registry = mesh(required=False)
    follower = Follower(registry, b"w", 1.2)
    view = follower.sees(1.3, registry.handle(b"b", beat("b", named("amx"), State.LOADING), 1.3))
    assert view is not None
    assert view.members[1].numerics == named("amx")


def test_an_instance_repeats_its_class_to_a_coordinator_that_forgot_it() -> None:
    own = MemberState(register("a", 0))
    assert own.outgoing(Load()) == [register("a", 0)]
    registry = Registry(Rules(size=1))
    (welcome,) = to(b"a", registry.handle(b"a", own.register, 0.0))
    own.take(welcome)
    own.numerics = named("amx")
    (sent,) = own.outgoing(Load())
    assert isinstance(sent, Heartbeat)
    assert sent.numerics == named("amx")
    own.take(Unknown())
    (sent_again,) = own.outgoing(Load())
    assert isinstance(sent_again, Register)
    assert sent_again.numerics == named("amx")


def test_instances_that_compute_each_others_experts_are_shown_one_class() -> None:
    mesh = Mesh()
    for name, kind in zip("abc", ("amx", "amx", "avx2"), strict=True):
        mesh.register(name)
        mesh.says(name, state=State.LOADING, numerics=named(kind))
    shown = [member.numerics for member in mesh.registry.view().members]
    assert shown == [named("amx"), named("amx"), named("avx2")], "they compute nothing yet"
    for name in "abc":
        mesh.says(name, state=State.LOADED)
    mesh.all_enter("abc")
    shown = [member.numerics for member in mesh.registry.view().members]
    assert shown == [combined([named("amx"), named("avx2")])] * 3


def test_an_instance_of_another_class_never_gets_into_a_group_where_one_is_required() -> None:
    mesh = Mesh(size=2, require_same_numerics=True)
    for name, kind in zip("ab", ("amx", "avx2"), strict=True):
        mesh.register(name)
        mesh.says(name, state=State.LOADED, numerics=named(kind))
    assert isinstance(mesh.sent["b"][-1], AdmissionRefused)
    assert "b" not in [peer.instance for form in mesh.forms.values() for peer in form.peers]
