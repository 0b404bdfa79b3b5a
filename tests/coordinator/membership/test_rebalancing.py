"""Groups that are formed so that the load of experts is balanced."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from coordinator.membership.rebalancing import MANY_FAILURES, QUIET
from coordinator.membership.records import Note, Publish, Send
from coordinator.messages import Balancing, ExpertLoads, GroupPlan, OperatorAnswer, Rebalance, State
from parallel.placement import assign_experts
from tests.coordinator.membership.group_mesh import Mesh

LAYERS = 2
COPY_BYTES = 1000
"""Memory of an expert in one layer."""
BALANCING = Balancing(window_size=10, windows=2)
SKEWED = (9000, 9000, 9000, 10, 10, 10, 10, 10)
"""Rows of the experts; the first three are on one instance at first."""
TWICE = Balancing(window_size=10, windows=2, num_redundant=8, survive=1)


def begun(balancing: Balancing = BALANCING, names: str = "abc", room: int = 0) -> Mesh:
    """A mesh in its first group, of members with layers of experts."""
    mesh = Mesh(size=len(names), balancing=balancing, room=room)
    for name in names:
        mesh.register(name)
    for name in names:
        mesh.says(name, state=State.LOADED, expert_layers=LAYERS, expert_bytes=LAYERS * COPY_BYTES)
    mesh.all_enter(names)
    mesh.wait(1.0, names)
    return mesh


def report(mesh: Mesh, names: str, number: int, rows: Sequence[int] = SKEWED) -> None:
    """Each member reports rows of the experts that it serves, in each layer."""
    for name in names:
        form = mesh.forms[name]
        place = [peer.instance for peer in form.peers].index(name)
        layers = []
        for layer in range(LAYERS):
            copies = form.placement.copies(layer)
            shares = zip(rows, copies, strict=True)
            layers.append(tuple(all // len(ranks) if place in ranks else 0 for all, ranks in shares))
        mesh.says(name, loads=ExpertLoads(form.epoch, number, tuple(layers)))
    mesh.wait(0.5, names)


def newest(mesh: Mesh) -> GroupPlan | None:
    forms = [form for _, form in mesh.new_forms()]
    return max(forms, key=lambda form: form.epoch) if forms else None


def test_experts_move_after_as_many_windows_as_was_asked() -> None:
    mesh = begun()
    mesh.new_forms()
    report(mesh, "abc", 1)
    assert newest(mesh) is None, "a look comes with every second window"
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.windows, round(balance.balancedness, 2)) == (1, 0.33)
    first, second, *_ = balance.busiest
    assert first.share >= second.share > 0
    assert first.ranks == (0,), "who holds it"
    report(mesh, "abc", 2)
    form = newest(mesh)
    assert form is not None
    assert [peer.instance for peer in form.peers] == list("abc")
    for copies in form.replicas:
        assert len({copies[expert] for expert in range(3)}) == 3, "the busy ones are apart"
        assert all(len(ranks) == 1 for ranks in copies)
    mesh.now += 0.25
    mesh.all_enter("abc")
    report(mesh, "abc", 1)
    report(mesh, "abc", 2)
    assert newest(mesh) is None, "nothing is left to gain"
    balance = mesh.registry.view().balance
    assert balance is not None
    assert balance.changes == 1
    assert balance.moves > 0
    assert balance.moved_bytes == balance.moves * COPY_BYTES
    assert 0.25 <= balance.seconds < 1.0
    assert balance.balancedness > 0.9
    assert sum(balance.held.values()) == 8 * LAYERS
    assert balance.replicas == (LAYERS,) * 8


def test_windows_count_only_if_all_report_the_same_one_of_this_group() -> None:
    mesh = begun()
    mesh.new_forms()
    report(mesh, "ab", 2)
    assert newest(mesh) is None, "c has not reported"
    rows = ((9000,) * 8,) * LAYERS
    mesh.says("c", loads=ExpertLoads(mesh.forms["c"].epoch - 1, 2, rows))
    mesh.wait(0.5, "abc")
    assert newest(mesh) is None, "c's is of another group"
    mesh.says("c", loads=ExpertLoads(mesh.forms["c"].epoch, 2, rows[:1]))
    mesh.wait(0.5, "abc")
    assert newest(mesh) is None, "c's is of another model"


def test_loads_of_different_windows_are_not_added_up() -> None:
    """A window counts once all have reported it, with their rows of it alone."""
    mesh = begun()
    report(mesh, "c", 1, (1, 1, 1, 1, 1, 1, 500, 500))
    report(mesh, "ab", 2)
    balance = mesh.registry.view().balance
    assert balance is not None
    assert balance.windows == 0
    report(mesh, "c", 2)
    balance = mesh.registry.view().balance
    assert balance is not None
    assert balance.windows == 1
    assert [busy.expert for busy in balance.busiest[:3]] == [0, 1, 2]
    assert {round(busy.share * sum(SKEWED)) for busy in balance.busiest[3:]} == {10}, "none of the 500"


def test_a_look_comes_though_the_window_that_it_was_for_was_missed() -> None:
    mesh = begun()
    mesh.new_forms()
    report(mesh, "abc", 1)
    assert newest(mesh) is None
    report(mesh, "ab", 2)
    report(mesh, "abc", 3)
    assert newest(mesh) is not None


def test_loads_that_do_not_come_from_all_turn_the_gauge_and_a_warning() -> None:
    mesh = begun()
    report(mesh, "abc", 1)
    for number in range(2, 2 * MANY_FAILURES):
        report(mesh, "ac", number)
    assert not is_failing(mesh)
    report(mesh, "ac", 2 * MANY_FAILURES)
    assert is_failing(mesh)
    (note,) = [note for note in mesh.notes if "experts are not balanced" in note]
    assert note.endswith("those of instances 1 do not fit")
    report(mesh, "ac", 2 * MANY_FAILURES + 1)
    assert len([note for note in mesh.notes if "experts are not balanced" in note]) == 1
    report(mesh, "abc", 2 * MANY_FAILURES + 2)
    assert not is_failing(mesh)


def is_failing(mesh: Mesh) -> bool:
    """The gauge, as the view has it."""
    balance = mesh.registry.view().balance
    assert balance is not None
    return balance.is_failing


def test_an_even_load_moves_nothing() -> None:
    mesh = begun()
    mesh.new_forms()
    for number in (1, 2, 3, 4):
        report(mesh, "abc", number, (1000, 1010, 990, 1000, 1000, 1010, 1500, 1500))
    assert newest(mesh) is None


def test_owners_are_those_that_live_now() -> None:
    mesh = begun()
    mesh.new_forms()
    report(mesh, "abc", 1, (10, 10, 10, 9000, 8000, 10, 10, 10))
    assert owners(mesh) == [(3, (1,)), (4, (1,))]
    mesh.leave("b")
    assert owners(mesh) == [(3, ()), (4, ())], "nobody has them until the next group"
    mesh.all_enter("ac")
    held = {expert: place for place, expert in holdings(mesh, "ac") if expert in (3, 4)}
    assert owners(mesh) == [(3, (held[3],)), (4, (held[4],))], "though no window has ended"


def test_copies_of_the_dead_are_not_counted() -> None:
    mesh = begun(TWICE)
    report(mesh, "abc", 1)
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.copies, sum(balance.held.values())) == (2, 16 * LAYERS)
    dead = balance.held[1]
    mesh.leave("b")
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.copies, sorted(balance.held)) == (1, [0, 2])
    assert sum(balance.replicas) == sum(balance.held.values()) == 16 * LAYERS - dead
    assert all(1 not in each.ranks for each in balance.busiest)


def test_a_mesh_that_all_leave_has_no_owners() -> None:
    mesh = begun()
    report(mesh, "abc", 1)
    for name in "abc":
        mesh.says(name, state=State.DRAINED)
    mesh.wait(0.5, "abc")
    for name in "abc":
        mesh.leave(name)
    mesh.wait(0.5)
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.busiest, balance.held, mesh.registry.view().members) == ((), {}, [])


def test_a_restarted_coordinator_knows_the_copies() -> None:
    mesh = begun(TWICE)
    before = mesh.registry.view().balance
    assert before is not None
    mesh.restart_coordinator()
    for name in "abc":
        mesh.register(name, epoch=mesh.forms[name].epoch, group=mesh.forms[name])
        mesh.enters(name)
    mesh.wait(mesh.rules.member_timeout + 1.0, "abc")
    after = mesh.registry.view().balance
    assert after is not None
    assert (after.copies, after.held, after.replicas) == (before.copies, before.held, before.replicas)


def owners(mesh: Mesh) -> list[tuple[int, tuple[int, ...]]]:
    """The two busiest experts, and the instances that the view names for them."""
    balance = mesh.registry.view().balance
    assert balance is not None
    return [(each.expert, each.ranks) for each in balance.busiest[:2]]


def holdings(mesh: Mesh, names: str) -> list[tuple[int, int]]:
    """Ranks of instances, with each expert that they hold in the first layer."""
    form = mesh.forms[names[0]]
    return [
        (form.peers[rank].rank, expert)
        for expert, ranks in enumerate(form.placement.copies())
        for rank in ranks
    ]


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("redundant", [1, 4, 8, 11, 16])
def test_copies_are_there_from_the_first_group_on(redundant: int, strategy: str) -> None:
    mesh = Mesh(size=3, balancing=Balancing(window_size=10, windows=2, num_redundant=redundant))
    mesh.settings = msgspec.structs.replace(mesh.settings, expert_placement_strategy=strategy)
    for name in "abc":
        mesh.register(name)
    for name in "abc":
        mesh.says(name, state=State.LOADED, expert_layers=LAYERS)
    (form,) = {form.epoch: form for _, form in mesh.new_forms()}.values()
    plain = assign_experts(8, 3, strategy)  # type: ignore[arg-type]
    assert len(form.replicas) == LAYERS
    for layer, copies in enumerate(form.replicas):
        counts = sorted(map(len, copies))
        assert counts == sorted(1 + redundant // 8 + (expert < redundant % 8) for expert in range(8))
        held = [len(form.placement.experts_of(rank, layer)) for rank in range(3)]
        assert max(held) == -(-(8 + redundant) // 3), "evenly"
        assert sum(held) == 8 + redundant
        assert all(owner in ranks for owner, ranks in zip(plain.owners, copies, strict=True)), (
            "where they are"
        )
    mesh.all_enter("abc")
    mesh.wait(1.0, "abc")
    assert newest(mesh) is None, "nothing moves before a load is known"


def test_no_copies_are_placed_where_there_is_no_room() -> None:
    mesh = begun(TWICE, room=4)
    form = newest(mesh)
    assert form is not None
    assert [len(form.placement.experts_of(rank)) for rank in range(3)] == [4, 4, 4]
    full = begun(TWICE, room=3)
    form = newest(full)
    assert form is not None
    assert sum(map(len, form.placement.copies())) == 9


def test_a_mesh_that_cannot_read_its_copies_begins_without() -> None:
    mesh = Mesh(size=3, balancing=TWICE)
    for name in "abc":
        mesh.register(name)
    for name in "abc":
        mesh.says(name, state=State.LOADED, expert_layers=LAYERS, experts=FIRST[name])
    first = mesh.forms["a"]
    assert all(len(ranks) == 2 for ranks in first.replicas[0])
    mesh.lost("b", first.epoch, "")
    mesh.answer("ac")
    mesh.wait(1.0, "abc")
    again = mesh.forms["a"]
    assert again.epoch > first.epoch
    assert all(len(ranks) == 1 for ranks in again.placement.copies()), "nothing is read for it"


FIRST = {"a": ((0, 1, 2),), "b": ((3, 4, 5),), "c": ((6, 7),)}
"""Experts that three instances hold as they begin."""


def test_an_even_load_moves_nothing_between_instances_of_several_ranks() -> None:
    mesh = Mesh(size=2, ranks=2, balancing=BALANCING)
    mesh.begin("ab")
    for name in "ab":
        mesh.says(name, expert_layers=LAYERS, expert_bytes=LAYERS * COPY_BYTES)
    mesh.new_forms()
    for number in (1, 2):
        for name in "ab":
            mesh.says(name, loads=ExpertLoads(1, number, ((1000,) * 8,) * LAYERS))
        mesh.wait(0.5, "ab")
    assert newest(mesh) is None


def test_each_expert_is_on_two_instances_at_once_and_a_death_reads_nothing() -> None:
    mesh = begun(TWICE)
    form = newest(mesh)
    assert form is not None
    assert form.epoch == 1
    assert all(len(ranks) == 2 for copies in form.replicas for ranks in copies)
    mesh.all_enter("abc")
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.copies, balance.wanted_copies, balance.most_copies) == (2, 2, 2)
    mesh.new_forms()
    mesh.leave("b")
    left = newest(mesh)
    assert left is not None
    for before, after in zip(form.replicas, left.replicas, strict=True):
        moved = {0: 0, 2: 1}
        assert after == tuple(tuple(moved[rank] for rank in ranks if rank != 1) for ranks in before)
    mesh.all_enter("ac")
    mesh.wait(0.9 * QUIET, "ac")
    assert newest(mesh) is None, "requests of the dead come first"
    mesh.wait(0.2 * QUIET, "ac")
    again = newest(mesh)
    assert again is not None
    assert all(len(ranks) == 2 for copies in again.replicas for ranks in copies), "copies come back after it"


def test_it_says_when_copies_do_not_suffice() -> None:
    mesh = begun(Balancing(window_size=10, windows=1, num_redundant=4, survive=1))
    mesh.all_enter("abc")
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.copies, balance.wanted_copies, balance.most_copies) == (1, 2, 1)


def test_a_newcomer_gets_a_share_and_who_leaves_gives_its_up() -> None:
    mesh = begun(TWICE)
    mesh.all_enter("abc")
    mesh.register("d")
    mesh.says("d", state=State.LOADED, expert_layers=LAYERS)
    mesh.new_forms()
    mesh.wait(0.5, "abcd")
    form = newest(mesh) or mesh.forms["a"]
    assert len(form.peers) == 4
    for layer in range(LAYERS):
        assert [len(form.placement.experts_of(rank, layer)) for rank in range(4)] == [4] * 4
    mesh.all_enter("abcd")
    mesh.new_forms()
    mesh.says("a", state=State.DRAINED)
    mesh.wait(0.5, "abcd")
    left = newest(mesh)
    assert left is not None
    assert [peer.instance for peer in left.peers] == list("bcd")
    assert all(len(ranks) == 2 for copies in left.replicas for ranks in copies)


def test_a_move_that_fails_leaves_the_experts_where_they_are_and_is_tried_later() -> None:
    mesh = begun()
    report(mesh, "abc", 1)
    mesh.new_forms()
    report(mesh, "abc", 2)
    tried = newest(mesh)
    assert tried is not None
    mesh.lost("b", tried.epoch, "")
    mesh.answer("ac")
    mesh.wait(1.0, "abc")
    back = newest(mesh)
    assert back is not None
    for rank in range(3):
        first = mesh.beats["abc"[rank]].experts[0]
        assert all(tuple(back.placement.experts_of(rank, layer)) == first for layer in range(LAYERS))
    mesh.all_enter("abc")
    balance = mesh.registry.view().balance
    assert balance is not None
    assert (balance.changes, balance.failures, balance.is_failing) == (0, 1, False)
    assert any("experts could not move (once): the next try in 10 s" in note for note in mesh.notes)
    report(mesh, "abc", 1)
    report(mesh, "abc", 2)
    assert newest(mesh) is None, "not yet"
    mesh.wait(10.0, "abc")
    report(mesh, "abc", 4)
    assert newest(mesh) is not None


def test_moves_that_fail_three_times_turn_the_gauge_and_a_warning_until_one_succeeds() -> None:
    mesh = begun()
    for number in range(MANY_FAILURES):
        assert is_failing(mesh) is False
        form = next_move(mesh)
        mesh.lost("b", form.epoch, "")
        mesh.answer("ac")
        mesh.wait(1.0, "abc")
        mesh.all_enter("abc")
        balance = mesh.registry.view().balance
        assert balance is not None
        assert balance.failures == number + 1
    assert is_failing(mesh)
    assert any("(3 times in a row)" in note for note in mesh.notes)
    waits = [note.rpartition(" in ")[2] for note in mesh.notes if "experts could not move" in note]
    assert waits == ["10 s", "20 s", "40 s"]
    next_move(mesh)
    mesh.all_enter("abc")
    assert not is_failing(mesh)


def next_move(mesh: Mesh) -> GroupPlan:
    """The next plan that moves experts, however long it takes until one is tried again."""
    mesh.new_forms()
    for number in range(1, 200):
        report(mesh, "abc", number)
        if (form := newest(mesh)) is not None:
            return form
    raise AssertionError("none came")


def test_an_operator_may_ask_for_a_look_now() -> None:
    mesh = begun()
    mesh.new_forms()
    report(mesh, "abc", 1)
    answer = mesh.registry.handle(b"op", Rebalance(command="x"), mesh.now)
    sent = [item.message for item in answer if isinstance(item, Send) and item.peer == b"op"]
    assert isinstance(sent[0], OperatorAnswer)
    assert sent[0].status == 202
    assert any(isinstance(item, Publish) and isinstance(item.message, GroupPlan) for item in answer)
    assert any(isinstance(item, Note) and "copies of experts move" in item.text for item in answer)


def test_without_the_flag_an_operator_is_refused() -> None:
    mesh = Mesh()
    mesh.begin()
    (sent,) = [
        item.message
        for item in mesh.registry.handle(b"op", Rebalance(command="x"), mesh.now)
        if isinstance(item, Send)
    ]
    assert isinstance(sent, OperatorAnswer)
    assert sent.status == 409
    assert "--enable-eplb" in sent.text
    assert mesh.registry.view().balance is None


def test_a_coordinator_that_was_restarted_leaves_copies_where_they_are() -> None:
    mesh = begun(TWICE)
    mesh.all_enter("abc")
    before = mesh.forms["a"]
    mesh.new_forms()
    mesh.restart_coordinator()
    for name in "abc":
        mesh.register(name, epoch=before.epoch, group=before)
        mesh.enters(name)
    mesh.wait(8.0, "abc")
    assert newest(mesh) is None
