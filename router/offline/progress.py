"""The progress bar of the offline class, on standard error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

OnOutput = Callable[[Any], None]
"""Called with an output: of generation, or of a pooling model, which has no tokens."""
TITLE = "Processed prompts"


@contextlib.contextmanager
def progress_bar(count: int, wanted: bool | Callable[..., Any]) -> Iterator[OnOutput]:
    """Progress bar; yields a function to call with each finished output.

    ``wanted`` may be a class like ``tqdm.tqdm``.
    """
    if not wanted or not count:
        yield lambda _output: None
    elif callable(wanted):
        with contextlib.closing(wanted(total=count, desc=TITLE)) as bar:
            yield lambda _output: bar.update(1)
    else:
        with rich_bar() as progress:
            yield _Rates(progress, count).add


def rich_bar() -> Progress:
    """Bar on standard error; the field ``rates`` of its tasks is shown behind."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[rates]}"),
        console=Console(stderr=True),
    )


class _Rates:
    """Column of a progress bar with tokens per second in and out."""

    def __init__(self, progress: Progress, count: int) -> None:
        self._progress = progress
        self._task = progress.add_task(TITLE, total=count, rates="")
        self._began = time.monotonic()
        self._tokens_in = self._tokens_out = 0

    def add(self, output: Any) -> None:
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(sample.token_ids) for sample in output.outputs)
        seconds = max(time.monotonic() - self._began, 1e-3)
        rates = (
            f"input {self._tokens_in / seconds:.1f} toks/s, output {self._tokens_out / seconds:.1f} toks/s"
        )
        self._progress.update(self._task, advance=1, rates=rates)
