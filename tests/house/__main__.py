"""Prints the measures of the house: ``python -m tests.house [--check] [--all]``.

With ``--check`` it fails where a measure is above its limit. Limits only go down.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import NamedTuple

from tests.house import measures
from tests.house.measures import Found
from tests.house.subjects import long_subjects
from tests.house.writing import wrong_texts

SHOWN = 5
"""Items that are shown of each measure."""


class Measure(NamedTuple):
    """One measure, and how many things it may find."""

    title: str
    find: Callable[[], list[Found]]
    limit: int
    """Most items today."""
    goal: int
    """Where it shall go."""


MEASURES = [
    Measure("classes over 25 methods", lambda: measures.large_classes(25), 0, 0),
    Measure("functions over 60 lines", lambda: measures.long_functions(60), 0, 0),
    Measure("constructors over 7 parameters", lambda: measures.wide_constructors(7), 0, 0),
    Measure("class names used more than once", measures.repeated_names, 1, 1),
    Measure("pairs of places that share six lines", measures.repeated_lines, 10, 10),
    Measure("folders over 25 modules", lambda: measures.crowded_folders(25), 0, 0),
    Measure("rooms over 5,000 lines", lambda: measures.large_rooms(5000), 0, 0),
    Measure("pages", measures.pages, 84, 84),
    Measure("pages over 12 KB", lambda: [page for page in measures.pages() if page.size > 12 << 10], 0, 0),
    Measure("texts against the rules of writing", wrong_texts, 0, 0),
    Measure("commit subjects over 72 characters", long_subjects, 0, 0),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a measure is above its limit")
    parser.add_argument("--all", action="store_true", help="show all items of each measure")
    options = parser.parse_args(arguments)
    failed = False
    for title, find, limit, goal in MEASURES:
        found = find()
        over = len(found) > limit
        failed |= over
        print(f"{len(found):4} {title} (at most {limit}, goal {goal}){'  TOO MANY' if over else ''}")
        shown = found if options.all else found[:SHOWN] if over or not options.check else []
        for each in shown:
            print(f"       {each.size:5}  {each.where}")
    return int(failed and options.check)


if __name__ == "__main__":
    gc.disable()  # all syntax trees stay to the end, and collections would go through them again and again
    sys.exit(main())
