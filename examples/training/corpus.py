"""The text: six novels out of a Debian package, as chapters of paragraphs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from examples.training.r_data import read_lazy_database

PACKAGE = "r-cran-janeaustenr"
NOVELS = {
    "sensesensibility": "Sense and Sensibility",
    "prideprejudice": "Pride and Prejudice",
    "mansfieldpark": "Mansfield Park",
    "emma": "Emma",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
}

VALIDATION_SHARE = 0.02

HEADING = re.compile(r"^(chapter|volume)\s+([ivxlc]+|\d+)\.?$", re.IGNORECASE)
CLOSING = re.compile(r"^(the end|finis|end of .*)\.?$", re.IGNORECASE)
#: Heads the publisher's own words at the end of one novel.
COLOPHON = "A NOTE ON THE TEXT"


def chapters_of(lines: list[str]) -> list[list[str]]:
    """The chapters of one novel, each a list of paragraphs whose wrapped lines are joined."""
    chapters: list[list[str]] = []
    paragraph: list[str] = []

    def close() -> None:
        if paragraph and chapters and not CLOSING.match(paragraph[0]):
            text = re.sub(r"\s+", " ", " ".join(paragraph)).replace("_", "")
            chapters[-1].append(re.sub(r"(\w)-- (\w)", r"\1--\2", text))
        paragraph.clear()

    for line in [*lines, ""]:
        line = line.strip()
        if HEADING.match(line):
            close()
            chapters.append([])
        elif line:
            paragraph.append(line)
        else:
            close()
    return [chapter for chapter in chapters if chapter]


def stage_text(work: Path, deb: Path | None) -> None:
    """Write ``text/<novel>.txt``: paragraphs divided by blank lines, chapters by form feeds."""
    unpacked = work / "package"
    unpacked.mkdir(parents=True, exist_ok=True)
    if deb is None:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=work, check=True)
        deb = max(work.glob(f"{PACKAGE}_*.deb"), key=lambda path: path.stat().st_mtime)
    subprocess.run(["dpkg", "-x", str(deb), str(unpacked)], check=True)
    database = next(unpacked.glob("usr/lib/R/site-library/*/data/Rdata.rdx")).with_suffix("")
    objects = read_lazy_database(database)
    (work / "text").mkdir(exist_ok=True)
    for name, title in NOVELS.items():
        chapters = chapters_of([line or "" for line in objects[name]])
        text = "\f".join("\n\n".join(chapter) for chapter in chapters)
        (work / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{title}: {len(chapters)} chapters, {len(text):,} characters", flush=True)


@dataclass
class Corpus:
    """Chapters (lists of paragraphs) for training, and each novel's held-out end as text."""

    chapters: list[list[str]] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)


def load_corpus(work: Path) -> Corpus:
    """Read the text files.

    The last ~2% of each novel, from a paragraph's beginning, is held out.
    """
    corpus = Corpus()
    for name in NOVELS:
        chapters = [c.split("\n\n") for c in (work / "text" / f"{name}.txt").read_text("utf-8").split("\f")]
        wanted = VALIDATION_SHARE * sum(len(p) for chapter in chapters for p in chapter)
        held: list[str] = []
        while sum(map(len, held)) < wanted:
            if not chapters[-1]:
                chapters.pop()
            held.insert(0, chapters[-1].pop())
        if COLOPHON in held:
            del held[held.index(COLOPHON) :]
        corpus.chapters += [chapter for chapter in chapters if chapter]
        corpus.validation.append("\n\n".join(held))
    return corpus
