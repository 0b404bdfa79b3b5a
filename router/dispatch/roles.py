"""Roles of instances: some compute long prompts, the others go on with them (pure).

A role biases the choice and excludes nothing. Where no instance of the wanted role can take a request, any
other one does. An instance without a role has both.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import Capacity
from router.dispatch.policy import Candidate

PREFILL, DECODE = "prefill", "decode"
"""Values of ``--disaggregation-mode``; an instance without a role has an empty one."""
LONG = 256
"""Tokens to compute from which on a prompt is one for the role ``prefill``.

Shorter ones cost decodes less than their blocks' way would.
"""
FEW = 16
"""Tokens that a request must still want to move after its first one."""


def suited(candidates: Sequence[Candidate], tokens: int, *, decodes: bool) -> Sequence[Candidate]:
    """Candidates whose role fits a request of ``tokens`` tokens; all if none has a role.

    ``decodes``: its tokens come along, or are computed already.
    """
    decoding = [each for each in candidates if role_of(each.capacity) != PREFILL]
    prefilling = [each for each in candidates if role_of(each.capacity) != DECODE]
    if len(decoding) == len(prefilling) == len(candidates):
        return candidates
    missing = min((tokens - each.cached_tokens for each in decoding), default=tokens)
    chosen = decoding if decodes or missing < LONG else prefilling
    return chosen or candidates


def moves_on(capacity: Capacity | None, remaining: int | None) -> bool:
    """Whether a request that has its first token is to leave an instance.

    ``remaining``: tokens that it still wants; None: as many as there is room for.
    """
    return role_of(capacity) == PREFILL and (remaining is None or remaining >= FEW)


def role_of(capacity: Capacity | None) -> str:
    """The role of an instance; empty for none."""
    return capacity.role if capacity is not None else ""
