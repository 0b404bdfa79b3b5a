"""The recording that examples/kill_a_rank.py writes."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

SOURCE = Path(__file__).parents[2] / "examples" / "terminal_recording.py"


@pytest.fixture
def recording() -> Any:
    """Three pictures of two lines, of which only one changes."""
    spec = importlib.util.spec_from_file_location("terminal_recording", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.Recording(40)
    for number in (1, 1, 2, 3):
        found.add(Text.assemble(("stays <here>\n", "bold"), f"tokens: {number}"))
    return found


def test_an_svg_shows_each_line_for_its_time(recording: Any, tmp_path: Path) -> None:
    recording.write(tmp_path / "a.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["stays <here>", "tokens: 1", "tokens: 2", "tokens: 3"], "what stays is there once"
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    assert (style.text or "").count("@keyframes") == 3, "what stays needs no animation"


def test_a_cast_has_an_event_per_picture(recording: Any, tmp_path: Path) -> None:
    recording.write(tmp_path / "a.cast")
    header, *events = map(json.loads, (tmp_path / "a.cast").read_text().splitlines())
    assert (header["version"], header["width"]) == (2, 40)
    assert [event[2].partition("tokens: ")[2][0] for event in events] == ["1", "2", "3"]
    assert events[0][0] <= events[1][0] <= events[2][0]
