"""Writes the tables of docs/use/coming-from-vllm.md: ``python -m tests.docs.flags``.

The tables hold every flag of :mod:`router.launcher.foreign_flags`, with the words of that module.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.settings.foreign import Foreign
from router.launcher.foreign_flags import FOREIGN

PAGE = Path(__file__).parents[2] / "docs" / "use" / "coming-from-vllm.md"
MARK = "<!-- made by python -m tests.docs.flags -->"
"""Line of the page after which this writes."""


def tables() -> str:
    """Three tables in Markdown: flags with another name here, flags that are refused, flags that are ignored."""
    named = [(flag.here, _name(flag)) for flag in FOREIGN if flag.here]
    refused = [(flag.instead, _with_harmless(flag)) for flag in FOREIGN if flag.instead]
    ignored = [(flag.why, _name(flag)) for flag in FOREIGN if flag.harmless is None]
    assert len(named) + len(refused) + len(ignored) == len(FOREIGN)
    return "\n".join(
        [
            "## Flags with another name here",
            "",
            *_table("here", "elsewhere", named, code=True),
            "",
            "## Flags that are refused",
            "",
            "`serve` exits with status 2 and `--FLAG VALUE is not possible: REASON`. Values in parentheses change",
            "nothing, and are ignored with a warning; so is `--no-` before a flag that takes no value.",
            "",
            *_table("reason", "flags", refused),
            "",
            "## Flags that are ignored",
            "",
            "`serve` logs the warning `--FLAG VALUE ignored: REASON`.",
            "",
            *_table("reason", "flags", ignored),
        ]
    ) + "\n"  # fmt: skip


def _table(left: str, right: str, pairs: list[tuple[str, str]], *, code: bool = False) -> list[str]:
    """A row for each different left cell, with all its flags."""
    rows: dict[str, list[str]] = {}
    for key, flag in pairs:
        rows.setdefault(key, []).append(flag)
    lines = [f"| {left} | {right} |", "|---|---|"]
    for key, flags in rows.items():
        lines.append(f"| {f'`{key}`' if code else key} | {', '.join(flags)} |")
    return lines


def _name(flag: Foreign) -> str:
    return ", ".join(f"`{name}`" for name in (f"--{flag.name}", *flag.shorts))


def _with_harmless(flag: Foreign) -> str:
    values = [value for value in flag.harmless or () if value]
    if flag.is_switch or not values:
        return _name(flag)
    return f"{_name(flag)} ({', '.join(f'`{value}`' for value in values)})"


def written(page: str) -> str:
    """The page with new tables below its mark."""
    return f"{page[: page.index(MARK)]}{MARK}\n\n{tables()}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
