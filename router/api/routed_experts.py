"""Experts of the tokens of a sample, in the forms that clients want (pure)."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence

from engine.messages import NO_EXPERT
from router.openai_api import RoutedLists
from router.text.output_stream import OutputStream

NO_EXPERT_HERE = -1
"""Stands for a layer that is no mixture where all layers have as many numbers."""


def readers_of(samples: Sequence[OutputStream]) -> list[RoutedReader]:
    """A reader for each sample, by its index."""
    return [RoutedReader(sample) for sample in samples]


class RoutedReader:
    """Experts of one sample, whose parts are given once."""

    def __init__(self, sample: OutputStream) -> None:
        self._sample = sample
        self._given = 0
        """Tokens that were given so far."""

    def __repr__(self) -> str:
        return f"<RoutedReader of {self._sample!r}, {self._given} tokens given>"

    def new_lists(self) -> RoutedLists:
        """Experts of the tokens that were not given yet, by token and layer."""
        numbers, num_layers, top_k = self._numbers(self._given)
        found: RoutedLists = []
        for token in range(0, len(numbers), num_layers * top_k or 1):
            layers = (numbers[at : at + top_k] for at in range(token, token + num_layers * top_k, top_k))
            found.append([None if layer[0] == NO_EXPERT else layer.tolist() for layer in layers])
        self._given += len(found)
        return found

    def encoded(self) -> str:
        """All experts in SGLang's form.

        That is base64 of 32-bit integers [tokens, layers, experts of a token].
        """
        numbers, _, _ = self._numbers(0)
        wide = array("i", (NO_EXPERT_HERE if each == NO_EXPERT else each for each in numbers))
        return base64.b64encode(wide.tobytes()).decode()

    def _numbers(self, first: int) -> tuple[array[int], int, int]:
        """Numbers of experts from a token on; layers; experts of a token.

        Those of tokens behind a stop string are left out.
        """
        parts, num_prompt = self._sample.routed, len(self._sample.prompt.prompt_ids)
        found, num_layers, top_k = array("H"), 0, 0
        end = num_prompt + max(1, self._sample.num_tokens) - 1
        for part in parts:
            num_layers, top_k = part.num_layers, part.top_k
            if part.end > first and part.first < end:
                found.frombytes(part.between(first, end).ids)
        return found, num_layers, top_k
