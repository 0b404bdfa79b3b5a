"""The process in a trainer's group, beside a trainer in another process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from engine.trainer_group.group import TrainerGroup
from engine.trainer_group.wire import (
    Announced,
    Done,
    Failed,
    FromReceiver,
    JoinGroup,
    Receive,
    ToReceiver,
    buffers_of,
)
from tests.engine.trainer_group import trainer
from tests.engine.trainer_group.trainer import tensor

GROUP = "weights"


class Beside:
    """The receiving process, and a trainer."""

    def __init__(self, stack: contextlib.ExitStack, *arguments: str) -> None:
        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.callback(process.wait, 30)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        self.receiver = start("-m", "engine.trainer_group")
        self.trainer = start(str(trainer.__file__), GROUP, *arguments)
        assert self.trainer.stdout is not None
        self.port = int(self.trainer.stdout.readline())

    def ask(self, request: ToReceiver) -> FromReceiver:
        assert self.receiver.stdin is not None
        assert self.receiver.stdout is not None
        self.receiver.stdin.write(msgspec.json.encode(request) + b"\n")
        self.receiver.stdin.flush()
        return msgspec.json.decode(self.receiver.stdout.readline(), type=FromReceiver)

    def join(self, world_size: int, timeout: float = 30.0) -> FromReceiver:
        return self.ask(
            JoinGroup(
                address="127.0.0.1",
                port=self.port,
                first_rank=1,
                world_size=world_size,
                group=GROUP,
                backend="gloo",
                timeout=timeout,
            )
        )  # fmt: skip


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as held:
        yield held


def announced(*counts: int) -> tuple[Announced, ...]:
    return tuple(Announced(f"t{index}", "float32", (count,)) for index, count in enumerate(counts))


def joined(port: int, world_size: int, timeout: float = 30.0, group: str = GROUP) -> TrainerGroup:
    return TrainerGroup(
        JoinGroup(
            address="127.0.0.1", port=port, first_rank=1, world_size=world_size, group=group, backend="gloo",
            timeout=timeout,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("world_size", "packed"), [(2, False), (4, True)])
def test_tensors_come_as_they_were_sent(tmp_path: Path, world_size: int, packed: bool) -> None:
    path = tmp_path / "part.safetensors"
    store, name = trainer.store(world_size), f"{GROUP}-{world_size}"
    with ThreadPoolExecutor(1) as other:
        member = other.submit(joined, store.port, world_size, group=name)
        group = trainer.group(store, name, world_size)
        received = other.submit(
            lambda: member.result().receive(announced(5, 3), path, 1 << 20 if packed else 0)
        )
        trainer.send(group, [5, 3], packed=packed)
        received.result(30)
    found = load_file(path)
    assert torch.equal(found["t0"], tensor(0, 5))
    assert torch.equal(found["t1"], tensor(1, 3))


@pytest.mark.timeout(120)
def test_a_trainer_that_dies_is_noticed_at_once(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    beside = Beside(stack, "2", "5", "3", "--die-after", "1")
    assert beside.join(2) == Done()
    answer = beside.ask(Receive(tensors=announced(5, 3), path=str(tmp_path / "p")))
    assert isinstance(answer, Failed)
    assert "onnection" in answer.reason
    assert beside.receiver.stdin is not None
    beside.receiver.stdin.close()
    assert beside.receiver.wait(30) == 0


def test_a_trainer_that_never_comes() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(RuntimeError, match=r"(?i)time|connect"):
            joined(held.getsockname()[1], 2, timeout=0.5)


def test_buffers_end_where_vllms_do() -> None:
    tensors = announced(10, 10, 1, 30, 1)
    assert [[each.name for each in found] for found in buffers_of(tensors, 40)] == [
        ["t0", "t1"],
        ["t2", "t3"],
        ["t4"],
    ]
    assert [len(found) for found in buffers_of(tensors, 0)] == [1] * 5
