"""MkDocs hook: links that leave docs/ become the plain names of what they lead to.

On a code host such a link opens the file; a site of docs/ alone has no page for it.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\[\]]*)\]\(((?:\.\./)+)([^)#]*)(?:#[^)]*)?\)")
"""A link whose target begins with ``../``: its text, the steps up, and the rest."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return without_outside_links(markdown, page.file.src_uri.count("/"))


def without_outside_links(markdown: str, depth: int) -> str:
    """The text of a page that lies so many folders below docs/."""

    def replaced(match: re.Match[str]) -> str:
        if match[2].count("../") <= depth:
            return match[0]
        text, path = match[1], match[3]
        return text if path in text or text.strip("`") in path else f"{text} (`{path}`)"

    return OUTSIDE.sub(replaced, markdown)
