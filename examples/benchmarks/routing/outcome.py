"""Outcomes of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """Outcome of one request, measured by its client, with times in seconds."""

    arrival: float
    first_token: float = 0.0
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rank: int = 0
    moves: int = 0
