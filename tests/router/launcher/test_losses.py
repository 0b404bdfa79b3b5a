"""What a command reads of the instances that were lost since it began."""

from __future__ import annotations

from router.launcher.losses import MOST_NAMED, MOST_REMEMBERED, Losses


def test_a_command_sees_the_losses_since_it_began() -> None:
    losses = Losses()
    assert losses.since(0) == ""
    losses.note("a")
    before = losses.count
    assert losses.since(before) == ""
    losses.note("b")
    losses.note("c")
    assert losses.since(before) == "b; c"
    assert losses.since(0) == "a; b; c"


def test_the_text_is_bounded() -> None:
    losses = Losses()
    for number in range(2 * MOST_REMEMBERED):
        losses.note(str(number))
    assert losses.since(0) == f"125; 126; 127; and {2 * MOST_REMEMBERED - MOST_NAMED} before"
