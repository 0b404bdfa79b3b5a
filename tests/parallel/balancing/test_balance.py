from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.balancing.balance import (
    Balanced,
    Terms,
    balance,
    balancedness,
    keep,
    least_copies,
    with_copies,
)
from parallel.placement import Copies, Seats, rank_loads
from parallel.replicas import Replicas, line, serving
from tests.parallel.balancing import deepseek_balance

FREE = Terms(rows_per_move=0.0)
"""Moves cost nothing."""


def seats(size: int, *, room: int = 0, ranks: int = 1, hosts: int = 1) -> Seats:
    return Seats(
        (room,) * size,
        tuple(rank // ranks for rank in range(size)),
        tuple(f"host {rank * hosts // size}" for rank in range(size)),
    )


def dealt(num_experts: int, size: int) -> Copies:
    return tuple((expert * size // num_experts,) for expert in range(num_experts))


def loads_of(chance: random.Random, num_experts: int) -> list[float]:
    """Random rows, or such as Zipf's law has them."""
    if chance.random() < 0.5:
        return [float(chance.randrange(1, 10_000)) for _ in range(num_experts)]
    power = chance.uniform(0.3, 1.6)
    rows = [1e6 / (place + 1) ** power for place in range(num_experts)]
    chance.shuffle(rows)
    return rows


def most(load: Sequence[float], copies: Copies, size: int) -> float:
    return max(rank_loads(load, copies, size))


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_it_is_as_good_as_deepseeks_algorithm_and_moves_fewer_experts(count: int) -> None:
    """Loads are random or as in Zipf's law, each after another one."""
    chance, ratios, moves, theirs = random.Random(5), [], 0, 0
    for _ in range(count):
        size = chance.choice([2, 4, 8, 16])
        num_experts = chance.choice([16, 32, 64])
        redundant = chance.choice([0, size, 2 * size])
        terms = Terms(num_redundant=redundant, rows_per_move=0.0, least_gain=0.005, deviations=0.0)
        load = loads_of(chance, num_experts)
        held = balance([load], [dealt(num_experts, size)], seats(size), terms).layers[0]
        _, their_held = deepseek_balance.rank_loads(load, num_experts + redundant, size)
        then = [max(0.0, rows * chance.uniform(0.5, 1.5)) for rows in load]
        found = balance([then], [held], seats(size), terms)  # from the places of before
        loads, next_held = deepseek_balance.rank_loads(then, num_experts + redundant, size)
        ratios.append(most(then, found.layers[0], size) / max(loads))
        moves += found.moves
        theirs += sum(len(after - before) for after, before in zip(next_held, their_held, strict=True))
    mean = sum(ratios) / count
    print(f"{count} loads: greatest load over theirs {mean:.3f} in the mean, at most {max(ratios):.3f}; "
          f"{moves} moves, theirs {theirs}")  # fmt: skip
    assert max(ratios) <= 1.02
    assert mean < 1
    assert moves < 0.5 * theirs


def test_a_layer_that_is_even_enough_stays_as_it_is() -> None:
    chance, held = random.Random(1), dealt(32, 4)
    even = [[float(round(chance.gauss(1000, 1000**0.5))) for _ in range(32)] for _ in range(10)]
    found = balance(even, [held] * 10, seats(4), Terms(rows_per_move=0.0))
    assert (found.layers, found.moves) == ((held,) * 10, 0)


def test_what_does_not_pay_does_not_move() -> None:
    load, held = [4000.0, 3000.0, 100.0, 100.0], dealt(4, 2)
    found = balance([load], [held], seats(2), Terms(horizon=1.0))
    assert found.moves == 2, "two rows in three fewer for the slowest"
    assert balance([load], [held], seats(2), Terms(horizon=0.5)).moves == 0
    assert balance([[0.0] * 4], [held], seats(2), FREE).moves == 0
    assert balance([[4.0, 3.0, 0.0, 0.0]], [held], seats(2), FREE).moves == 0, "a few rows are chance"


def test_no_more_moves_than_allowed_and_the_best_first() -> None:
    slight, strong = [3000.0, 2000.0, 1000.0, 1000.0], [9000.0, 9000.0, 10.0, 10.0]
    layers, held = [slight, strong, slight], [dealt(4, 2)] * 3
    bounded = balance(layers, held, seats(2), Terms(rows_per_move=0.0, most_moves=2))
    assert bounded.moves == 2
    assert [new == old for new, old in zip(bounded.layers, held, strict=True)] == [True, False, True]
    assert bounded.before < bounded.after
    free = balance(layers, held, seats(2), FREE)
    assert free.moves == 6
    assert free.after > 0.94, "no other places are better"


def test_an_expert_with_most_of_the_load_gets_copies() -> None:
    load = [9000.0, 1000.0, 1000.0, 1000.0]
    found = balance([load], [dealt(4, 4)], seats(4), Terms(num_redundant=4, rows_per_move=0.0))
    (copies,) = found.layers
    assert copies[0] == (0, 1, 2, 3)
    assert found.after > 0.9
    assert all(sum(rank in ranks for ranks in copies) == 2 for rank in range(4))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("instances", [2, 3, 4])
@pytest.mark.parametrize("redundant", [0, 1, 4, 5, 8, 11])
def test_copies_before_any_load_are_even_and_on_other_instances(
    redundant: int, instances: int, ranks: int
) -> None:
    where, held = seats(instances * ranks, ranks=ranks), dealt(8, instances * ranks)
    copies = with_copies(held, where, Terms(num_redundant=redundant))
    total = min(8 + redundant, 8 * where.size)
    assert sum(map(len, copies)) == total
    assert {len(each) for each in copies} <= {total // 8, -(-total // 8)}
    assert max(sum(rank in each for each in copies) for rank in range(where.size)) == -(-total // where.size)
    read = sum(len(set(after) - set(before)) for before, after in zip(held, copies, strict=True))
    assert read == total - 8, "all stay where they are"
    if redundant <= 8 * (instances - 1):
        apart = [{where.instances[rank] for rank in each} for each in copies]
        assert [len(each) for each in apart] == [len(each) for each in copies], "a death takes one of them"


def test_a_join_before_any_load_leaves_copies_even() -> None:
    terms = Terms(num_redundant=4)
    held = with_copies(dealt(8, 3), seats(3), terms)
    found = balance([[0.0] * 8], [held], seats(4), terms)
    assert sorted(map(len, found.layers[0])) == [1] * 4 + [2] * 4
    assert found.moves <= 3, "the newcomer's share"


def rows_between_hosts(load: Sequence[float], copies: Copies, where: Seats) -> float:
    """Rows that one host computes for another, where all ranks have as many."""
    found = 0.0
    for rows, ranks in zip(load, copies, strict=True):
        for place in range(where.size):
            owner = serving(ranks, place, where.size)
            found += rows / where.size * (where.hosts[owner] != where.hosts[place])
    return found


def test_copies_are_on_both_hosts_so_that_fewer_rows_go_between_them() -> None:
    chance, blind, aware, spread, several = random.Random(3), 0.0, 0.0, 0, 0
    where = seats(4, hosts=2)
    for _ in range(20):
        load = sorted((1e5 / (place + 1) for place in range(16)), key=lambda _: chance.random())
        terms = Terms(num_redundant=8, rows_per_move=0.0)
        (of_one,) = balance([load], [dealt(16, 4)], seats(4), terms).layers
        found = balance([load], [dealt(16, 4)], where, terms)
        assert found.after > 0.98
        blind += rows_between_hosts(load, of_one, where)
        aware += rows_between_hosts(load, found.layers[0], where)
        hosts = [{where.hosts[rank] for rank in ranks} for ranks in found.layers[0] if len(ranks) > 1]
        spread, several = spread + sum(len(each) == 2 for each in hosts), several + len(hosts)
    assert spread > 0.85 * several
    assert aware < 0.95 * blind


def test_no_swap_for_the_load_brings_all_copies_of_an_expert_to_one_instance() -> None:
    chance, where = random.Random(7), seats(6, ranks=2)
    terms = Terms(num_redundant=12, survive=1, rows_per_move=0.0)
    for _ in range(30):
        load = loads_of(chance, 12)
        (copies,) = balance([load], [dealt(12, 6)], where, terms).layers
        assert all(len({where.instances[rank] for rank in ranks}) > 1 for ranks in copies), load


def test_where_each_expert_is_twice_a_death_reads_nothing() -> None:
    terms = Terms(num_redundant=8, survive=1, rows_per_move=0.0)
    for ranks in (1, 2):
        where = seats(3 * ranks, ranks=ranks)
        held = balance([[0.0] * 8], [dealt(8, where.size)], where, terms).layers
        assert least_copies(8, where, terms) == 2
        for dead in range(3):
            left = [
                [tuple(rank for rank in holders if rank // ranks != dead) for holders in layer]
                for layer in held
            ]
            assert all(holders for layer in left for holders in layer), "on two instances"


def test_copies_for_a_death_yield_to_room() -> None:
    assert least_copies(8, seats(2, room=7), Terms(num_redundant=8, survive=1)) == 1
    assert least_copies(8, seats(2, room=8), Terms(num_redundant=8, survive=1)) == 2
    assert least_copies(8, seats(2), Terms(num_redundant=7, survive=1)) == 1
    assert least_copies(8, seats(1), Terms(num_redundant=8, survive=1)) == 1
    uneven = Seats((0, 0, 1), (0, 0, 1), ("h",) * 3)
    assert least_copies(2, uneven, Terms(num_redundant=2, survive=1)) == 1, "one instance lacks room for both"
    held: Copies = ((0, 1, 2), (0, 1, 2))
    (copies,) = balance([[0.0, 0.0]], [held], uneven, Terms(num_redundant=2, survive=1)).layers
    assert sum(2 in ranks for ranks in copies) == 1, "who has too many gives some away"
    with pytest.raises(ValueError, match="8 experts do not fit"):
        balance([[0.0] * 8], [dealt(8, 2)], seats(2, room=3), FREE)


def test_after_a_loss_all_stay_and_what_is_missing_goes_to_those_with_fewest() -> None:
    held: Copies = ((0, 1), (), (0,), (0,), (), (1,))
    (kept,) = keep([held], [0, 0])
    assert kept == ((0, 1), (1,), (0,), (0,), (0,), (1,))
    (tight,) = keep([held], [3, 3])
    assert tight == ((1,), (1,), (0,), (0,), (0,), (1,)), "a second copy gives way"
    with pytest.raises(ValueError, match="do not fit"):
        keep([held], [3, 2])


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], Copies, Seats, Terms]:
    num_experts, size = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(0, 5000), min_size=num_experts, max_size=num_experts))
    ranks = st.sets(st.integers(0, size - 1)).map(lambda found: tuple(sorted(found)))
    held = draw(st.lists(ranks, min_size=num_experts, max_size=num_experts))
    room = draw(st.lists(st.integers(0, num_experts), min_size=size, max_size=size))
    each = draw(st.sampled_from([1, 2]))
    where = Seats(tuple(room), tuple(rank // each for rank in range(size)), ("a",) * size)
    terms = Terms(
        num_redundant=draw(st.integers(0, 12)),
        survive=draw(st.integers(0, 2)),
        rows_per_move=draw(st.sampled_from([0.0, 1000.0])),
    )
    return [float(each) for each in rows], tuple(held), where, terms


@settings(max_examples=300)
@given(layers())
def test_whatever_is_held_all_is_served_within_room(layer: tuple[list[float], Copies, Seats, Terms]) -> None:
    load, held, where, terms = layer
    limits = [room or len(load) for room in where.room]
    if sum(limits) < len(load):
        with pytest.raises(ValueError, match="do not fit"):
            balance([load], [held], where, terms)
        return
    found = balance([load], [held], where, terms)
    assert found == balance([load], [held], where, terms)
    (copies,) = found.layers
    assert all(copies)
    assert all(list(ranks) == sorted(set(ranks)) for ranks in copies)
    for rank, limit in enumerate(limits):
        assert sum(rank in ranks for ranks in copies) <= limit
    assert found.moves == sum(len(set(new) - set(old)) for new, old in zip(copies, held, strict=True))
    if sum(limits) >= len(load) * len(limits):  # room for all: nothing stands in the way of copies
        least = least_copies(len(load), where, terms)
        assert all(len({where.instances[rank] for rank in ranks}) >= least for ranks in copies)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_copies_serve_equal_spans_of_the_line(sizes: list[int], data: st.DataObject) -> None:
    size = len(sizes)
    copies = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    places = line(sizes)
    total = places[-1]
    served = [serving(copies, place, total) for place in range(total)]
    assert served == sorted(served), "in the order of ranks"
    counts = [served.count(rank) for rank in copies]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    from parallel.placement import Placement

    replicas = Replicas(Placement((), size, ((tuple(copies), (0,)),)), 0)
    import numpy as np

    found = replicas.owners(0, np.zeros(total, dtype=np.int64), np.arange(total), total)
    assert found.tolist() == served


def test_members_with_a_copy_serve_their_own_rows() -> None:
    places = line([4, 4])
    assert [serving((0, 1), place, 8) for place in range(places[0], places[1])] == [0] * 4
    assert [serving((0, 1), place, 8) for place in range(places[1], places[2])] == [1] * 4
    assert [serving((0, 1), place, 40) for place in range(10, 40)] == [0] * 10 + [1] * 20, "no more than half"


def test_balancedness() -> None:
    assert balancedness([(1.0, 2.0), (3.0, 3.0)]) == 0.8
    assert balancedness([]) == balancedness([(0.0, 0.0)]) == 1.0
    assert isinstance(balance([], [], seats(2), FREE), Balanced)
