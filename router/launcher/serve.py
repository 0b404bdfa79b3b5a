"""The command line: ``serve`` and ``lockstep``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from coordinator.config import url
from coordinator.distribution import installed_version
from coordinator.messages import Settings, View
from coordinator.pooled_model import PATHS, PooledModel, PoolingTask
from coordinator.process import process
from coordinator.process.runtime import runtime_directory
from coordinator.rpc import own_key
from coordinator.rpc.keys import MeshKeys
from coordinator.settings.flags import parse, secrets_of
from coordinator.settings.foreign import ForeignFlags
from engine.host import forked
from engine.host.forked import ForkServer
from engine.model.checkpoint import CheckpointError
from engine.settings import resolve
from parallel.devices import cuda_devices, visible_cuda_devices
from parallel.topology import threads_per_worker, usable_cores
from router.config import HttpConfig, ServeConfig
from router.http.listen import at_path, bind, wait_for_health
from router.http.shared_files import shared_files
from router.launcher.cache_files import CacheFiles
from router.launcher.endpoint_config import EVERYWHERE
from router.launcher.environment import with_key
from router.launcher.foreign_flags import FOREIGN
from router.launcher.launch import Doors, ProcessSpec, engine_spec, mesh_title, print_table, process_table
from router.launcher.node import run_node
from router.launcher.overseer import Overseer
from router.launcher.preflight import (
    ignored_revision,
    ignored_when_headless,
    ignored_with_uds,
    machine_of,
    problem_with,
    text_problem,
)
from router.launcher.scaling import shared_devices
from router.launcher.service_manager import LauncherStatus, ServiceManager
from router.launcher.shutdown import Shutdown
from router.launcher.starter import ProcessStarter
from router.launcher.supervisor import Supervisor
from router.metrics.shared_counts import SharedCounts, Snapshot

logger = logging.getLogger("serve")

Command = Callable[[list[str]], int]
"""Function behind a subcommand: takes its arguments, returns the exit status."""

HEALTH_TIMEOUT = 10.0
"""Seconds for a router to answer /health once the instances are ready."""
SAY_INTERVAL = 5.0
"""Seconds between two log lines about what the start waits for."""


class _Refusal(Exception):
    """Wrong settings or a wrong model, before anything is started; exit status 2."""


def main_serve(argv: list[str] | None = None) -> int:
    """``serve``: the whole mesh, its head, or headless instances, as the flags say."""
    process.hold_standard_streams()
    try:
        return _serve(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while a model was looked for, or downloaded: nothing has been started
        return process.EXIT_INTERRUPTED


def _serve(argv: list[str]) -> int:
    config = _parse(argv)
    try:
        _check(config)
        config = _with_key_of_clients(config)
        keys = process.member_keys(config.mesh, "serve")
        config = with_key_for_children(config, keys)
        model = _resolved(config)
    except _Refusal as error:
        print(f"serve: error: {error}", file=sys.stderr)
        return process.EXIT_USAGE
    if config.engine.nodes.node_rank:
        return run_node(config, model.title)
    try:
        with contextlib.ExitStack() as held:
            return _run(config, model, held, keys)
    except OSError as error:  # a port of the endpoint, no room for files
        file = f": {error.filename}" if error.filename else ""
        reason = process.shortage_of(error) or error.strerror or error
        print(f"serve: error: {reason}{file}", file=sys.stderr)
        return process.EXIT_FAILED


def _parse(argv: list[str]) -> ServeConfig:
    """The settings of a command line; flags of other systems that are ignored are logged."""
    foreign = ForeignFlags(FOREIGN)
    config = parse(
        ServeConfig,
        argv,
        prog="serve",
        description="Serve a language model from a mesh of instances behind one OpenAI-compatible endpoint.",
        foreign=foreign,
        version=f"lockstep {installed_version()}",
    )
    process.set_up("Serve", config.log_level, config.mesh.observability.log_format)
    for line in filter(None, (*foreign.said, config.http.structured_outputs.ignored)):
        logger.warning("%s", line)
    return config


def _check(config: ServeConfig) -> None:
    """Refuse settings that cannot work on this machine; log those that have no effect.

    Raises:
        _Refusal: the settings cannot work here.
    """
    if (problem := problem_with(config)) is not None:
        raise _Refusal(problem)
    if ignored := ignored_with_uds(config):
        logger.warning("%s ignored: the endpoint listens at --uds alone", " and ".join(ignored))
    if ignored := ignored_when_headless(config):
        logger.warning("%s ignored: with --headless there is no endpoint here", ", ".join(ignored))


def _with_key_of_clients(config: ServeConfig) -> ServeConfig:
    """Settings with the API key of the environment, if no flag gives one.

    Unchanged where this host has no endpoint.

    Raises:
        _Refusal: the key of the environment cannot be one.
    """
    if config.mesh.headless or config.engine.nodes.node_rank:
        return config
    try:
        http, variable = with_key(config.http, os.environ)
    except ValueError as error:
        raise _Refusal(error) from error
    if variable:
        logger.info("clients must present the key in %s, since no --api-key is given", variable)
    return msgspec.structs.replace(config, http=http)


class _Model(NamedTuple):
    """The model to serve, as far as this launcher knows it.

    Headless launchers may learn it from the mesh.
    """

    settings: Settings | None = None
    title: str = "serve"
    """First line of the printed process table."""
    model_type: str = ""
    """``model_type`` of its config.json; empty if no model is known."""


def _resolved(config: ServeConfig) -> _Model:
    """The model that the settings name, found or downloaded.

    Raises:
        _Refusal: there is none, or it cannot be served with these settings.
    """
    if config.engine.model.model is None and config.mesh.headless:
        return _Model()
    try:
        info, settings = resolve(config.engine, config.mesh.known_size)
    except CheckpointError as error:
        raise _Refusal(error) from error
    if (problem := text_problem(config, info.directory)) is not None:
        raise _Refusal(problem)
    if ignored_revision(config):
        logger.warning("--revision ignored: only models of the Hugging Face hub have revisions")
    title = f"serve {settings.served_model_name[0]} ({info.architecture}, {settings.dtype})"
    return _Model(settings, title, info.model_type)


def _run(config: ServeConfig, model: _Model, held: contextlib.ExitStack, keys: MeshKeys | None) -> int:
    """Start and supervise; what is ``held`` is closed at the end."""
    mesh_name = "" if config.mesh.headless else uuid.uuid4().hex[:8]
    sockets: list[socket.socket] = []
    doors = None
    if not config.mesh.headless:
        config, sockets = _bound(config, held)
        doors = _doors(config, sockets, held)
    process.set_title("Serve", mesh_title(config))
    table = process_table(config, model.settings, usable_cores(), mesh_name, doors, devices=cuda_devices())
    if warning := shared_devices(config.mesh.local_size, machine_of(config)):
        logger.warning("%s", warning)
    with contextlib.suppress(OSError):  # a full disk, a reader that left: that is no reason not to serve
        print_table(model.title, table)
    supervisor = Supervisor(
        table,
        restart=config.restart,
        engine_spec=lambda rank, number: _one_more(config, rank, number),
        starter=ProcessStarter(_fork_server(config, model.model_type), _caches(config, held)),
        shutdown=Shutdown(
            drain_timeout=config.engine.drain_timeout,
            shutdown_timeout=config.http.shutdown_timeout,
            sockets=sockets,
        ),
    )
    return uvloop.run(_supervise(config, mesh_name, supervisor, doors, keys))


def _caches(config: ServeConfig, held: contextlib.ExitStack) -> CacheFiles | None:
    """Memory of KV caches that outlives instances; None without ``--enable-kv-inheritance``."""
    if not config.engine.cache.enable_kv_inheritance or not hasattr(os, "memfd_create"):
        return None
    caches = CacheFiles()
    held.callback(caches.close)
    return caches


def _bound(config: ServeConfig, held: contextlib.ExitStack) -> tuple[ServeConfig, list[socket.socket]]:
    """Bound sockets of the endpoint and the admin API, and settings with the real port.

    The admin API has one only with --admin-port.

    Raises:
        OSError: an address cannot be bound.
    """
    http = config.http
    if http.uds is not None:
        http = msgspec.structs.replace(http, uds=str(Path(http.uds).absolute()))
        sockets = [held.enter_context(at_path(Path(http.uds or "")))]
    else:
        sockets = [held.enter_context(bind(http.host, http.port))]
        http = msgspec.structs.replace(http, port=sockets[0].getsockname()[1])  # --port 0 takes any
    if http.admin_port is not None:
        sockets.append(held.enter_context(bind(http.admin_host, http.admin_port, "--admin-port")))
    return msgspec.structs.replace(config, http=http), sockets


def _doors(config: ServeConfig, sockets: list[socket.socket], held: contextlib.ExitStack) -> Doors:
    """Descriptors and files that routers inherit: bound sockets, shared counts, secrets."""
    files = shared_files(config.http, config.api_server_count)
    counts = str(held.enter_context(runtime_directory(files)))
    secrets = secret_file(config)
    if secrets is not None:
        held.callback(os.close, secrets)
    http, *admin = [listener.fileno() for listener in sockets]
    return Doors(http=http, admin=admin[0] if admin else None, counts_directory=counts, secrets=secrets)


def with_key_for_children(config: ServeConfig, keys: MeshKeys | None) -> ServeConfig:
    """Settings for this launcher's processes, which inherit a key for which no file was named."""
    if keys is None or not own_key.is_own(config.mesh):
        return config
    path = own_key.handed_down(own_key.hand_down(keys))
    return msgspec.structs.replace(config, mesh=msgspec.structs.replace(config.mesh, mesh_key_file=path))


def secret_file(config: ServeConfig) -> int | None:
    """Descriptor of an unnamed file with API keys for routers; None without keys.

    Only processes that inherit the descriptor can read the file.
    """
    secrets = secrets_of(config)
    if not secrets:
        return None
    descriptor = os.memfd_create("lockstep-secrets")
    os.write(descriptor, msgspec.json.encode(secrets))
    return descriptor


def _fork_server(config: ServeConfig, model_type: str) -> ForkServer | None:
    """Fork server for several computing processes, or for one with ``--restart``; else None."""
    device = config.engine.device
    if config.data_parallel_backend == "ray" or device.distributed_executor_backend == "ray":
        return None
    if config.engine.nodes.nnodes > 1 or not forked.is_possible(device.device, visible_cuda_devices()):
        return None
    if forked.inherited is not None:
        return forked.inherited
    # One instance alone gains nothing by it.
    several = config.mesh.local_size * max(1, config.engine.num_local_workers) > 1
    if not several and not config.restart:
        return None
    return ForkServer.start(forked.modules_of(model_type), mesh=mesh_title(config))


def _one_more(config: ServeConfig, rank: int | None, number: int) -> ProcessSpec:
    """Table entry of an instance that is started while the mesh serves.

    It shares the cores with those that are there.
    """
    threads = config.engine.device.cpu_threads or threads_per_worker(
        config.mesh.instances_here, usable_cores()
    )
    return engine_spec(config, rank, threads, number, cuda_devices())


async def _supervise(
    config: ServeConfig,
    mesh_name: str,
    supervisor: Supervisor,
    doors: Doors | None,
    keys: MeshKeys | None,
) -> int:
    overseer = Overseer(config.mesh.coordinator_endpoint, mesh_name, supervisor, machine_of(config), keys)
    beside = [asyncio.create_task(overseer.run())]
    beside.append(asyncio.create_task(ServiceManager(os.environ).keep(lambda: _progress(supervisor))))
    if doors is not None and doors.counts_directory is not None:
        counts = SharedCounts(Path(doors.counts_directory), "launcher")
        beside.append(
            asyncio.create_task(counts.keep(lambda: Snapshot(pid=os.getpid(), faults=supervisor.faults)))
        )

    async def until_ready() -> None:
        view = await wait_for_instances(config, supervisor, overseer)
        if not config.mesh.headless:
            await _wait_for_endpoint(config)
            with contextlib.suppress(OSError):  # the reader of our output has had enough: the mesh goes on
                _print_try_line(config, view)

    try:
        return await supervisor.run(until_ready)
    finally:
        for task in beside:
            task.cancel()


def _progress(supervisor: Supervisor) -> LauncherStatus:
    return LauncherStatus(supervisor.ready, supervisor.stopping, supervisor.children.members)


async def wait_for_instances(config: ServeConfig, supervisor: Supervisor, overseer: Overseer) -> View:
    """Wait until all of ``-dp`` (headless: the local ones) are ready.

    Raises:
        TimeoutError: --startup-timeout seconds went by without any progress; the message says of whom.
        KeyRefused: the coordinator has another mesh key, or one of the two has none.
    """
    progress_at = said_at = time.monotonic()
    seen: object = None
    while True:
        if overseer.refused is not None:
            raise overseer.refused
        view = overseer.view
        ready = view is not None and not view.waiting_for
        if config.mesh.headless:
            ready = supervisor.children.num_serving >= config.mesh.local_size
        if view is not None and ready:
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
            logger.info("waiting for %s", missing or "the local instances")
        overseer.changed.clear()
        await _wait(overseer.changed, 0.5)


async def _wait(event: asyncio.Event, timeout: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting], timeout=timeout)
    waiting.cancel()


async def _wait_for_endpoint(config: ServeConfig) -> None:
    """Wait until the endpoint answers ``/health``, since routers must connect to instances first."""
    http = config.http
    if http.ssl_ca_certs is not None:
        return  # it may ask for a certificate that we do not have
    if not await wait_for_health(
        _own_host(http), http.port, tls=http.scheme == "https", timeout=HEALTH_TIMEOUT, path=http.uds
    ):
        logger.warning("the instances are ready, but GET /health fails after %.0f s", HEALTH_TIMEOUT)


def _own_host(http: HttpConfig) -> str:
    """Address at which this host reaches the endpoint."""
    return EVERYWHERE.get(http.host, http.host)


def _print_try_line(config: ServeConfig, view: View) -> None:
    http = config.http
    address, way = url(http.scheme, _own_host(http), http.port), ""
    if http.uds is not None:
        address, way = f"{http.scheme}://localhost", f" --unix-socket {shlex.quote(http.uds)}"
    where = f"{address}/v1" if http.uds is None else http.address
    key = " -H 'Authorization: Bearer YOUR_KEY'" if http.api_key else ""
    settings = view.settings
    name, model = (settings.served_model_name[0], settings.pooling) if settings else ("", None)
    path, body = first_request(name, model)
    print(
        f"\n{len(view.members)} instance{'s' * (len(view.members) != 1)} ready at "
        f"{where}. Try:\n\n"
        f"  curl{way} {address}{path}{key} -H 'Content-Type: application/json' -d '{body}'\n",
        flush=True,
    )


def first_request(name: str, model: PooledModel | None) -> tuple[str, str]:
    """Path and body of a request that a model can answer.

    ``model``: None for one that generates text.
    """
    sentence = "It is a truth universally acknowledged, that"
    given: dict[str, str | int] = {"input": sentence}
    if model is None:
        path, given = "/v1/completions", {"prompt": sentence, "max_tokens": 60}
    elif (task := model.tasks[0]) is PoolingTask.SCORE:
        path, given = "/score", {"text_1": sentence, "text_2": "It is a ball."}
    else:
        path = PATHS[task]
    return path, msgspec.json.encode({"model": name, **given}).decode()


def main(argv: list[str] | None = None) -> int:
    """Run ``lockstep SUBCOMMAND``; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        print(f"lockstep {installed_version()}")
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
    except KeyboardInterrupt:
        return process.EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _of(module: str, function: str = "main") -> Command:
    """Subcommand whose module is loaded when it runs."""

    def run(argv: list[str]) -> int:
        found: Command = getattr(import_module(module), function)
        return found(argv)

    return run


COMMANDS: dict[str, tuple[Command, str]] = {
    "serve": (main_serve, "serve a model: the whole mesh, its head, or headless instances"),
    "status": (_of("router.tools.status"), "show the instances of a mesh, once or all the time"),
    "chat": (_of("router.tools.terminal_chat"), "talk to a model in the terminal"),
    "bench": (
        _of("router.tools.bench.command"),
        "measure a server or this machine: bench serve, bench machine",
    ),
    "batch": (
        _of("router.tools.batch.command"),
        "answer a file of requests (OpenAI's batch format) by a mesh of its own",
    ),
    "embed": (
        _of("router.tools.embed"),
        "embed the texts of a file by a mesh of its own",
    ),
    "replay": (
        _of("router.tools.replay.command"),
        "compute saved answers again, from their capsules, and compare them to the bit",
    ),
    "verify": (
        _of("router.tools.verify.command"),
        "check saved answers against a checkpoint in one process, without a mesh",
    ),
    "keygen": (_of("router.tools.keygen"), "make the key of a mesh over several hosts"),
    "kernels": (
        _of("router.tools.build_kernels"),
        "compile the native kernels ahead, for machines without a compiler",
    ),
    "doctor": (
        _of("router.tools.doctor.command"),
        "check an installation, its host and the network, and say what to fix",
    ),
    "drain": (_of("router.tools.operate", "main_drain"), "have an instance finish what it has and leave"),
    "scale": (_of("router.tools.operate", "main_scale"), "bring a mesh to a number of instances"),
    "role": (_of("router.tools.operate", "main_role"), "have an instance prefill, decode, or do both"),
    "autoscale": (
        _of("router.tools.autoscale.command"),
        "follow the load of a mesh, and start or drain instances",
    ),
    "epp": (
        _of("router.epp.command"),
        "tell a gateway where requests go (Gateway API Inference Extension)",
    ),
}


if __name__ == "__main__":
    sys.exit(main_serve())
