"""Groups with spread experts: members of the next one, its time, instances taken for dead."""

from __future__ import annotations

import msgspec

from coordinator.messages import (
    AdmissionRefused,
    AdmissionWait,
    Evidence,
    GroupPlan,
    Peer,
    Probe,
    State,
    Unknown,
    Welcome,
)
from tests.coordinator.membership.group_mesh import NAMES, SPREAD, Mesh, members
from tests.coordinator.membership.test_registry import lines_of, register, to


def test_the_first_group_forms_once_all_have_their_weights() -> None:
    mesh = Mesh()
    for name in "abc":
        mesh.register(name)
    mesh.says("a")
    mesh.says("b")
    assert mesh.new_forms() == []
    mesh.says("c")
    form = GroupPlan(
        epoch=1,
        store="a:90",
        peers=[Peer(rank, f"tcp://a:{rank}", "h", name) for rank, name in enumerate("abc")],
        owners=(0, 0, 0, 1, 1, 1, 2, 2),
    )
    assert mesh.new_forms() == [(name, form) for name in "abc"]
    mesh.says("a")
    assert mesh.new_forms() == [], "this may have been under way when the plan was sent"
    mesh.now += mesh.rules.heartbeat_interval
    mesh.says("a")
    assert mesh.new_forms() == [("a", form)], "who is not in it yet is told again"
    mesh.now += mesh.rules.heartbeat_interval
    mesh.says("a", plan=form.name)
    assert mesh.new_forms() == [], "it has the plan"
    mesh.enters("a")
    mesh.says("a")
    assert mesh.new_forms() == []
    assert mesh.registry.view().epoch == 1


def test_what_a_larger_mesh_costs() -> None:
    """A heartbeat costs the same at any size; a view costs each member once."""

    def begun(size: int) -> Mesh:
        mesh = Mesh(size=size)
        mesh.begin(NAMES[:size])
        assert mesh.registry.view().waiting_for == ""
        return mesh

    few, some, many = begun(4), begun(6), begun(8)
    beats = [lines_of(lambda mesh=mesh: mesh.says("c")) for mesh in (few, some, many)]
    assert len(set(beats)) == 1, beats
    views = [lines_of(mesh.registry.view) for mesh in (few, some, many)]
    assert views[2] - views[1] == views[1] - views[0], views


def test_a_death_that_is_certain_is_a_group_of_the_others_at_once(mesh: Mesh) -> None:
    mesh.lost("b", 1, "a", Evidence.EXITED)
    assert mesh.new_forms() == [], "b says that it is broken: is c there?"
    mesh.answer("c")
    (of_b, form), (of_c, _) = mesh.new_forms()
    assert (of_b, of_c, members(form), form.epoch, form.broken) == ("b", "c", "bc", 2, 1)
    assert form.owners == (1, 0, 1, 0, 0, 0, 1, 1), "b and c keep theirs"
    assert mesh.notes[-2:] == [
        "instance 0 taken out: its process has ended",
        "2 instances form the group of epoch 2: 1 of epoch 1 is gone",
    ]


def test_who_answers_a_probe_lives_and_who_does_not_is_taken_out(mesh: Mesh) -> None:
    mesh.lost("b", 1, "ac")
    mesh.lost("c", 1, "ab")  # b gave the group up
    mesh.answer("bc")
    assert mesh.new_forms() == []
    mesh.wait(0.25, alive="bc")
    assert mesh.new_forms() == []
    mesh.wait(0.1, alive="bc")
    assert [(name, members(form)) for name, form in mesh.new_forms()] == [("b", "bc"), ("c", "bc")]
    assert "instance 0 taken out: no answer for 0.3 s, its group is broken" in mesh.notes


def test_survivors_that_are_busy_get_more_time_to_answer(mesh: Mesh) -> None:
    mesh.lost("b", 1, "a", Evidence.EXITED)
    mesh.lost("b", 1, "c")  # it gave the group up
    mesh.wait(0.9)
    assert mesh.ranks() == [1, 2]
    mesh.answer("c")
    assert {members(form) for _, form in mesh.new_forms()} == {"bc"}
    mesh.all_enter("bc")
    mesh.lost("b", 2, "c")
    mesh.lost("c", 2, "b")  # it says so itself
    mesh.answer("b")
    mesh.wait(0.9)
    assert mesh.ranks() == [1, 2]


def test_two_deaths_at_once_cost_one_epoch_though_one_of_them_is_accused_by_nobody(mesh: Mesh) -> None:
    mesh.lost("c", 1, "a")
    mesh.wait(0.5, alive="c")
    assert mesh.ranks() == [1, 2]
    assert mesh.new_forms() == [], "b has not answered either"
    mesh.wait(0.75, alive="c")
    assert [(name, members(form), form.epoch) for name, form in mesh.new_forms()] == [("c", "c", 2)]


def test_a_group_that_broke_though_all_live_is_formed_again_at_once(mesh: Mesh) -> None:
    mesh.lost("a", 1, "b")
    mesh.answer("bc")
    forms = mesh.new_forms()
    assert [(name, members(form)) for name, form in forms] == [(name, "abc") for name in "abc"]
    assert (forms[0][1].epoch, forms[0][1].broken) == (2, 1)


def test_forming_again_and_again_is_slowed_down(mesh: Mesh) -> None:
    epochs = []
    for _ in range(200):
        newest = mesh.registry.view().epoch
        mesh.lost("a", newest, "")
        mesh.answer("bc")
        epochs.append(mesh.registry.view().epoch)
        mesh.wait(0.1, alive="abc")
    assert epochs[0] == 2
    assert 8 <= epochs[-1] <= 10, "0.2, 0.4 ... 5 s"


def test_a_probe_that_was_answered_before_it_was_sent_is_not_answered(mesh: Mesh) -> None:
    mesh.lost("a", 1, "b")
    mesh.answer("bc")
    mesh.all_enter("abc")
    mesh.lost("a", 2, "b")
    mesh.says("b")  # still with the number of the first
    mesh.answer("c")
    mesh.wait(0.5, alive="ac")
    assert mesh.ranks() == [0, 2]


def test_two_who_accuse_each_other_and_answer_are_not_asked_without_end() -> None:
    mesh = Mesh(room=3)
    mesh.begin()
    mesh.lost("b", 1, "a", Evidence.EXITED)
    mesh.answer("c")
    mesh.sent.clear()
    for _ in range(100):  # the experts do not fit: no other group ends this
        for name, other in "bc", "cb":
            mesh.lost(name, 1, other)
            if mesh.sent.get(other):
                mesh.answer(other)
    assert sum(isinstance(item, Probe) for items in mesh.sent.values() for item in items) <= 2
    mesh.wait(1.5, alive="c")
    mesh.lost("c", 1, "b")
    mesh.wait(1.25, alive="c")
    assert mesh.ranks() == [2], "it is asked again, later"


def test_who_answers_but_stands_still_is_taken_out_if_two_waited_for_it(mesh: Mesh) -> None:
    mesh.lost("a", 1, "c", Evidence.DEADLINE)
    mesh.lost("b", 1, "c", Evidence.DEADLINE)
    mesh.answer("bc")
    mesh.wait(0.5, alive="abc")
    assert mesh.ranks() == [0, 1]
    assert "instance 2 taken out: it answers, but its steps stand still, say 2 others" in mesh.notes


def test_who_waited_itself_does_not_stand_still(mesh: Mesh) -> None:
    for name, suspects in ("a", "bc"), ("b", "ac"), ("c", "ab"):
        mesh.lost(name, 1, suspects, Evidence.DEADLINE)
    mesh.answer("abc")
    mesh.wait(0.5, alive="abc")
    assert mesh.ranks() == [0, 1, 2]
    assert mesh.registry.view().epoch == 2


def test_who_stands_still_is_said_by_those_who_waited_only(mesh: Mesh) -> None:
    mesh.lost("a", 1, "c", Evidence.DEADLINE)
    mesh.lost("b", 1, "ac", Evidence.CLOSED)
    mesh.answer("bc")
    mesh.wait(0.5, alive="abc")
    assert mesh.ranks() == [0, 1, 2]


def test_who_has_just_come_out_of_the_group_before_does_not_stand_still(mesh: Mesh) -> None:
    mesh.register("d")
    mesh.says("d")
    mesh.all_enter("abd")
    mesh.lost("c", 1, "")
    for name in "ad":
        mesh.lost(name, 2, "c", Evidence.DEADLINE)
    mesh.answer("bcd")
    mesh.wait(0.5, alive="abcd")
    assert mesh.ranks() == [0, 1, 2, 3]


def test_of_two_who_stands_still_twice_is_taken_out() -> None:
    mesh = Mesh(2)
    mesh.begin("ab")
    for epoch in 1, 2:
        mesh.lost("a", epoch, "b", Evidence.DEADLINE)
        mesh.answer("b")
        mesh.wait(0.5, alive="ab")
        mesh.enters("a")
    assert mesh.ranks() == [0]


def test_a_silent_member_is_gone_like_a_dead_one(mesh: Mesh) -> None:
    mesh.wait(6.0, alive="ac")
    assert [(name, members(form)) for name, form in mesh.new_forms()] == [("a", "ac"), ("c", "ac")]


def test_a_newcomer_joins_when_the_group_has_begun(mesh: Mesh) -> None:
    mesh.register("d")
    mesh.says("d")
    forms = mesh.new_forms()
    assert [(name, members(form), form.epoch, form.broken) for name, form in forms] == [
        (name, "abcd", 2, 0) for name in "abcd"
    ]
    assert forms[0][1].owners == (0, 0, 3, 1, 1, 3, 2, 2)
    mesh.register("e")
    mesh.says("e")
    assert mesh.new_forms() == [], "one change after the other"
    mesh.all_enter("abcd")
    assert {members(form) for _, form in mesh.new_forms() if form.epoch == 3} == {"abcde"}


def test_a_loss_does_not_wait_for_a_newcomer(mesh: Mesh) -> None:
    mesh.register("d")
    mesh.says("d")
    mesh.new_forms()
    mesh.lost("b", 1, "a", Evidence.EXITED)
    assert {(name, members(form)) for name, form in mesh.new_forms()} == {("b", "bc"), ("c", "bc")}
    mesh.all_enter("bc")
    assert {members(form) for _, form in mesh.new_forms()} >= {"bcd"}


def test_who_is_drained_is_let_go_with_the_group_without_it(mesh: Mesh) -> None:
    mesh.says("b", state=State.DRAINING)
    assert mesh.new_forms() == [], "it still has requests"
    mesh.says("b", state=State.DRAINED)
    (_, form), (to_b, _), _ = sorted(mesh.new_forms(), key=lambda sent: sent[0])
    assert (members(form), form.leavers, form.broken, to_b) == ("ac", ("b",), 0, "b")
    assert form.owners == (0, 0, 0, 1, 0, 1, 1, 1)
    mesh.all_enter("ac")
    mesh.leave("b")
    mesh.wait(1.0, alive="ac")
    assert mesh.registry.view().epoch == 2


def test_a_group_has_not_begun_while_its_members_are_only_ready(mesh: Mesh) -> None:
    mesh.register("d")
    mesh.says("d")
    for name in "abcd":
        mesh.says(name, ready_epoch=2)
    assert "epoch 2 has begun" not in mesh.notes
    mesh.all_enter("abcd")
    assert "epoch 2 has begun" in mesh.notes


def test_a_group_has_begun_once_its_leavers_are_gone(mesh: Mesh) -> None:
    mesh.says("b", state=State.DRAINED)
    mesh.all_enter("ac")
    assert "epoch 2 has begun" not in mesh.notes, "b may still wait for others in the group before"
    mesh.leave("b")
    assert mesh.notes[-1] == "epoch 2 has begun"


def test_a_leaver_that_connects_anew_is_not_fenced(mesh: Mesh) -> None:
    before = mesh.forms["b"]
    mesh.says("b", state=State.DRAINED)
    welcome = mesh.register("b", epoch=1, group=before)
    assert isinstance(welcome, Welcome)
    assert not welcome.fenced, "the others wait for it in the agreement on the group without it"


def test_the_last_ones_are_let_go_too(mesh: Mesh) -> None:
    for name in "abc":
        mesh.says(name, state=State.DRAINED)
    (_, form), *_ = mesh.new_forms()
    assert (members(form), form.leavers) == ("bc", ("a",))
    mesh.leave("a")
    mesh.all_enter("bc", State.DRAINED)
    (_, form), *_ = mesh.new_forms()
    assert (form.epoch, form.peers, form.leavers) == (3, [], ("b", "c"))


def test_who_goes_without_leave_breaks_the_group(mesh: Mesh) -> None:
    mesh.leave("c")
    assert {(name, members(form), form.broken) for name, form in mesh.new_forms()} == {
        ("a", "ab", 0),
        ("b", "ab", 0),
    }


def test_experts_that_do_not_fit_wait_for_somebody() -> None:
    mesh = Mesh(room=3)
    mesh.begin()
    mesh.new_forms()
    mesh.lost("b", 1, "a", Evidence.EXITED)
    mesh.answer("c")
    assert mesh.new_forms() == []
    view = mesh.registry.view()
    assert view.waiting_for == "1 more instance: the 8 experts do not fit on 2"
    assert {member.state for member in view.members} == {State.LOADED}, "no router chooses them"
    mesh.register("d")
    mesh.says("d")
    assert {members(form) for _, form in mesh.new_forms()} == {"bcd"}
    mesh.all_enter("bcd")
    assert {member.state for member in mesh.registry.view().members} == {State.READY}


def test_more_instances_than_experts_are_refused(mesh: Mesh) -> None:
    for name in "defgh":
        mesh.register(name)
    message = register("i", None, settings=SPREAD)
    (answer,) = to(b"i", mesh.registry.handle(b"i", message, 0.0))
    assert isinstance(answer, AdmissionRefused)
    assert answer.reason.startswith("the model's 8 experts are spread over as many instances")


def test_who_was_taken_out_and_lives_is_fenced_and_joins_again(mesh: Mesh) -> None:
    old = mesh.forms["a"]
    mesh.wait(6.0, alive="bc")
    mesh.all_enter("bc")
    mesh.new_forms()
    mesh.says("a")
    mesh.lost("a", 1, "bc")
    assert mesh.sent["a"][-2:] == [Unknown(), Unknown()], "what it says of its group counts for nothing"
    welcome = mesh.register("a", epoch=1, group=old)
    assert isinstance(welcome, Welcome)
    assert welcome.fenced
    mesh.says("a", state=State.READY, epoch=0)
    assert mesh.registry.view().members[0].state is State.READY, "in the group to come"
    assert {members(form) for _, form in mesh.new_forms()} == {"abc"}


def test_a_fenced_one_takes_another_rank_when_its_own_is_taken(mesh: Mesh) -> None:
    old = mesh.forms["a"]
    mesh.wait(6.0, alive="bc")
    mesh.register("d", 0)
    welcome = mesh.register("a", 0, epoch=1, group=old)
    assert isinstance(welcome, Welcome)
    assert welcome.rank == 3


def test_the_rank_of_a_dead_member_is_free_after_one_probe(mesh: Mesh) -> None:
    assert isinstance(mesh.register("d", 0), AdmissionWait)
    mesh.wait(0.5, alive="bc")
    assert isinstance(mesh.register("d", 0), Welcome)
    assert isinstance(mesh.register("e", 1), AdmissionWait)
    mesh.answer("b")
    mesh.wait(0.5, alive="bc")
    assert isinstance(mesh.register("e", 1), AdmissionRefused)


def test_a_newcomer_that_is_never_ready_is_taken_out(mesh: Mesh) -> None:
    mesh.register("d")
    mesh.says("d")
    mesh.new_forms()
    mesh.wait(61.0, alive="abcd")
    assert mesh.ranks() == [0, 1, 2]
    assert "instance 3 taken out: did not prepare epoch 2 in time" in mesh.notes
    assert {members(form) for _, form in mesh.new_forms()} >= {"abc"}


def test_a_newcomer_that_was_taken_out_may_be_back_before_the_next_group(mesh: Mesh) -> None:
    """Else it would be taken out as often as it registers."""
    mesh.register("d")
    mesh.says("d")
    mesh.wait(59.75, alive="abcd")
    mesh.lost("a", 1, "b")
    mesh.wait(0.25, alive="ac")
    assert mesh.ranks() == [0, 1, 2], "and b is under suspicion: there is no other group yet"
    for _ in range(3):
        assert isinstance(mesh.register("d"), Welcome)
        mesh.says("d")
    assert mesh.ranks() == [0, 1, 2, 3]
    assert sum("did not prepare epoch 2 in time" in note for note in mesh.notes) == 1
    mesh.answer("b")
    mesh.wait(1.0, alive="abcd")
    assert "abcd" in {members(form) for _, form in mesh.new_forms()}


# ---- instances of several tensor-parallel ranks


def test_experts_are_placed_on_ranks_and_stay_there() -> None:
    """Eight experts on two instances of two ranks; a newcomer replaces a dead one."""
    mesh = Mesh(size=2, ranks=2)
    mesh.begin("ab")
    form = mesh.forms["a"]
    assert (form.ranks, form.owners) == (2, (0, 0, 1, 1, 2, 2, 3, 3))
    mesh.lost("a", 1, "b", Evidence.EXITED)
    form = mesh.forms["a"]
    assert (members(form), form.owners) == ("a", (0, 0, 1, 1, 0, 1, 0, 1)), "each rank keeps its own"
    mesh.enters("a")
    assert mesh.beats["a"].experts == ((0, 1, 4, 6), (2, 3, 5, 7))
    mesh.register("c")
    mesh.says("c")
    form = mesh.forms["c"]
    assert members(form) == "ac"
    assert [form.owners.count(owner) for owner in range(4)] == [2, 2, 2, 2]
    kept = [owner for expert, owner in enumerate(form.owners) if expert in (0, 1, 4, 6)]
    assert kept.count(0) == 2, "the first rank keeps what it may"


def test_room_is_that_of_each_rank() -> None:
    mesh = Mesh(size=2, room=3, ranks=2)
    mesh.begin("ab")
    mesh.lost("a", 1, "b", Evidence.EXITED)
    assert mesh.registry.view().waiting_for == "1 more instance: the 8 experts do not fit on 1"


def test_an_instance_whose_ranks_would_get_no_expert_is_refused() -> None:
    mesh = Mesh(size=2, ranks=3)
    mesh.begin("ab")
    settings = msgspec.structs.replace(SPREAD, data_parallel_size=2, tensor_parallel_size=3)
    message = register("c", None, settings=settings)
    why = "the model's 8 experts are spread over 2 instances of 3 ranks each: one more gets none"
    assert to(b"c", mesh.registry.handle(b"c", message, mesh.now)) == [AdmissionRefused(why)]
    back = msgspec.structs.replace(message, epoch=1)
    assert to(b"c", mesh.registry.handle(b"c", back, mesh.now)) == [AdmissionWait(why)], (
        "it may serve elsewhere"
    )


def test_the_successor_of_one_that_may_be_dead_waits_for_its_place() -> None:
    mesh = Mesh(size=2, ranks=3)
    mesh.begin("ab")
    settings = msgspec.structs.replace(SPREAD, data_parallel_size=2, tensor_parallel_size=3)
    message = register("c", None, settings=settings)
    mesh.wait(1.0, "a")
    (answer,) = to(b"c", mesh.registry.handle(b"c", message, mesh.now))
    assert isinstance(answer, AdmissionWait), "b is silent"
    mesh.wait(5.0, "a")
    (answer,) = to(b"c", mesh.registry.handle(b"c", message, mesh.now))
    assert isinstance(answer, Welcome)
    assert answer.rank == 1


def test_nobody_is_late_for_a_group_that_lost_a_member_and_lacks_room() -> None:
    """The loss holds it up, not those who wait."""
    mesh = Mesh(room=3, forming_timeout=2.0)
    for name in "abc":
        mesh.register(name)
    for name in "abc":
        mesh.says(name)
    mesh.leave("c")
    mesh.wait(mesh.rules.member_timeout + 1.0, alive="a")
    assert mesh.ranks() == [0], "b was silent"
    mesh.register("b", epoch=1)
    mesh.wait(1.0, alive="a")
    assert mesh.ranks() == [0, 1]


def test_who_was_late_and_is_back_gets_the_time_to_prepare_again() -> None:
    mesh = Mesh(room=3, forming_timeout=2.0)
    for name in "abc":
        mesh.register(name)
    for name in "abc":
        mesh.says(name)
    for name in "ab":
        mesh.says(name, ready_epoch=1)
    mesh.wait(2.5, alive="abc")
    assert mesh.ranks() == [0, 1], "c did not prepare in time, and without it experts have no room"
    mesh.register("c", epoch=1)
    mesh.wait(0.5, alive="ab")
    assert mesh.ranks() == [0, 1, 2]
