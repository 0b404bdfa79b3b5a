"""Command ``lockstep replay``: flags, files, exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec

from coordinator.process import process
from coordinator.settings.flags import Count, flag, parse
from router.launcher.endpoint_config import EndpointConfig
from router.tools.api_client import Api, ServerError
from router.tools.local_mesh import mesh
from router.tools.replay.run import Replay
from router.tools.replay.saved import Files, read_files

PROG = "lockstep replay"


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replay."""

    files: Files = ()
    url: Annotated[
        str | None, flag(help="URL of the server, with or without /v1; unset: that of --host and --port.")
    ] = None
    serve: Annotated[
        str | None, flag(help="Start a mesh with these arguments of serve, and end it afterwards.")
    ] = None
    endpoint: EndpointConfig = EndpointConfig()
    concurrency: Annotated[Count, flag(help="Samples that are computed at once.")] = 16
    timeout: Annotated[
        float, msgspec.Meta(gt=0), flag(help="Most seconds until a sample is computed, retries included.")
    ] = 600.0

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("give the FILES with the answers to compute again, or - for standard input")
        if self.serve is not None and self.url is not None:
            raise ValueError("--serve starts its own server: leave out --url")


def main(argv: list[str] | None = None) -> int:
    """Replay all files; returns the exit status.

    It is 0 if all are equal, 1 if some differ, 2 if some cannot be read or replayed.
    """
    config = parse(
        ReplayConfig,
        sys.argv[1:] if argv is None else argv,
        prog=PROG,
        description="Compute saved answers again, from their capsules, and compare them to the bit.",
        shares_file=True,
    )
    found, problems = read_files(config.files)
    for problem in problems:
        _complain(problem.message)
    if not found:
        return process.EXIT_USAGE
    try:
        with server(config) as api:
            outcome = Replay(api, config.concurrency, config.timeout, _complain).all(found)
    except ServerError as error:
        _complain(str(error))
        return process.EXIT_USAGE
    except KeyboardInterrupt:  # the interpreter's end would wait for the answers that are under way
        os._exit(process.EXIT_INTERRUPTED)
    outcome.unusable += len(problems)
    print(outcome)
    if outcome.unusable:
        return process.EXIT_USAGE
    return process.EXIT_FAILED if outcome.different else 0


@contextlib.contextmanager
def server(config: ReplayConfig) -> Iterator[Api]:
    """Server that computes: a running one, or a child ``serve``.

    Raises:
        ServerError: it cannot be started, or its certificate not be read.
    """
    with contextlib.ExitStack() as held:
        url = config.url
        if config.serve is not None:
            try:
                url = held.enter_context(mesh(config.serve))
            except SystemExit as error:
                raise ServerError(str(error)) from error
        api = Api(url, config.endpoint, config.timeout)
        api.url = api.url.removesuffix("/v1")
        api.trust()
        yield api


def _complain(problem: str) -> None:
    print(f"{PROG}: error: {problem}", file=sys.stderr, flush=True)
