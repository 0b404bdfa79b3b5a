"""Validation of grammars before a request reaches an instance.

So errors come at once.

Without a tokenizer this is quick; errors that only a tokenizer shows are found by the instance. JSON schemas
with more than can be enforced are reduced to what can (:mod:`router.turns.schema_support`), unless they are
strict.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from engine.host.deep_thread import DeepThread
from engine.scheduling.grammar import first_line
from router.errors import MAX_LOGGED, ApiError, bad_request, one_line
from router.turns.schema_support import Trial, supported, where_wrong
from router.turns.structured import text_of

logger = logging.getLogger(__name__)

MOST_KEPT = 512
"""Checked grammars kept in the cache; the least recently used go first."""
MOST_KEPT_CHARACTERS = 4 << 20
"""Characters of all checked grammars kept in the cache."""
MOST_WAITING = 1024
"""Grammars that wait to be checked; requests with more are refused."""
MOST_WAIT = 30.0
"""Seconds until a grammar is checked, others before it included; then its request is refused."""
MOST_SECONDS = 3.0
"""Seconds of processor time for trials of one grammar's parts: others wait."""
TAKES_TOO_LONG = (
    "it has parts that cannot be enforced as they are, and more of them than can be tried: make the schema "
    "smaller, or write oneOf as anyOf."
)

Result = TypeVar("Result")

Places = Mapping[str, str]
"""What a client calls each grammar of an answer, such as ``tools[3] ("draw")``."""


class Checked(msgspec.Struct, frozen=True):
    """A grammar as instances take it, or why none can."""

    text: str
    problem: str = ""
    culprit: str = ""
    """The name of the grammar that is wrong, if it is one of several."""
    unenforced: Mapping[str, list[str]] = {}
    """Per grammar, the JSON paths of what answers need not follow."""

    def remarks(self, places: Places) -> list[str]:
        """Schemas' paths that are not enforced, in the client's terms."""
        return [
            f"{places.get(name, name)} {', '.join(paths)}".strip() for name, paths in self.unenforced.items()
        ]

    @property
    def size(self) -> int:
        """Number of characters of the grammar and of its remarks."""
        return len(self.text) + sum(len(path) for paths in self.unenforced.values() for path in paths)


class GrammarCheck:
    """Check of grammars in a thread, with a cache of the latest results."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Checked] = OrderedDict()
        self._characters = 0
        self._thread = DeepThread("grammars")
        self._last = Checked("")
        """Newest result of the thread."""
        self._last_text: str | None = None
        """Grammar that it was made of."""

    def __repr__(self) -> str:
        return f"<GrammarCheck of {len(self._kept)}>"

    async def check(self, text: str, param: str, places: Places | None = None) -> Checked:
        """The checked grammar, in the form that instances take.

        Raises:
            ApiError: the grammar is wrong (400), there is no library for any (501), or too many wait (503).
        """
        checked = self._kept.get(text)
        if checked is None:
            checked = await self._in_thread(lambda: self._checked(text))
            self._keep(text, checked)
            if checked.unenforced:
                remarks = "; ".join(checked.remarks(places or {}))
                logger.info("not enforced: %s", one_line(remarks, MAX_LOGGED))
        else:
            self._kept.move_to_end(text)
        if checked.problem:
            raise bad_request(f"{(places or {}).get(checked.culprit, param)}: {checked.problem}", param)
        return checked

    async def check_unchanged(self, text: str, param: str) -> None:
        """Refuse a grammar that instances cannot take exactly as it is.

        Raises:
            ApiError: as :meth:`check`.
        """
        problem, _ = await self._in_thread(lambda: _tried(text))
        if problem:
            raise bad_request(f"{param}: {problem}", param)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        if self._thread.num_waiting >= MOST_WAITING:
            raise _too_many()
        try:  # one that has not begun in time is left out
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.submit(work)), MOST_WAIT)
        except TimeoutError as error:
            raise _too_many() from error

    def _checked(self, text: str) -> Checked:
        """In the thread: of equal grammars that came at once, only the first is tried."""
        if text != self._last_text:
            self._last = self._kept.get(text) or checked_grammar(text)
            self._last_text = text
        return self._last

    def _keep(self, text: str, checked: Checked) -> None:
        if text not in self._kept:
            self._characters += len(text) + checked.size
        self._kept[text] = checked
        while len(self._kept) > MOST_KEPT or self._characters > MOST_KEPT_CHARACTERS:
            oldest, gone = self._kept.popitem(last=False)
            self._characters -= len(oldest) + gone.size


def _too_many() -> ApiError:
    return ApiError(503, "Too many grammars wait to be checked.", headers={"retry-after": "1"})


def checked_grammar(text: str) -> Checked:
    """Try a grammar; if the library refuses it, try each of its schemas alone."""
    problem, messages = _tried(text)
    if not (problem or messages):
        return Checked(text)
    grammars = json.loads(text)["grammars"]
    trials = _Trials()
    unenforced: dict[str, list[str]] = {}
    for grammar in grammars:
        body = grammar.get("json_schema")
        if body is None:
            continue
        options = body.pop("x-guidance", {})
        try:
            found = supported(body, trials.with_options(options | {"lenient": False}))
        except _TooLongError:
            return Checked(text, TAKES_TOO_LONG, grammar["name"])
        if found.unenforced and not options.get("lenient"):
            return Checked(text, _not_enforceable(found.unenforced), grammar["name"])
        if wrong := _problem(found.schema, options):
            place = _where_wrong(found.schema, trials.with_options(options))
            return Checked(text, wrong if place == "$" else f"{place}: {wrong}", grammar["name"])
        if found.unenforced:
            unenforced[grammar["name"]] = found.unenforced
        grammar["json_schema"] = found.schema | {"x-guidance": options}
    settled = text_of({grammar.pop("name"): grammar for grammar in grammars})
    problem, messages = _tried(settled)
    if messages and not problem:
        unenforced[""] = [first_line(message) for message in messages]
    return Checked(settled, problem, unenforced=unenforced)


def problem_with(text: str) -> str:
    """What is wrong with a grammar, empty if nothing is."""
    return checked_grammar(text).problem


def summary(message: str) -> str:
    """Error message of the library without the picture of the place.

    A regular expression's error stands at the end of one.
    """
    lines = [line.strip() for line in message.strip().splitlines()]
    reason = next((line for line in lines if line.startswith("error:")), "")
    return " ".join(filter(None, [first_line(message), reason]))


def _tried(text: str) -> tuple[str, list[str]]:
    """What is wrong with a grammar, and all messages of the library about it."""
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as error:
        raise ApiError(501, f"Structured outputs need the package llguidance: {error}.") from error
    limits = LLParserLimits(verbose_errors=False)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    return (summary(messages[0]) if is_wrong and messages else ""), list(messages)


def _problem(schema: Any, options: Mapping[str, Any]) -> str:
    """What is wrong with a schema, empty if nothing is."""
    if not isinstance(schema, dict):
        return ""
    return _tried(text_of({"tried": {"json_schema": {**schema, "x-guidance": options}}}))[0]


def _where_wrong(schema: Any, trial: Trial) -> str:
    """JSON path of what is wrong in a schema, as far as time allows."""
    try:
        return where_wrong(schema, trial)
    except _TooLongError:
        return "$"


class _TooLongError(Exception):
    """Trials have taken :data:`MOST_SECONDS`."""


class _Trials:
    """Trials of a grammar's schemas, for as long as they may take in all."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MOST_SECONDS

    def __repr__(self) -> str:
        return f"<_Trials until {self._end:.3f} s>"

    def with_options(self, options: Mapping[str, Any]) -> Trial:
        """A trial with options of the library; it raises :class:`_TooLongError` when the time is over."""

        def trial(schema: Any) -> str:
            if time.thread_time() > self._end:
                raise _TooLongError
            return _problem(schema, options)

        return trial


def _not_enforceable(paths: list[str]) -> str:
    places = ", ".join(paths)
    return f"{places} cannot be enforced, and the schema is strict: leave it out, or do not set strict."
