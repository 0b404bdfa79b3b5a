"""The files in ``deploy/`` and what they ask ``serve`` for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.settings.flags import parse
from router.config import ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def serve_config(arguments: Sequence[str]) -> ServeConfig:
    """The settings that a command line of ``serve`` means."""
    return parse(ServeConfig, list(arguments), prog="serve", description="")
