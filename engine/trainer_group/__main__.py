"""``python -m engine.trainer_group``: receives a trainer's weights for a router, which starts it.

It ends with its standard input: a router that is gone leaves no process.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from pathlib import Path

import msgspec

from coordinator.process import process
from engine.trainer_group.group import TrainerGroup
from engine.trainer_group.wire import Done, Failed, FromReceiver, JoinGroup, Receive, ToReceiver


class TensorReceiver:
    """The group, once it is joined."""

    def __init__(self) -> None:
        self._group: TrainerGroup | None = None

    def __repr__(self) -> str:
        return f"<TensorReceiver in {self._group}>"

    def answer(self, request: ToReceiver) -> FromReceiver:
        try:
            match request:
                case JoinGroup():
                    self._group = TrainerGroup(request)
                case Receive():
                    if self._group is None:
                        return Failed("no group was joined")
                    self._group.receive(request.tensors, Path(request.path), request.packed_bytes)
        except (RuntimeError, OSError, ValueError) as error:  # torch's are the first
            return Failed(str(error).partition("\n")[0] or type(error).__name__)
        return Done()


def main() -> None:
    process.set_up("Trainer_group", "warning", "text")
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)  # also where the group waits for a trainer

    threading.Thread(target=read, daemon=True).start()
    receiver = TensorReceiver()
    while True:
        request = msgspec.json.decode(lines.get(), type=ToReceiver)
        sys.stdout.buffer.write(msgspec.json.encode(receiver.answer(request)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
