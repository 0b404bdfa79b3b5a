"""Versions that all hosts of an instance's workers must share (loads no package)."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.distribution import DISTRIBUTION, NOT_INSTALLED, installed_version

PACKAGES = {"lockstep": DISTRIBUTION, "torch": "torch", "transformers": "transformers"}
"""Distribution names of the packages whose versions hosts compare."""


def versions() -> dict[str, str]:
    """Installed versions on this host."""
    return {package: installed_version(distribution) for package, distribution in PACKAGES.items()}


def other_versions(theirs: Mapping[str, str]) -> list[str]:
    """Differences of another host from this one, as readable text."""
    ours = versions()
    return [
        f"{package} is {theirs.get(package, NOT_INSTALLED)} there, {ours[package]} here"
        for package in PACKAGES
        if theirs.get(package, NOT_INSTALLED) != ours[package]
    ]
