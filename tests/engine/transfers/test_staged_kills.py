"""Processes on a pretended device that are killed while blocks are in their stage."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from engine.kernels.core import library
from engine.messages import Submit
from tests.engine.copying_device import OnDevice, load_on_device
from tests.engine.invariance.answers import ALONE, Answers, How, Instance
from tests.engine.invariance.mixed import requests
from tests.engine.invariance.test_table import VOCAB, directory_of
from tests.engine.tiers import test_bits as files
from tests.engine.transfers.test_bits import Serving, is_cheap, serve
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
__all__ = ["is_cheap"]
CHILD = "from tests.engine.transfers.test_staged_kills import child; child()"


def made_submit() -> Submit:
    (submit,) = requests(6, count=1, vocab_size=VOCAB, longest=20, most=4, greedy=True)
    params = msgspec.structs.replace(submit.params, prompt_logprobs=None, grammar=None)
    return msgspec.structs.replace(
        submit, prompt_ids=[5 + index % 290 for index in range(900)], params=params
    )


def child() -> None:
    """The process that is killed; it prints ``staged`` in the middle of a copy."""
    role, directory, where = sys.argv[1:]
    instance = load_on_device(Path(directory))
    assert isinstance(instance.executor, OnDevice)
    threading.Thread(target=tell_staged, args=(instance.executor,), daemon=True).start()
    if role == "writer":
        writer = files.Serving(instance, Path(where))
        with instance.executor.device.held_up():
            writer.answers([made_submit()])  # a step waits for no file
            writer.core.sharing.take_fetched(lambda _: None)
            time.sleep(PATIENCE)
    serving = Serving(instance, How(cache=16384))
    if role == "source":
        serving.submit([made_submit()])
        serve(serving)
    with instance.executor.device.held_up():
        print(serving.mover.address, flush=True)
        if role == "taker":
            serving.submit([made_submit()], where)
        while True:
            serving.turn()


def tell_staged(executor: OnDevice) -> None:
    device = executor.device
    while not (device is executor.device and device.is_waited_for.wait(0.01)):
        device = executor.device
    print("staged", flush=True)


@contextmanager
def started(role: str, directory: Path, where: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, role, str(directory), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of("llama", tmp_path_factory)


@pytest.fixture(scope="module")
def instance(directory: Path) -> Instance:
    return load_on_device(directory)


@pytest.fixture(scope="module")
def alone(instance: Instance) -> Answers:
    return instance.answers([made_submit()], ALONE)[0]


def test_a_source_that_is_killed_with_staged_blocks_costs_no_answer(
    directory: Path, instance: Instance, alone: Answers
) -> None:
    taker = Serving(instance, How(cache=16384))
    with started("source", directory, "") as source:
        taker.submit([made_submit()], line_of(source))
        told = threading.Event()
        threading.Thread(target=lambda: told.set() if line_of(source) == "staged" else None).start()

        def staged() -> bool:
            taker.turn()
            return told.is_set()

        until(staged)
        assert taker.core.sharing.is_lending, "its transfer is under way"
        source.send_signal(signal.SIGKILL)
    serve(taker)
    taker.mover.close()
    assert taker.found == alone
    report = taker.core.reports.report(0, 0)
    assert report.blocks_used == 0
    assert report.transfers is not None
    assert report.transfers.outcomes.keys() <= {"lost", "slow"}


def test_a_taker_that_is_killed_with_staged_blocks_keeps_none_of_its_source(
    directory: Path, instance: Instance, alone: Answers
) -> None:
    source = Serving(instance, How(cache=16384))
    source.submit([made_submit()])
    serve(source)
    with started("taker", directory, source.mover.address) as taker:
        line_of(taker)
        told = threading.Event()
        threading.Thread(target=lambda: told.set() if line_of(taker) == "staged" else None).start()

        def staged() -> bool:
            source.turn()
            return told.is_set()

        until(staged)
        taker.send_signal(signal.SIGKILL)
    serve(source)
    assert source.core.reports.report(0, 0).blocks_used == 0
    again = msgspec.structs.replace(made_submit(), request=99)
    source.submit([again])
    serve(source)
    source.mover.close()
    (expected,) = alone.values()
    assert set(source.found) == {made_submit().request, 99}
    assert all(found == expected for found in source.found.values())
    assert source.core.reports.report(0, 0).blocks_used == 0


def test_a_writer_that_is_killed_with_a_staged_block_leaves_no_wrong_file(
    directory: Path, instance: Instance, alone: Answers, tmp_path: Path
) -> None:
    with started("writer", directory, str(tmp_path)) as writer:
        assert line_of(writer) == "staged"
        writer.send_signal(signal.SIGKILL)
    assert not list(tmp_path.rglob("*.kv"))
    reader = files.Serving(instance, tmp_path)
    assert reader.answers([made_submit()]) == alone
    reader.close()
    assert list(tmp_path.rglob("*.kv")), "its own"
