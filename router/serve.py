"""The command line: ``serve`` and ``lockstep``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import uvloop

from coordinator import process
from coordinator.client import Watcher
from coordinator.flags import parse
from coordinator.messages import State, View
from engine.checkpoint import CheckpointError
from engine.settings import resolve
from parallel.topology import usable_cores
from router.config import ServeConfig
from router.launch import Supervisor, print_table, process_table

logger = logging.getLogger("serve")

SAY_INTERVAL = 5.0
"""Seconds between two lines about what is waited for."""


def main_serve(argv: list[str] | None = None) -> int:
    """``serve``: the whole mesh, its head, or headless instances, as the flags say."""
    config = parse(
        ServeConfig,
        sys.argv[1:] if argv is None else argv,
        prog="serve",
        description="Serve a language model from a mesh of instances behind one OpenAI-compatible endpoint.",
    )
    process.set_up("Serve", config.log_level)
    settings = None
    title = "serve"
    if config.engine.model.model is not None or not config.mesh.headless:
        try:
            info, settings = resolve(config.engine, config.mesh.data_parallel_size)
        except CheckpointError as error:
            print(f"serve: error: {error}", file=sys.stderr)
            return process.EXIT_USAGE
        problem = _tokenizer_problem(config, info.directory)
        if problem is not None:
            print(f"serve: error: {problem}", file=sys.stderr)
            return process.EXIT_USAGE
        title = f"serve {settings.served_model_name[0]} ({info.architecture}, {settings.dtype})"
    mesh_name = "" if config.mesh.headless else uuid.uuid4().hex[:8]
    table = process_table(config, settings, usable_cores(), mesh_name)
    print_table(title, table)
    return uvloop.run(_supervise(config, mesh_name, Supervisor(table, config.engine.drain_timeout)))


def _tokenizer_problem(config: ServeConfig, model_directory: str) -> str | None:
    """Why the router could not turn text into tokens, None if it can."""
    directory = Path(config.http.tokenizer or model_directory)
    if config.mesh.headless or (directory / "tokenizer.json").is_file():
        return None
    return (
        f"{directory} has no tokenizer.json: name a directory that has one with --tokenizer, or write one "
        "with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


async def _supervise(config: ServeConfig, mesh_name: str, supervisor: Supervisor) -> int:
    async def until_ready() -> None:
        view = await wait_for_instances(config, mesh_name)
        if not config.mesh.headless:
            _print_try_line(config, view)

    return await supervisor.run(until_ready)


async def wait_for_instances(config: ServeConfig, mesh_name: str) -> View:
    """Wait until all of ``-dp`` (headless: the local ones) are ready. A head waits for the view of its own
    coordinator: another mesh may hold the port, and then that coordinator says so and ends.

    Raises:
        TimeoutError: --startup-timeout seconds went by without any progress; the message says of whom.
    """
    watcher = Watcher(config.mesh.coordinator_endpoint, "serve")
    changed = asyncio.Event()
    watching = asyncio.create_task(watcher.run(lambda _view: changed.set()))
    progress_at = said_at = time.monotonic()
    seen: object = None
    try:
        while True:
            view = watcher.view
            if view is not None and mesh_name and view.mesh != mesh_name:
                view = None
            if view is not None and _complete(config, view):
                return view
            missing = view.waiting_for if view else f"the coordinator at {config.mesh.coordinator_endpoint}"
            now = time.monotonic()
            if missing != seen:
                seen, progress_at = missing, now
            waited = now - progress_at
            if waited > config.mesh.startup_timeout:
                raise TimeoutError(f"gave up after {waited:.0f} s without progress, waiting for {missing}")
            if now - said_at >= SAY_INTERVAL:
                said_at = now
                logger.info("waiting for %s", missing or "the router")
            changed.clear()
            await _wait(changed, 0.5)
    finally:
        watching.cancel()


async def _wait(event: asyncio.Event, timeout: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting], timeout=timeout)
    waiting.cancel()


def _complete(config: ServeConfig, view: View) -> bool:
    if not config.mesh.headless:
        return not view.waiting_for
    ready = sum(member.state is State.READY for member in view.members)
    return ready >= config.mesh.local_size and not view.waiting_for


def _print_try_line(config: ServeConfig, view: View) -> None:
    http = config.http
    host = "127.0.0.1" if http.host in ("0.0.0.0", "::") else http.host
    name = view.settings.served_model_name[0] if view.settings else ""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if http.api_key else ""
    body = msgspec.json.encode(
        {"model": name, "prompt": "It is a truth universally acknowledged, that", "max_tokens": 60}
    ).decode()
    print(
        f"\n{len(view.members)} instance{'s' * (len(view.members) != 1)} ready at "
        f"http://{host}:{http.port}/v1. Try:\n\n"
        f"  curl http://{host}:{http.port}/v1/completions{key} "
        f"-H 'Content-Type: application/json' -d '{body}'\n",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """``lockstep SUBCOMMAND ...``"""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        print(f"lockstep {lockstep_version()}")
        return 0
    if not argv or argv[0] not in COMMANDS:
        wrong = bool(argv) and argv[0] not in ("-h", "--help")
        lines = [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()]
        problem = f"lockstep: error: there is no command {argv[0]!r}\n" if wrong else ""
        print(
            f"{problem}usage: lockstep COMMAND ...\n\n" + "\n".join(lines),
            file=sys.stderr if wrong else sys.stdout,
        )
        return process.EXIT_USAGE if wrong or not argv else 0
    run, _ = COMMANDS[argv[0]]
    try:
        return run(argv[1:])
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _status(argv: list[str]) -> int:
    from router.status import main as status_main

    return status_main(argv)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "serve": (main_serve, "serve a model: the whole mesh, its head, or headless instances"),
    "status": (_status, "show the instances of a mesh"),
}


def lockstep_version() -> str:
    try:
        return version("lockstep")
    except PackageNotFoundError:
        return "0 (not installed)"


if __name__ == "__main__":
    sys.exit(main_serve())
