"""The protocol as lists of events and results; tests/simulator lets several instances of it meet."""

from __future__ import annotations

import msgspec
import pytest

from parallel.lockstep import (
    Decision,
    Lockstep,
    LockstepError,
    RunStep,
    Sleep,
    StepHeader,
    Switch,
    Wake,
    decide,
    is_only_one,
)


def headers(*num_tokens: int, epoch: int = 0, step: int = 0, ready: tuple[int, ...] = ()) -> list[StepHeader]:
    """One header per rank: its tokens, and the epoch that it is ready for."""
    return [
        StepHeader(epoch=epoch, step=step, num_tokens=tokens, ready_epoch=of_rank)
        for tokens, of_rank in zip(num_tokens, ready or [epoch] * len(num_tokens), strict=True)
    ]


def advance(lockstep: Lockstep, *num_tokens: int, ready: tuple[int, ...] = ()) -> Decision:
    """All headers of the next step are here."""
    return lockstep.advance(headers(*num_tokens, epoch=lockstep.epoch, step=lockstep.step, ready=ready))


def asleep(rank: int = 0, size: int = 2, epoch: int = 0) -> Lockstep:
    """An instance that sleeps before step 1."""
    lockstep = Lockstep(rank, size, epoch)
    assert advance(lockstep, *[0] * size) == Sleep()
    return lockstep


# ---- headers


def test_a_header_is_a_fixed_number_of_integers() -> None:
    header = StepHeader(
        epoch=1, step=2, num_tokens=3, queued_prefill=4, longest=5, ready_epoch=6, in_flight=1
    )
    assert header.ints() == (1, 2, 3, 4, 5, 6, 1)
    assert StepHeader.of(header.ints()) == header
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=StepHeader) == header


def test_a_wake_is_a_message() -> None:
    wake = Wake(3, 7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wake), type=Wake) == wake


# ---- the decision


@pytest.mark.parametrize(
    ("num_tokens", "ready", "decision"),
    [
        ((0,), (0,), Sleep()),
        ((5,), (0,), RunStep((5,))),
        ((0, 0, 0), (0, 0, 0), Sleep()),
        ((0, 4, 0), (0, 0, 0), RunStep((0, 4, 0))),
        ((8, 4, 2), (0, 0, 0), RunStep((8, 4, 2))),
        # a pending epoch is work, until all are ready for the same one
        ((0, 0, 0), (0, 1, 0), RunStep((0, 0, 0))),
        ((0, 3, 0), (1, 1, 0), RunStep((0, 3, 0))),
        ((0, 0, 0), (1, 1, 1), Switch(1)),
        ((7, 0, 9), (1, 1, 1), Switch(1)),
        ((0, 0, 0), (3, 3, 3), Switch(3)),
        ((0, 0, 0), (2, 1, 1), RunStep((0, 0, 0))),
        ((0, 0, 1), (2, 1, 2), RunStep((0, 0, 1))),
    ],
)
def test_decide(num_tokens: tuple[int, ...], ready: tuple[int, ...], decision: Decision) -> None:
    assert decide(headers(*num_tokens, ready=ready)) == decision


def test_ready_is_relative_to_the_epoch() -> None:
    assert decide(headers(0, 0, epoch=4, step=9)) == Sleep()
    assert decide(headers(0, 0, epoch=4, step=9, ready=(0, 0))) == Sleep()
    assert decide(headers(0, 0, epoch=4, step=9, ready=(5, 4))) == RunStep((0, 0))
    assert decide(headers(0, 0, epoch=4, step=9, ready=(5, 5))) == Switch(5)


def test_what_waits_is_told_but_only_what_is_scheduled_counts() -> None:
    waiting = StepHeader(epoch=0, step=0, num_tokens=0, queued_prefill=100, longest=7)
    assert decide([waiting, waiting]) == Sleep()


def test_nobody_sleeps_while_tokens_are_under_way_in_a_pipeline() -> None:
    """Their instance schedules more when they come out; until then the others keep it company."""
    idle, piped = (
        StepHeader(epoch=0, step=4, num_tokens=0),
        StepHeader(epoch=0, step=4, num_tokens=0, in_flight=2),
    )
    assert decide([idle, piped]) == RunStep((0, 0))
    assert decide([idle, idle]) == Sleep()


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (1, 0), (1, 1)])
def test_headers_of_different_steps_are_refused(epoch: int, step: int) -> None:
    with pytest.raises(LockstepError, match=r"headers of different steps: \[\(0, 0\), "):
        decide([*headers(1), *headers(1, epoch=epoch, step=step)])


# ---- an instance


def test_the_state_is_in_the_repr() -> None:
    lockstep = Lockstep(1, 3, epoch=4)
    assert repr(lockstep) == "<Lockstep rank 1/3 epoch 4 step 0 awake>"
    advance(lockstep, 0, 0, 0)
    assert repr(lockstep) == "<Lockstep rank 1/3 epoch 4 step 1 asleep>"


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of {size}"):
        Lockstep(rank, size, 0)


def test_it_tells_where_it_stands() -> None:
    lockstep = Lockstep(0, 2, epoch=3)
    assert lockstep.header(0) == StepHeader(epoch=3, step=0, num_tokens=0, ready_epoch=3)
    advance(lockstep, 1, 1)
    assert lockstep.header(5, queued_prefill=6, longest=7, ready_epoch=4) == StepHeader(
        epoch=3, step=1, num_tokens=5, queued_prefill=6, longest=7, ready_epoch=4
    )


def test_steps_follow_each_other() -> None:
    lockstep = Lockstep(0, 2, 0)
    assert [advance(lockstep, 1, 0), advance(lockstep, 0, 2), advance(lockstep, 0, 0)] == [
        RunStep((1, 0)),
        RunStep((0, 2)),
        Sleep(),
    ]
    assert (lockstep.step, lockstep.awake) == (3, False)


def test_a_sleeping_instance_begins_no_step() -> None:
    with pytest.raises(AssertionError, match="a sleeping instance begins no step"):
        asleep().header(1)


def test_headers_that_cannot_be_for_it_are_refused() -> None:
    lockstep = Lockstep(0, 2, 0)
    with pytest.raises(LockstepError, match="3 headers in a world of 2"):
        lockstep.advance(headers(1, 1, 1))
    with pytest.raises(LockstepError, match="came back at <Lockstep rank 0/2 epoch 0 step 0 awake>"):
        lockstep.advance(headers(1, 1, step=1))
    with pytest.raises(LockstepError, match="headers of different steps"):
        lockstep.advance([*headers(1), *headers(1, step=1)])
    assert (lockstep.epoch, lockstep.step) == (0, 0)
    assert advance(lockstep, 1, 1) == RunStep((1, 1))


def test_one_instance_alone_is_a_world() -> None:
    lockstep = asleep(size=1)
    assert lockstep.wake() == Wake(0, 1)
    assert lockstep.header(3).num_tokens == 3
    assert advance(lockstep, 3) == RunStep((3,))


# ---- waking


def test_who_has_work_wakes_itself_and_tells_the_others() -> None:
    lockstep = asleep()
    assert lockstep.wake() == Wake(0, 1)
    assert lockstep.awake
    assert lockstep.outstanding_wake == Wake(0, 1)
    assert lockstep.header(2) == StepHeader(epoch=0, step=1, num_tokens=2)


def test_who_is_awake_needs_no_wake() -> None:
    lockstep = Lockstep(0, 2, 0)
    assert lockstep.wake() is None
    assert lockstep.outstanding_wake is None
    lockstep = asleep()
    lockstep.wake()
    assert lockstep.wake() is None
    assert lockstep.outstanding_wake == Wake(0, 1)


def test_a_wake_is_outstanding_until_its_step_begins() -> None:
    lockstep = asleep()
    lockstep.wake()
    lockstep.header(1)
    assert lockstep.outstanding_wake == Wake(0, 1)
    assert advance(lockstep, 1, 0) == RunStep((1, 0))
    assert lockstep.outstanding_wake is None


def test_a_wake_for_the_next_step_wakes() -> None:
    lockstep = asleep()
    lockstep.on_wake(Wake(0, 1))
    assert lockstep.awake
    assert lockstep.outstanding_wake is None  # it is not this one's to repeat


def test_a_repeated_wake_is_harmless() -> None:
    lockstep = asleep()
    for _ in range(3):
        lockstep.on_wake(Wake(0, 1))
    assert advance(lockstep, 0, 1) == RunStep((0, 1))
    lockstep.on_wake(Wake(0, 1))
    assert advance(lockstep, 0, 0) == Sleep()
    lockstep.on_wake(Wake(0, 1))
    assert not lockstep.awake


@pytest.mark.parametrize("wake", [Wake(5, 0), Wake(4, 1), Wake(4, 0), Wake(4, 9)])
def test_a_stale_wake_is_ignored(wake: Wake) -> None:
    lockstep = asleep(epoch=5)
    lockstep.on_wake(wake)
    assert repr(lockstep) == "<Lockstep rank 0/2 epoch 5 step 1 asleep>"


def test_an_early_wake_counts_when_its_step_comes() -> None:
    """The waker knows already that step 0 is a sleep; this instance does not."""
    lockstep = Lockstep(0, 2, 0)
    lockstep.header(0)
    lockstep.on_wake(Wake(0, 1))
    assert advance(lockstep, 0, 0) == Sleep()
    assert lockstep.awake
    assert advance(lockstep, 0, 1) == RunStep((0, 1))
    assert advance(lockstep, 0, 0) == Sleep()
    assert not lockstep.awake  # it counted once


@pytest.mark.parametrize("step", [3, 1000, 2**62])
def test_a_wake_that_no_member_can_send_is_ignored(step: int) -> None:
    sleeper, stepper = asleep(), Lockstep(0, 2, 0)
    sleeper.on_wake(Wake(0, step))
    assert not sleeper.awake
    assert sleeper.wake() == Wake(0, 1)  # the next request wakes its peers
    stepper.on_wake(Wake(0, step))
    assert [advance(stepper, 1, 0), advance(stepper, 0, 0)] == [RunStep((1, 0)), Sleep()]
    assert not stepper.awake


def test_a_wake_for_the_step_under_way_does_not_keep_awake() -> None:
    lockstep = Lockstep(0, 2, 0)
    lockstep.on_wake(Wake(0, 0))
    assert advance(lockstep, 0, 0) == Sleep()
    assert not lockstep.awake


def test_two_wakers_at_once() -> None:
    first, second = asleep(rank=0), asleep(rank=1)
    wakes = first.wake(), second.wake()
    assert wakes == (Wake(0, 1), Wake(0, 1))
    first.on_wake(Wake(0, 1))
    second.on_wake(Wake(0, 1))
    assert {advance(first, 1, 2), advance(second, 1, 2)} == {RunStep((1, 2))}
    assert first.outstanding_wake is second.outstanding_wake is None
    assert {advance(first, 0, 0), advance(second, 0, 0)} == {Sleep()}
    assert not first.awake
    assert not second.awake


def test_work_that_comes_after_the_header_wakes_after_the_sleep() -> None:
    lockstep = Lockstep(0, 2, 0)
    lockstep.header(0)
    assert lockstep.wake() is None  # work is here now, but this step is under way
    assert advance(lockstep, 0, 0) == Sleep()
    assert lockstep.wake() == Wake(0, 1)


# ---- epochs


def test_an_epoch_begins_awake_at_step_0() -> None:
    lockstep = asleep()
    lockstep.wake()
    assert advance(lockstep, 0, 0, ready=(1, 1)) == Switch(1)
    assert repr(lockstep) == "<Lockstep rank 0/2 epoch 1 step 0 awake>"
    assert lockstep.outstanding_wake is None
    assert advance(lockstep, 0, 0) == Sleep()


def test_wakes_of_another_epoch_are_ignored() -> None:
    lockstep = Lockstep(0, 2, 0)
    lockstep.on_wake(Wake(0, 1))
    lockstep.on_wake(Wake(1, 1))
    assert advance(lockstep, 0, 0, ready=(1, 1)) == Switch(1)
    lockstep.on_wake(Wake(0, 1))
    assert advance(lockstep, 0, 0) == Sleep()
    assert not lockstep.awake
    lockstep.on_wake(Wake(1, 1))
    assert lockstep.awake


def test_nobody_sleeps_while_an_epoch_is_pending() -> None:
    lockstep = Lockstep(0, 2, 0)
    assert advance(lockstep, 0, 0, ready=(1, 0)) == RunStep((0, 0))
    assert advance(lockstep, 0, 0, ready=(2, 1)) == RunStep((0, 0))
    assert lockstep.awake
    assert advance(lockstep, 0, 0, ready=(2, 2)) == Switch(2)


@pytest.mark.parametrize(
    ("num_tokens", "queued", "in_flight", "only"),
    [
        ((5, 0, 0), (9, 0, 0), (0, 0, 0), 0),
        ((0, 0, 1), (0, 0, 0), (0, 0, 1), 2),
        ((5, 1, 0), (0, 0, 0), (0, 0, 0), None),
        ((5, 0, 0), (0, 0, 3), (0, 0, 0), None),
        ((5, 0, 0), (0, 0, 0), (0, 1, 0), None),
        ((0, 0, 0), (8, 0, 0), (0, 0, 0), None),
        ((0, 0, 0), (0, 0, 0), (0, 0, 0), None),
    ],
)
def test_one_rank_is_the_only_one_if_no_other_has_anything(
    num_tokens: tuple[int, ...], queued: tuple[int, ...], in_flight: tuple[int, ...], only: int | None
) -> None:
    headers = [
        StepHeader(1, 7, tokens, queued_prefill=waiting, ready_epoch=1, in_flight=under_way)
        for tokens, waiting, under_way in zip(num_tokens, queued, in_flight, strict=True)
    ]
    assert [rank for rank in range(3) if is_only_one(headers, rank)] == ([] if only is None else [only])
