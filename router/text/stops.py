"""Search for stop strings in text that arrives in pieces (pure).

An Aho-Corasick automaton over all stop strings reads the text character by character, so what it finds does
not depend on how the text was cut into pieces: the match that ends first wins, the longest of those that end
together. Its depth is the length of the text's tail that may yet become a stop string; so much is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Node:
    __slots__ = ("depth", "fail", "next", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fail: _Node | None = None
        self.stop: str | None = None
        """The longest stop string that ends here."""


class StopStrings:
    """Stop strings of a request, ready to be searched for in any text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _Node(0)
        for stop in stops:
            self._add(stop)
        self._link()

    def __repr__(self) -> str:
        return f"<StopStrings starting with {sorted(self._root.next)}>"

    def search(self, *, include_in_output: bool = False) -> StopSearch:
        return StopSearch(self._root, include_in_output)

    def _add(self, stop: str) -> None:
        node = self._root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.stop = stop

    def _link(self) -> None:
        """Link each node, breadth first, to where a mismatch continues."""
        queue = deque(self._root.next.values())
        for child in queue:
            child.fail = self._root
        while queue:
            node = queue.popleft()
            for character, child in node.next.items():
                fail = node.fail
                while fail is not None and character not in fail.next:
                    fail = fail.fail
                child.fail = fail.next[character] if fail is not None else self._root
                child.stop = child.stop or child.fail.stop
                queue.append(child)


class StopSearch:
    """Search through one text; ``matched`` is the stop string that ended it."""

    def __init__(self, root: _Node, include_in_output: bool) -> None:
        self._root = root
        self._node = root
        self._held = ""
        self._include = include_in_output
        self.matched: str | None = None

    def __repr__(self) -> str:
        return f"<StopSearch holding {self._held!r}, matched {self.matched!r}>"

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Add text; returns the part that can no longer become a stop string.

        Unless ``armed``, a stop string is only text.
        """
        if self.matched is not None:
            return ""
        seen = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            node: _Node | None = self._node
            while node is not None and character not in node.next:
                node = node.fail
            self._node = node.next[character] if node is not None else self._root
            if armed and self._node.stop is not None:
                self.matched = self._node.stop
                self._held = ""
                return seen[: position if self._include else position - len(self.matched)]
        certain = len(seen) - self._node.depth
        self._held = seen[certain:]
        return seen[:certain]

    def flush(self) -> str:
        """End the text; returns what was held back, which is no stop string."""
        held, self._held = self._held, ""
        self._node = self._root
        return held
