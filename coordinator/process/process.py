"""Set-up and end of every process: title, log, exit statuses, death with its parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import errno
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from coordinator.config import LogFormat, MeshAddressConfig, MeshConfig
from coordinator.process.last_error import LastErrorHandler
from coordinator.process.patient_log import PatientHandler
from coordinator.rpc import keys, own_key

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
OPEN_FILES = 65536
"""Open files and connections that a process asks for, if the system allows it."""

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells, of commands without an end of their own."""
EXIT_USAGE = 2
"""Exit status: wrong settings, and nothing was started."""
EXIT_FAILED = 1
"""Exit status: a port, memory, a model, or other instances were missing."""
EXIT_REFUSED = 3
"""Exit status: the coordinator refused this instance."""
EXIT_WORKER_LOST = 4
"""Exit status: a worker process ended, and with it a part of the model."""

EXIT_HUNG = 5
"""Exit status: a step of this instance did not end in time."""

PARENT_VARIABLE = "LOCKSTEP_PARENT_PID"
INSTANCE_VARIABLE = "LOCKSTEP_INSTANCE"
"""The name that a launcher gives an instance, to recognise it wherever it runs."""
MESH_VARIABLE = "LOCKSTEP_MESH_TITLE"
"""Port and model of the mesh, which a launcher gives its processes for their titles."""

PATIENCE = 0.8
"""Fraction of --startup-timeout for which an instance waits for others.

It knows best what is missing, so its launcher must not give up before it.
"""


SHORTAGES = {
    errno.EMFILE: "too many files are open: raise the limit with ulimit -n",
    errno.ENFILE: "too many files are open on this host: raise the limit with sysctl fs.file-max",
    errno.ENOMEM: "no memory is left",
    errno.ENOSPC: "no space is left on the device",
}
"""Causes of failures of operations that would succeed at another time."""

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request being handled, which log lines of its context carry."""

_log_format: LogFormat = "text"
_handler = PatientHandler()
"""The handler of all loggers of this process: one queue keeps the order of lines."""
_last_error = LastErrorHandler()
"""Keeps the last error for the launcher of this process."""


def log_format() -> LogFormat:
    """Log format of this process."""
    return _log_format


def set_up(role: str, log_level: str, log_format: LogFormat | None = None) -> None:
    """Set up a process: title, log format (None: unchanged), limit of open files.

    For a child of a launcher, death with its parent.
    """
    global _log_format
    _log_format = log_format or _log_format
    die_with_parent()
    raise_open_files()
    set_title(role, os.environ.get(MESH_VARIABLE, ""))
    text = f"({role} pid={os.getpid()}) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    _handler.setFormatter(
        JsonLines(role) if _log_format == "json" else TextLines(text, datefmt="%m-%d %H:%M:%S")
    )
    logging.setLogRecordFactory(RequestRecord)
    root = logging.getLogger()
    for other in [each for each in root.handlers if each not in (_handler, _last_error)]:
        root.removeHandler(other)
        other.close()
    root.addHandler(_handler)
    root.addHandler(_last_error)
    root.setLevel(log_level.upper())
    logging.captureWarnings(True)
    sys.excepthook = log_uncaught


def set_title(role: str, mesh: str) -> None:
    """Title of this process in ``ps``: its role, then its mesh's port and model."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"lockstep: {role} {mesh}".rstrip())


def log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook that logs the fatal error, since stderr's reader may stall."""
    if issubclass(kind, Exception):
        logger.critical("this process ends by an error that nobody expected", exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)


class RequestRecord(logging.LogRecord):
    """A log record with the id of its request, wherever the record is formatted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.request = REQUEST.get()


class TextLines(logging.Formatter):
    """Formatter of log lines for people, with the request's id at the end."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request", "")
        return super().formatMessage(record) + (f" (request {request})" if request else "")


class JsonLines(logging.Formatter):
    """Formatter of log lines that are one JSON object each."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname,
            "process": self._role,
            "pid": record.process,
            "logger": record.name,
            "source": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        if request := getattr(record, "request", ""):
            entry["request"] = request
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def hold_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next files and sockets get their numbers, and libraries that start processes abort.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def raise_open_files() -> None:
    """Raise the limit of open files as far as the hard limit allows.

    The soft one is often 1024, and a router has a file per client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_problem() -> str | None:
    """Why too few files may be open for any mesh; None if enough may.

    A soft limit that is too low is raised where the hard one allows it.
    """
    if _has_files():
        return None
    raise_open_files()
    if _has_files():
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"only {limit} files may be open at once (ulimit -n), too few for a mesh: raise the hard limit above "
        f"{own_key.FIRST_DESCRIPTOR}, best to {OPEN_FILES}, as with `ulimit -n`, LimitNOFILE= of a systemd "
        "unit, or --ulimit nofile= of a container"
    )


def _has_files() -> bool:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit == resource.RLIM_INFINITY or limit > own_key.FIRST_DESCRIPTOR


def shortage_of(error: BaseException) -> str | None:
    """Resource shortage of the host that caused an error, in words; else None."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in SHORTAGES:
            return SHORTAGES[cause.errno]
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def mesh_keys(mesh: MeshAddressConfig, prog: str) -> keys.MeshKeys | None:
    """The keys of ``--mesh-key-file``, or those of this user's mesh on this host; None without.

    Ends the process when a file cannot be used.
    """
    return _keys_or_end(mesh, prog, own_key.find)


def member_keys(mesh: MeshAddressConfig, prog: str) -> keys.MeshKeys | None:
    """Mesh keys for a process that joins the mesh, made if this user has none."""
    return _keys_or_end(mesh, prog, own_key.obtain)


def _keys_or_end(
    mesh: MeshAddressConfig, prog: str, own: Callable[[MeshAddressConfig], keys.MeshKeys | None]
) -> keys.MeshKeys | None:
    try:
        if mesh.mesh_key_file is not None:
            return keys.load(Path(mesh.mesh_key_file))
        return own(mesh) if own_key.is_own(mesh) else None
    except keys.KeyFileError as error:
        print(f"{prog}: error: --mesh-key-file: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def warn_if_open(mesh: MeshConfig) -> None:
    """Log at start which risks ``--insecure-mesh`` has, or that it is ignored."""
    if mesh.is_open:
        logger.warning(
            "--insecure-mesh: anyone on this network can read all requests, send requests and join the mesh"
        )
    elif mesh.insecure_mesh and mesh.mesh_key_file is not None:
        logger.warning("--insecure-mesh ignored: there is a mesh key")
    elif mesh.insecure_mesh:
        logger.warning(
            "--insecure-mesh: any user of this host can send requests, join and read those of others"
        )


def how_it_ended(status: int) -> str:
    """Describe how a process ended, in words; ``status`` as subprocess returns it."""
    if status >= 0:
        return f"ended with status {status}"
    hint = ": out of memory?" if -status == signal.SIGKILL else ""
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name}{hint})"
    except ValueError:
        return f"was killed by signal {-status}"


def finish(status: int) -> NoReturn:
    """End this process with exit handlers, but without tearing down libraries.

    What was registered for it still runs; libraries are not taken apart object by object, which takes seconds
    on a busy machine.
    """
    atexit._run_exitfuncs()  # logging's among them
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, however that happens.

    Linux only (prctl); the launcher passes its pid, so that a launcher which died before this call is
    noticed as well.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(EXIT_FAILED)
