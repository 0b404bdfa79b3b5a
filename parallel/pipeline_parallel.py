"""Layers of each pipeline stage (pure: no torch).

A stage holds a run of neighbouring layers; the first one the embedding, too, the last one the final norm
and the output layer. Splits are counts of layers per stage, first stage first.
"""

from __future__ import annotations

from collections.abc import Sequence


def parse_split(text: str) -> tuple[int, ...]:
    """Layer counts of a text like ``10,12,10``.

    Raises:
        ValueError: it is not a list of positive numbers.
    """
    try:
        split = tuple(int(part) for part in text.split(","))
    except ValueError:
        split = ()
    if not split or min(split) < 1:
        raise ValueError(f"{text!r} is no list of layers per stage: write it like 10,12,10, none below 1")
    return split


def check_split(split: Sequence[int] | None, num_layers: int, num_stages: int) -> None:
    """Refuse a split that does not fit the model; None chooses the best.

    Raises:
        ValueError: too many stages, or a split of other layers or another number of stages.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"{num_stages} pipeline stages are more than the {num_layers} layers of the model: use at most "
            f"{num_layers}"
        )
    if split is None:
        return
    named = ",".join(map(str, split))
    if len(split) != num_stages:
        raise ValueError(f"the split {named} is for {len(split)} stages, but there are {num_stages}")
    if sum(split) != num_layers:
        raise ValueError(f"the split {named} adds up to {sum(split)} layers, but the model has {num_layers}")


def layers_of(split: Sequence[int], stage: int) -> range:
    """Numbers of the layers of one stage."""
    first = sum(split[:stage])
    return range(first, first + split[stage])


def balanced_split(layers: Sequence[int], first: int, last: int, num_stages: int) -> tuple[int, ...]:
    """The split whose largest stage is as small as can be.

    Args:
        layers: size of each layer, its number of parameters.
        first: what comes on top on the first stage (the embedding).
        last: the same on the last stage (norm and output layer).

    Among equals, the one whose earlier stages are filled less, since each of them also holds the
    activations of more micro-batches in flight.
    """
    check_split(None, len(layers), num_stages)
    # best[s][n]: the smallest largest stage when the last s stages hold all layers from n on.
    total = len(layers)
    sums = [0]
    for size in layers:
        sums.append(sums[-1] + size)
    infinite = sums[-1] + first + last + 1
    best = [[infinite] * (total + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (total + 1) for _ in range(num_stages + 1)]
    for left in range(1, num_stages + 1):
        extra = (last if left == 1 else 0) + (first if left == num_stages else 0)
        for begin in range(total - left + 1):
            ends = [total] if left == 1 else range(begin + 1, total - left + 2)
            for end in ends:
                rest = 0 if left == 1 else best[left - 1][end]
                largest = max(sums[end] - sums[begin] + extra, rest)
                if largest < best[left][begin]:
                    best[left][begin], cut[left][begin] = largest, end
    split, begin = [], 0
    for left in range(num_stages, 0, -1):
        end = cut[left][begin]
        split.append(end - begin)
        begin = end
    return tuple(split)
