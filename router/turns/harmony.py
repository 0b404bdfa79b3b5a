"""Harmony, the format of GPT-OSS: an answer is messages on channels (pure).

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>``: what
the model thinks is on ``analysis``, what it says on ``final``, and on ``commentary`` before it calls tools. A
call is a message to ``functions.NAME``. Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from router.turns.reasoning import ReasoningFormat, TurnParser
from router.turns.tool_parsers.base import CallFormat, held
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, Reasoning, merged

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

ANALYSIS = ReasoningFormat((f"{CHANNEL}analysis{MESSAGE}",), (END,), before_answer=f"{START}assistant")
"""Reasoning, as grammars have it."""
FINAL = f"{CHANNEL}final{MESSAGE}"
"""What an answer begins with."""
WRITTEN_CALL = CallFormat(
    f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", after_arguments="", between=""
)
"""A call that is asked for. The model stops after one."""

MAX_HEADER = 1024
"""Characters."""
_HEADS, _TO = (START, CHANNEL, CONSTRAIN), "to="
"""What a message's header begins with."""
_HEADER_ENDS = re.compile("|".join(map(re.escape, (MESSAGE, END, RETURN, CALL))))
_ENDS = (END, RETURN, CALL, START)
"""Tokens that end a message; START does so where the end is missing."""
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_FUNCTIONS = "functions."


class HarmonyParser(TurnParser):
    """Parser of one answer in Harmony; text without any header is content.

    Messages of one kind are a line apart. Calls of tools that nobody offered, which the model was trained
    with (``browser``, ``python``), are reasoning: no client could answer them.
    """

    def __init__(self, prompt: str, offered: Collection[str] = ()) -> None:
        """``prompt``: the answer may go on with its last message.

        ``offered``: tools' names.
        """
        super().__init__()
        self._offered = offered
        self._kind: type[Reasoning | Content | CallArguments] | None = None
        """Kind of the current message; None between two messages."""
        self._events: list[Parsed] = []
        self._said: set[type] = set()
        self._at_begin = False
        header, found, body = prompt[prompt.rfind(START) + len(START) :].partition(MESSAGE)
        if START in prompt and found and not any(mark in body for mark in _ENDS):
            self._open(header)

    def __repr__(self) -> str:
        kind = "header" if self._kind is None else self._kind.__name__
        return f"<HarmonyParser in {kind}, holding {self._buffer!r}>"

    @property
    def inside(self) -> bool:
        return self._kind is Reasoning

    @property
    def between(self) -> bool:
        """Whether the next text begins a message."""
        return self._kind is None

    def _run(self, *, ended: bool) -> list[Parsed]:
        while self._buffer and (self._read_header(ended) if self._kind is None else self._read_body(ended)):
            pass
        events, self._events = self._events, []
        return merged(events)

    def _read_header(self, ended: bool) -> bool:
        """Take a header, or the text in its place; False while it may go on."""
        text = self._buffer.lstrip()
        if not ended and any(mark.startswith(text) for mark in (*MARKERS, _TO)):
            return False
        if not text.startswith((*_HEADS, _TO)):
            if text.startswith(MARKERS):  # the end of nothing
                self._buffer = text.partition("|>")[2]
            elif text or not self._said:
                self._open("")
            else:
                self._buffer = ""
            return True
        end = _HEADER_ENDS.search(text, 0, MAX_HEADER)
        if end is not None:
            self._buffer = text[end.end() :]
            if end.group() == MESSAGE:
                self._open(text[: end.start()])
        elif len(text) >= MAX_HEADER:  # whatever it is, it is no header
            self._open("")
        elif ended:
            self._buffer = ""
        return end is not None or self._kind is not None

    def _open(self, header: str) -> None:
        """Begin a message, whose header names its kind."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._at_begin = True
        called = None if recipient is None else self._function(recipient[1])
        if called is not None:
            self._kind = CallArguments
            self._events.append(CallBegin(called))
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = Reasoning
        else:
            self._kind = Content

    def _function(self, recipient: str) -> str | None:
        """The function that a message calls; models leave ``functions.`` out at times."""
        if self._offered and recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._offered else None

    def _read_body(self, ended: bool) -> bool:
        """Pass on the text of a message; True if it ended."""
        found = [(at, mark) for mark in _ENDS if (at := self._buffer.find(mark)) >= 0]
        at, mark = min(found) if found else (len(self._buffer), "")
        if not found and not ended:
            at -= held(self._buffer, *_ENDS)
        self._pass(self._buffer[:at])
        self._buffer = self._buffer[at if mark == START else at + len(mark) :]
        if found:
            self._kind = None
        return bool(found)

    def _pass(self, text: str) -> None:
        kind = self._kind
        if not text or kind is None:
            return
        if self._at_begin and kind in self._said and kind is not CallArguments:
            text = "\n" + text
        self._at_begin = False
        self._said.add(kind)
        self._events.append(kind(text))
