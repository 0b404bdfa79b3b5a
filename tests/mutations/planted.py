"""The page of planted bugs: what each breaks, and which tests must find it.

``page/`` has a file per area, in TOML. A bug replaces a text that occurs once in its file. It is a slip that
somebody could make: an off-by-one, a turned comparison, a check that is left out. Read by the runner
(:mod:`tests.mutations.__main__`) and by the test that keeps the page true.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).parent / "page"


class PlantedBug(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bug of an area's file."""

    breaks: str
    """What is broken, in a sentence."""
    file: str
    """Path from the root of the project."""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: list[str]
    """Node ids of the tests that must fail, without parameters."""

    def problem_in(self, text: str) -> str | None:
        """Why the bug cannot be planted in this text; None if it can."""
        count = text.count(self.old)
        if count != 1:
            return f"{self.file} has {self.old!r} {count} times"
        return None if self.old != self.new else f"nothing changes in {self.file}"

    def planted_in(self, text: str) -> str:
        """The text with the bug."""
        return text.replace(self.old, self.new)


class _Area(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bug: list[PlantedBug]


def areas(page: Path = PAGE) -> dict[str, list[PlantedBug]]:
    """The planted bugs by area."""
    return {
        path.stem: msgspec.toml.decode(path.read_text(), type=_Area).bug
        for path in sorted(page.glob("*.toml"))
    }
