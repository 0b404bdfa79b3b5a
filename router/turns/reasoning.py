"""Parsers that split reasoning from the answer, by tags around it (pure).

What a model thinks before it answers stands between two tags. Some templates write the first one, so that
the model's own text begins inside: the prompt's last characters tell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from router.turns.tool_parsers.base import held
from router.turns.turn_events import Content, Parsed, Reasoning, merged


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a family of models marks its reasoning."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    implied: bool = False
    """An answer begins inside unless the prompt has closed the tags."""
    before_answer: str = ""
    """Text between the last tag and the answer, where it is more than blanks."""


THINK = ReasoningFormat(("<think>",), ("</think>",))
IMPLIED_THINK = ReasoningFormat(("<think>",), ("</think>",), implied=True)

REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": IMPLIED_THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "minimax_m2": IMPLIED_THINK,
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "olmo3": IMPLIED_THINK,
    "qwen3": THINK,
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "step3": IMPLIED_THINK,
}
"""By the names that ``--reasoning-parser`` takes, which are vLLM's."""


class TurnParser(ABC):
    """Parser that splits the text of one answer, however it is cut into chunks.

    ``feed`` takes the next chunk, ``flush`` says that none comes any more; both return what is certain by
    then.
    """

    def __init__(self) -> None:
        self._buffer = ""

    @property
    @abstractmethod
    def inside(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""

    def feed(self, text: str) -> list[Parsed]:
        self._buffer += text
        return self._run(ended=False)

    def flush(self) -> list[Parsed]:
        return self._run(ended=True)

    @abstractmethod
    def _run(self, *, ended: bool) -> list[Parsed]:
        """Take from the buffer what is certain."""


class ReasoningParser(TurnParser):
    """Parser of reasoning between tags; blanks next to a tag belong to it.

    Only an answer that begins with reasoning has any: a tag in the middle of an answer is text.
    """

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        super().__init__()
        tail = prompt.rstrip()
        self._form = form
        self._inside = tail.endswith(form.begin) or (form.implied and not tail.endswith(form.end))
        self._at_edge = True
        """Whether nothing but blanks came since the last tag."""
        self._may_begin = True

    @property
    def inside(self) -> bool:
        return self._inside

    def __repr__(self) -> str:
        return f"<ReasoningParser {'inside' if self._inside else 'outside'}, holding {self._buffer!r}>"

    def _run(self, *, ended: bool) -> list[Parsed]:
        if self._may_begin and not self._begins(ended):
            return []
        events: list[Parsed] = []
        if self._inside:
            events.append(Reasoning(self._reasoning(ended)))
        if not self._inside:
            events.append(Content(self._content()))
        return merged(events)

    def _begins(self, ended: bool) -> bool:
        """Take the first tag if the answer begins with it; False while unknown."""
        start = self._buffer.lstrip()
        if tag := next((tag for tag in self._form.begin if start.startswith(tag)), None):
            self._buffer = start[len(tag) :]
            self._inside = True
        elif not ended and any(tag.startswith(start) for tag in self._form.begin):
            return False
        elif not self._inside:
            self._at_edge = False  # the blanks are the answer's own
        self._may_begin = False
        return True

    def _reasoning(self, ended: bool) -> str:
        """Reasoning up to the last tag, which is removed."""
        found = [(at, tag) for tag in self._form.end if (at := self._buffer.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            text, self._buffer = self._buffer[:at].rstrip(), self._buffer[at + len(tag) :]
            text = self._from_edge(text)
            self._inside, self._at_edge = False, True
            return text
        keep = 0 if ended else held(self._buffer, *self._form.end)
        certain = len(self._buffer) - keep
        text, self._buffer = self._buffer[:certain], self._buffer[certain:]
        return self._from_edge(text)

    def _content(self) -> str:
        text, self._buffer = self._buffer, ""
        return self._from_edge(text)

    def _from_edge(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text
