"""A parser of command lines that takes flags as vLLM's users write them.

``--max_model_len`` is ``--max-model-len``. What is wrong is said in one line. Knows no settings:
:mod:`coordinator.flags` and ``lockstep bench`` add them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """One line for what is wrong; argparse would print the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

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
