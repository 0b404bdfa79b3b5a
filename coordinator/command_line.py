"""A parser of command lines that takes flags as vLLM's users write them.

``--max_model_len`` is ``--max-model-len``. What is wrong is said in one line, with the nearest name where
there is no such flag. Knows no settings: :mod:`coordinator.flags` and ``lockstep bench`` add them.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from coordinator.foreign import Foreign

FOREIGN = "foreign flags"
"""Where the result of a parser has those of :func:`add_foreign`: no field has such a name."""


class OneLineParser(argparse.ArgumentParser):
    """One line for what is wrong; argparse would print the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """All of a command line."""
        result: argparse.Namespace
        result, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = (word.partition("=")[0].replace("_", "-") for word in unknown if word.startswith("--"))
            near = next(filter(None, (nearest(name, self._shown()) for name in names)), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return result

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Long flags may have underscores for hyphens."""
        argv = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._hyphenated(argv), namespace)

    def _hyphenated(self, argv: list[str]) -> list[str]:
        """What is no flag of ours stays as it is: it may be a value, and an error is to show it as written.
        Nothing behind ``--`` is a flag."""
        end = argv.index("--") if "--" in argv else len(argv)
        return [self._spelled(word) for word in argv[:end]] + argv[end:]

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        hyphenated = name.replace("_", "-")
        known = name.startswith("--") and hyphenated in self._option_string_actions
        return hyphenated + equals + value if known else word

    def _shown(self) -> list[str]:
        """The flags of the help text."""
        shown = (action for action in self._actions if action.help is not argparse.SUPPRESS)
        return [name for action in shown for name in action.option_strings if name.startswith("--")]


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the name that was meant, behind what is wrong; empty if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


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


def add_foreign(parser: argparse.ArgumentParser, foreign: Foreign) -> None:
    """Take a flag that we do not have, without a word of it in the help text."""
    names = [*foreign.shorts, f"--{foreign.name}", *[f"--no-{foreign.name}"] * foreign.is_switch]
    # One that is never taken may have any number of values, and an error that says why.
    never = bool(foreign.here) or foreign.harmless == ()
    parser.add_argument(
        *names,
        action=_TakeForeign,
        const=foreign,
        dest=FOREIGN,
        nargs=0 if foreign.is_switch else "*" if never else None,
        help=argparse.SUPPRESS,
    )
