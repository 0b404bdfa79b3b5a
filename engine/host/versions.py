"""Versions that all hosts of an instance's workers must share (loads no package)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("lockstep", "torch", "transformers")


def versions() -> dict[str, str]:
    """As installed here."""
    return {package: _version(package) for package in PACKAGES}


def other_versions(theirs: Mapping[str, str]) -> list[str]:
    """In what another host differs from this one, for people."""
    ours = versions()
    return [
        f"{package} is {theirs.get(package, NOTHING)} there, {ours[package]} here"
        for package in PACKAGES
        if theirs.get(package, NOTHING) != ours[package]
    ]


NOTHING = "not installed"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return NOTHING
