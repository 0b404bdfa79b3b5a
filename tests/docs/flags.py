"""Writes the tables of flags of other systems in docs/use: ``python -m tests.docs.flags``.

The tables of both pages hold every flag of :mod:`router.launcher.foreign_flags`, with the words of that module.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.settings.foreign import Foreign
from router.launcher.foreign_flags import FOREIGN

USE = Path(__file__).parents[2] / "docs" / "use"
MARK = "<!-- made by python -m tests.docs.flags -->"
"""Line of each page after which this writes."""


def tables() -> dict[Path, str]:
    """Markdown below the mark of each page, by page."""
    named = [(flag.here, _name(flag)) for flag in FOREIGN if flag.here]
    refused = [(flag.instead, _with_harmless(flag)) for flag in FOREIGN if flag.instead]
    ignored = [
        (flag.why, " ".join((f"--{flag.name}", *flag.shorts))) for flag in FOREIGN if flag.harmless is None
    ]
    assert len(named) + len(refused) + len(ignored) == len(FOREIGN)
    others = [
        "## Flags that are refused",
        "",
        "`serve` exits with status 2 and `--FLAG VALUE is not possible: REASON`. Values in parentheses change",
        "nothing: they are ignored with a warning. So is `--no-` before a flag without a value.",
        "",
        *_table("reason", "flags", refused),
        "",
        "## Flags that are ignored",
        "",
        "`serve` warns `--FLAG VALUE ignored: REASON`.",
        "",
        *_table("reason", "flags", ignored, one_span=True),
    ]
    return {
        USE / "coming-from-vllm.md": "\n".join(_table("here", "elsewhere", named, code=True)) + "\n",
        USE / "foreign-flags.md": "\n".join(others) + "\n",
    }


def _table(
    left: str, right: str, pairs: list[tuple[str, str]], *, code: bool = False, one_span: bool = False
) -> list[str]:
    """A table with a row for each left cell.

    Its flags are one code span, if asked.
    """
    rows: dict[str, list[str]] = {}
    for key, flag in pairs:
        rows.setdefault(key, []).append(flag)
    lines = [f"| {left} | {right} |", "|---|---|"]
    for key, flags in rows.items():
        names = " ".join(flags)
        lines.append(f"| {f'`{key}`' if code else key} | {f'`{names}`' if one_span else names} |")
    return lines


def _name(flag: Foreign) -> str:
    return " ".join(f"`{name}`" for name in (f"--{flag.name}", *flag.shorts))


def _with_harmless(flag: Foreign) -> str:
    values = [value for value in flag.harmless or () if value]
    if flag.is_switch or not values:
        return _name(flag)
    return f"{_name(flag)} ({', '.join(f'`{value}`' for value in values)})"


def written(page: Path, text: str) -> str:
    """The page with this text below its mark."""
    before = page.read_text()
    return f"{before[: before.index(MARK)]}{MARK}\n\n{text}"


if __name__ == "__main__":
    for path, below in tables().items():
        path.write_text(written(path, below))
