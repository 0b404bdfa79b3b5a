"""Roles of instances: some compute long prompts, the others go on with them (pure).

A role biases the choice and excludes nothing. Where no instance of the wanted role can take a request, any
other one does. A mixed instance has both.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.messages import Role
from router.dispatch.policy import Candidate

LONG = 256
"""Tokens to compute from which on a prompt is one for the role ``prefill``.

Shorter ones cost decodes less than their blocks' way would.
"""
FEW = 16
"""Tokens that a request must still want to move after its first one."""


def suited(
    candidates: Sequence[Candidate], tokens: int, *, decodes: bool, images_end: int = 0
) -> Sequence[Candidate]:
    """Candidates whose role fits a request of ``tokens`` tokens; all if all are mixed.

    ``decodes``: its tokens come along, or are computed already. ``images_end``: where its last image ends.
    Encoding an image costs decodes more than a long prompt does, so it is for the role ``prefill``, too.
    """
    decoding = [each for each in candidates if each.role is not Role.PREFILL]
    prefilling = [each for each in candidates if each.role is not Role.DECODE]
    if len(decoding) == len(prefilling) == len(candidates):
        return candidates
    missing = min((tokens - each.cached_tokens for each in decoding), default=tokens)
    encodes = tokens - missing < images_end
    chosen = decoding if decodes or (missing < LONG and not encodes) else prefilling
    return chosen or candidates


def moves_on(role: Role, remaining: int | None) -> bool:
    """Whether a request that has a token is to leave an instance of this role.

    ``remaining``: tokens that it still wants; None: as many as there is room for.
    """
    return role is Role.PREFILL and (remaining is None or remaining >= FEW)
