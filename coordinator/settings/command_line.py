"""Command-line parser with vLLM's spellings: underscores, JSON in parts, ``--help=TOPIC``.

``--max_model_len`` is ``--max-model-len``, and ``--speculative-config.method ngram`` part of a JSON object.
An error is one line, with the nearest name if a flag is unknown. Knows no settings:
:mod:`coordinator.settings.flags` and ``lockstep bench`` add them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from coordinator.settings import help_topics
from coordinator.settings.foreign import Foreign

NEAR = 0.8
"""Minimum similarity (difflib ratio) at which an unknown flag gets a suggestion."""
FOREIGN = "foreign flags"
"""Key of the flags of :func:`add_foreign` in a parser's result; no field has this name."""


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that prints errors in one line, without argparse's usage text."""

    _in_parts: Mapping[str, str] = {}
    """Long name of each JSON flag that may be given in parts, by all spellings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._topics: dict[str, argparse._ArgumentGroup] = {}

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def add_topic(self, name: str, title: str) -> argparse._ArgumentGroup:
        """A group of flags that ``--help=NAME`` shows."""
        group = self._topics[name] = self.add_argument_group(title)
        return group

    def takes_parts(self, long_name: str, others: Iterable[str]) -> None:
        """Declare a flag of a JSON object whose parts may be given separately."""
        self._in_parts = {**self._in_parts, **dict.fromkeys((long_name, *others), long_name)}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse a command line completely; unknown words are errors."""
        result: argparse.Namespace
        result, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = (word.partition("=")[0].replace("_", "-") for word in unknown if word.startswith("--"))
            near = next(filter(None, (nearest(name, self._shown()) for name in names)), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return result

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Long flags may have underscores for hyphens, and JSON objects may come in parts."""
        argv = list(sys.argv[1:] if args is None else args)
        end = argv.index("--") if "--" in argv else len(argv)  # nothing behind it is a flag
        for word in argv[:end]:
            if word.startswith("--help="):
                self._show(word.partition("=")[2])
        words = [self._spelled(word) for word in self._joined(argv[:end])]
        return super().parse_known_args(words + argv[end:], namespace)

    def _joined(self, argv: list[str]) -> list[str]:
        """``--x.a 1 --x.b.c=2`` as ``--x={"a": 1, "b": {"c": 2}}``, where its first part was."""
        left: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        positions: dict[str, int] = {}
        words = iter([*argv, None])
        word = next(words)
        while word is not None:
            following = next(words)
            name, equals, value = word.partition("=")
            flag, _, path = name.partition(".")
            long_name = self._in_parts.get(flag.replace("_", "-"))
            if not path or long_name is None:
                left.append(word)
            else:
                if not equals and following is not None and not _is_flag(following):
                    equals, value, following = "=", following, next(words)
                positions.setdefault(long_name, len(left))
                part = _of_json(value) if equals else True
                _set_part(objects.setdefault(long_name, {}), path.split("."), part)
            word = following
        given = {self._in_parts.get(word.partition("=")[0].replace("_", "-")) for word in left}
        for long_name in given.intersection(objects):
            self.error(f"{long_name} is given as a whole and in parts: give one of them")
        for long_name, position in reversed(positions.items()):
            left.insert(position, f"{long_name}={json.dumps(objects[long_name])}")
        return left

    def _show(self, topic: str) -> NoReturn:
        """Print what ``--help=TOPIC`` asks for, and end."""
        wanted, formatter = topic.strip().lower(), self._get_formatter()
        if wanted == "page":
            import pydoc  # loads much, for what few ask

            pydoc.pager(self.format_help())
        elif wanted == "all":
            self.print_help()
        elif wanted == "listgroup":
            print(help_topics.listed(self._topics), end="")
        elif groups := help_topics.groups_of(topic, self._topics):
            sections = [(group.title or "", group._group_actions) for group in groups]
            print(help_topics.text_of(formatter, sections), end="")
        elif actions := help_topics.actions_of(topic, self._actions):
            print(help_topics.text_of(formatter, [(f"Flags with {topic!r}", actions)]), end="")
        elif foreign := self._foreign(topic):
            means = (
                f"is {foreign.here} here"
                if foreign.here
                else f"is not there: {foreign.instead or foreign.why}"
            )
            print(f"--{foreign.name} {means}")
        else:
            self.error(f"--help={topic} names no group and no flag; --help=listgroup lists the groups")
        self.exit(0)

    def _foreign(self, topic: str) -> Foreign | None:
        """The flag of another system that has exactly this name."""
        action = self._option_string_actions.get(f"--{topic.lstrip('-').replace('_', '-')}")
        return action.flag if isinstance(action, _TakeForeign) else None

    def _spelled(self, word: str) -> str:
        """A word with hyphens for underscores if it is a known flag, else unchanged.

        An unknown one may be a value, and errors show it as written.
        """
        name, equals, value = word.partition("=")
        hyphenated = name.replace("_", "-")
        known = name.startswith("--") and hyphenated in self._option_string_actions
        return hyphenated + equals + value if known else word

    def _shown(self) -> list[str]:
        """Flags that appear in the help text."""
        shown = (action for action in self._actions if action.help is not argparse.SUPPRESS)
        return [name for action in shown for name in action.option_strings if name.startswith("--")]


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def _set_part(whole: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = whole.get(key)
        whole[key] = inner if isinstance(inner, dict) else {}
        whole = whole[key]
    whole[path[-1]] = value


def _of_json(text: str) -> Any:
    """A text parsed as JSON, or unchanged if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggestion of the intended name, to append to an error; empty without a near one."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=NEAR)
    return f"; did you mean {near[0]}?" if near else ""


class TakeOnce(argparse.Action):
    """Keeps a value that may be given in two ways; refuses a second, different one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        space: argparse.Namespace,
        values: Any,
        _name: str | None = None,
    ) -> None:
        before = getattr(space, self.dest, values)
        if before != values:
            shown = self.dest.upper()
            parser.error(f"{shown} is given twice, as {before!r} and as {values!r}: give one of them")
        setattr(space, self.dest, values)


class _TakeForeign(argparse.Action):
    """Keeps each flag that we do not have, and its value."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, const: Foreign, **rest: Any) -> None:
        super().__init__(option_strings, dest, **rest)
        self.flag = const

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        space: argparse.Namespace,
        values: Any,
        name: str | None = None,
    ) -> None:
        value = not (name or "").startswith("--no-") if self.flag.is_switch else values
        setattr(space, FOREIGN, [*getattr(space, FOREIGN, ()), (self.flag, value)])


def add_foreign(parser: OneLineParser, foreign: Foreign) -> None:
    """Accept a flag that Lockstep does not have; the help text omits it."""
    names = [*foreign.shorts, f"--{foreign.name}", *[f"--no-{foreign.name}"] * foreign.is_switch]
    # One that is never taken may have any number of values, and an error that says why.
    never = bool(foreign.here) or foreign.harmless == ()
    if not foreign.is_switch:
        parser.takes_parts(f"--{foreign.name}", foreign.shorts)
    parser.add_argument(
        *names,
        action=_TakeForeign,
        const=foreign,
        dest=FOREIGN,
        nargs=0 if foreign.is_switch else "*" if never else None,
        help=argparse.SUPPRESS,
    )
