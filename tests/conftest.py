"""What all tests share: how those that start real processes are run.

They have deadlines in seconds, and the machine may be busy with something else. So ``make test`` runs the other
tests first, then these, a file in each of three processes. One or two tests that failed in a part run once more, each alone
(``tests.second_tries``).
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Generator

import hypothesis
import pytest

from parallel.compiler import cpu_flags
from parallel.devices import has_device
from tests.nightly import NIGHTLY, costs, examples, runs_now

pytest_plugins = ["tests.measured"]

MESH_LIMIT = 900
"""Least limit of a test of real processes in seconds; the machine may be busy."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: children would
    signal.signal(signal.SIGINT, signal.default_int_handler)  # inherit that, and be deaf to Ctrl-C

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    os.environ["OMP_NUM_THREADS"] = "1"

if importlib.util.find_spec("triton") is not None and not has_device():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton asks when it is loaded, so before anything does


if platform.machine() == "x86_64":  # the interpreter multiplies by numpy, and OpenBLAS has kernels for AVX2
    os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")  # in which a row's bits depend on others


if {"avx512f", "avx512_bf16"} & cpu_flags() == {"avx512f"}:  # oneDNN emulates bfloat16 there, and a row's
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # bits depend on others: serve refuses such models


def _session_directory() -> str:
    """A directory of this run for what processes of one user share, like mesh keys.

    Mode 0700.
    """
    made, owner = tempfile.mkdtemp(prefix="lockstep-tests-"), os.getpid()
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    return made


hypothesis.settings.register_profile(
    "lockstep",
    max_examples=examples(100),
    deadline=None,  # a busy machine is no fault of the code
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("lockstep")

os.environ["XDG_RUNTIME_DIR"] = _session_directory()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, a fifth of the time for nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs at night only, and set the limit of tests of meshes.

    See :func:`tests.nightly.runs_now` and :mod:`tests.nightly.costs`.
    """
    kept = [item for item in items if runs_now(item)]
    if costs.EACH_PUSH and not NIGHTLY:
        kept = costs.chosen(kept, costs.read_costs())
    if len(kept) < len(items):
        ids = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
        items[:] = kept
    for item in items:
        own = item.get_closest_marker("timeout")
        if item.get_closest_marker("mesh") and (own is None or own.args[0] < MESH_LIMIT):
            item.add_marker(pytest.mark.timeout(MESH_LIMIT), append=False)


def pytest_configure(config: pytest.Config) -> None:
    """Measure tests where that is asked for."""
    if "LOCKSTEP_COSTS" in os.environ:
        config.pluginmanager.register(costs.Recorder())


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of garbage collections.

    Those would go through all of them again and again. Tests make many objects and few cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_unconfigure() -> None:
    """Let the end of the process free what was kept.

    Else triton's bindings print hundreds of lines about objects that leak.
    """
    gc.unfreeze()
