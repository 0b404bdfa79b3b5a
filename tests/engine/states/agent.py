"""An agent's run: a long history that grows each turn, with two branches.

``python -m tests.engine.states.agent qwen3_next`` prints what each turn computes, and the memory of states.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from engine.messages import Submit
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import PEER, Answer, How, Instance, load, run, step
from tests.engine.states.models import LONGEST, SHIPPED_VOCAB, make_servable_model
from tests.engine.tiny_models import make_tiny_model

FIRST_TOKEN = 4
"""Tokens before it are special ones."""
ATTENTION = "llama"
"""Family without recurrent states that others are compared with."""
HISTORY, GROWTH, ANSWER, TURNS, BRANCHES = 6000, 300, 8, 10, 2
"""Tokens before the first turn, per turn and per answer; turns of a branch."""


LENGTHS = (100, 1000, HISTORY)
"""Contexts whose states are counted."""


class Turn(NamedTuple):
    """One request of an agent."""

    prompt: int
    """Tokens of its prompt."""
    computed: int
    """Tokens that were computed for it, its answer among them."""


def load_served(directory: Path, family: str) -> Instance:
    """A tiny model of a family in bfloat16, with long contexts."""
    if family == ATTENTION:
        make_tiny_model(
            directory,
            family,
            dtype=torch.bfloat16,
            vocab_size=SHIPPED_VOCAB,
            max_position_embeddings=LONGEST,
        )
    else:
        make_servable_model(directory, family)
    return load(directory)


def agent_turns(instance: Instance) -> list[Turn]:
    """All turns of a run, those of the branches one by one."""
    chance, turns = random.Random(1), []
    core = instance.core(How(cache=32768, states=64, longest=LONGEST))
    counters = core.scheduler.counters

    def text(count: int) -> list[int]:
        return [chance.randrange(FIRST_TOKEN, SHIPPED_VOCAB) for _ in range(count)]

    def turn(history: Sequence[int]) -> list[int]:
        """The history with this turn's answer."""
        before = counters().scheduled_tokens
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        submit = Submit(len(turns), "turn", list(history), params, 0)
        answer = run(core, [submit])[submit.request].token_ids
        turns.append(Turn(len(history), counters().scheduled_tokens - before))
        return [*history, *answer]

    histories = [turn(text(HISTORY))] * BRANCHES
    for _ in range(TURNS):
        histories = [turn([*each, *text(GROWTH - ANSWER)]) for each in histories]
    return turns


def held_states(instance: Instance, length: int) -> int:
    """Most slots of states that a request of so many tokens holds."""
    core = instance.core(How(cache=32768, states=64, longest=LONGEST))
    prompt = [FIRST_TOKEN + number % 1000 for number in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=2 * grid_of(instance), ignore_eos=True)
    found = {0: Answer()}
    assert core.submit(PEER, Submit(0, "held", prompt, params, 0)) is None
    most = 0
    while not core.is_empty:
        step(core, found, lambda: None)
        if found[0].token_ids:
            most = max(most, sum(core.pool.num_holders(slot) > 0 for slot in core.pool.kinds.slots_of(1)))
    return most


def state_bytes_of(instance: Instance) -> int:
    """Bytes of one state, with the inputs that are kept beside it."""
    assert instance.facts is not None
    (kind,) = instance.facts.boundaries
    return kind.num_bytes


def grid_of(instance: Instance) -> int:
    """Tokens between two kept states of a model."""
    assert instance.facts is not None
    (kind,) = instance.facts.boundaries
    return kind.grid


def main(family: str) -> None:
    """Print the turns of a family beside those of attention alone."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        attention = agent_turns(load_served(Path(directory) / ATTENTION, ATTENTION))
        instance = load_served(Path(directory) / family, family)
        turns = agent_turns(instance)
    print(f"turn  prompt  computed: {ATTENTION:>8} {family:>12}")
    for number, (one, other) in enumerate(zip(attention, turns, strict=True)):
        print(f"{number:4} {one.prompt:7} {one.computed:18} {other.computed:12}")
    more = [other.computed - one.computed for one, other in zip(attention, turns, strict=True)]
    print(f"more tokens than with attention alone: {max(more)} at most in a turn, {sum(more)} in all turns")
    print(f"tokens between two states: {grid_of(instance)}")
    for length in LENGTHS:
        kib = held_states(instance, length) * state_bytes_of(instance) / 1024
        print(f"state of a running request of {length} tokens: {kib:.1f} KiB")


if __name__ == "__main__":
    main(sys.argv[1])
