from __future__ import annotations

from engine.groups.expert_loads import LoadWindows


def test_windows_are_the_same_for_all_whose_steps_are() -> None:
    windows, counts = LoadWindows(3), [[0, 0], [5, 0]]
    windows.entered(4, [list(layer) for layer in counts])
    found = []
    for _ in range(7):
        loads = windows.stepped(lambda: [list(layer) for layer in counts])
        found.append(None if loads is None else (loads.epoch, loads.number, loads.rows))
        counts[0][1] += 2
        counts[1][0] += 1
    assert found == [
        None, None, None, (4, 1, ((0, 6), (3, 0))), None, None, (4, 2, ((0, 6), (3, 0))),
    ]  # fmt: skip


def test_another_group_begins_windows_anew() -> None:
    windows = LoadWindows(2)
    windows.entered(4, [[0]])
    assert windows.stepped(lambda: [[9]]) is None
    windows.entered(5, [[10]])
    assert windows.stepped(lambda: [[12]]) is None
    assert windows.stepped(lambda: [[14]]) is None
    loads = windows.stepped(lambda: [[16]])
    assert loads is not None
    assert (loads.epoch, loads.number, loads.rows) == (5, 1, ((6,),))


def test_counts_that_are_not_there_yet_make_no_window() -> None:
    windows = LoadWindows(1)
    windows.entered(1, [])
    assert windows.stepped(lambda: [[1]]) is None
    assert windows.stepped(lambda: [[2]]) is None, "the first counts that came are what the next begins with"
    loads = windows.stepped(lambda: [[5]])
    assert loads is not None
    assert loads.rows == ((3,),)
