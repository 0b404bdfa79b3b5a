"""Entry points of the console scripts ``serve`` and ``lockstep``, which load them late.

Loading takes some tenths of a second, in which Ctrl-C has nothing to undo. An exception then would be shown
with a traceback, or be taken for something else by the module that is just being loaded; so the process ends
at once, as a shell has it. (Imports as little as it can.)
"""

import os
import signal
from collections.abc import Callable

INTERRUPTED = 130
"""Exit status after Ctrl-C, equal to :data:`coordinator.process.process.EXIT_INTERRUPTED`."""


def serve() -> int:
    """Entry point of ``serve``."""
    return _loaded("main_serve")()


def lockstep() -> int:
    """Entry point of ``lockstep COMMAND``."""
    return _loaded("main")()


def _loaded(name: str) -> Callable[[], int]:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _end)
    from router.launcher import serve

    found: Callable[[], int] = getattr(serve, name)
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return found


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
