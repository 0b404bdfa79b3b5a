"""A router's side of a trainer's process group: a process that it starts, and asks.

The process (:mod:`engine.trainer_group`) has torch, joins the group and writes what comes to files. It ends
with the router, or when anything goes wrong: what was in use stays in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from coordinator.process.process import PARENT_VARIABLE
from engine.trainer_group.wire import (
    KINDS,
    PACKED_BYTES,
    Announced,
    Failed,
    FromReceiver,
    JoinGroup,
    Receive,
    ToReceiver,
)
from router.errors import ApiError

JOIN_TIMEOUT = 120.0
"""Seconds for a trainer, and all ranks, to come."""
RECEIVE_TIMEOUT = 600.0
"""Seconds for the tensors of one call to come."""
SPARE = 60.0
"""Seconds beyond its own limits for a process that loads torch first."""
END_TIMEOUT = 5.0
"""Seconds for the process to end by itself."""
MOST_LINE = 1 << 20
"""Most bytes of an answer."""
GROUP_NAME = "weight_update_group"
"""Name of a group whose trainer gives none, as in SGLang."""
MOST_TENSORS = 100_000
"""Most tensors of one call."""


class GroupInfo(msgspec.Struct, kw_only=True):
    """Where a trainer's group forms: vLLM's ``init_info``, and SGLang's body."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP_NAME
    backend: str = "gloo"
    packed: bool = False
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2
    """Without effect: a sender's buffers are its own."""


class GroupMember:
    """The process in the trainer's group, if there is one."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._packed_bytes = 0
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<GroupMember {'none' if self._process is None else self._process.pid}>"

    @property
    def is_joined(self) -> bool:
        return self._process is not None

    async def join(self, info: GroupInfo) -> None:
        """JoinGroup a trainer's group; an earlier one is left.

        Raises:
            ApiError: the group is not possible (400), or the trainer has not come (408).
        """
        if info.backend not in ("gloo", "nccl"):
            raise ApiError(400, "backend is gloo or nccl", param="backend")
        fields: dict[str, Any] = {
            "address": info.master_address, "port": info.master_port, "first_rank": info.rank_offset,
            "world_size": info.world_size, "group": info.group_name, "backend": info.backend,
            "timeout": JOIN_TIMEOUT,
        }  # fmt: skip
        try:
            request = msgspec.convert(fields | {"type": "join"}, JoinGroup)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"init_info: {error}", param="init_info") from error
        await self.leave()
        self._packed_bytes = info.packed_buffer_size_bytes if info.packed else 0
        async with self._lock:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "engine.trainer_group"),
                env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", PARENT_VARIABLE: str(os.getpid())},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MOST_LINE,
            )
            reason = await self._ask(request, JOIN_TIMEOUT + SPARE)
        if reason is not None:
            place = f"{info.master_address}:{info.master_port}"
            raise ApiError(408, f"the group of the trainer at {place} has not formed: {reason}")

    async def receive(self, tensors: tuple[Announced, ...], path: Path) -> None:
        """Receive tensors in this order, and write them to a safetensors file.

        Raises:
            ApiError: there is no group (409), or it broke (400). Then it is over.
        """
        request = Receive(tensors=tensors, path=str(path), packed_bytes=self._packed_bytes)
        async with self._lock:
            if self._process is None:
                raise ApiError(409, "there is no group: POST /init_weight_transfer_engine first")
            reason = await self._ask(request, RECEIVE_TIMEOUT)
        if reason is not None:
            raise ApiError(
                400,
                f"the trainer's tensors have not come: {reason}. The weights in use go on; form the group "
                "anew with /init_weight_transfer_engine",
            )

    async def leave(self) -> None:
        """Leave the group; harmless without one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, request: ToReceiver, timeout: float) -> str | None:
        """Why a request failed, and the process is gone; None if it was carried out."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        reason: str | None = f"nothing came for {timeout:g} s"
        try:
            async with asyncio.timeout(timeout):
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                line = await process.stdout.readline()
            answer: FromReceiver = msgspec.json.decode(line, type=FromReceiver)
            reason = answer.reason if isinstance(answer, Failed) else None
        except TimeoutError:
            pass
        except (OSError, msgspec.DecodeError, ValueError):
            reason = "the process that receives ended"
        finally:
            if reason is not None:  # also where the caller is cancelled
                await self.leave()
        return reason


def announced(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> tuple[Announced, ...]:
    """The tensors that a trainer is about to send.

    Raises:
        ApiError: the lists do not fit together, or a type is not known (400).
    """
    if not names or not len(names) == len(dtypes) == len(shapes) <= MOST_TENSORS:
        raise ApiError(400, "names, their types and shapes are lists of one length", param="update_info")
    if len(set(names)) < len(names):
        raise ApiError(400, "a tensor is there twice", param="names")
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = dtype.removeprefix("torch.")
        if kind not in KINDS:
            raise ApiError(400, f"{name} has the type {dtype!r:.40}, which is not known", param="dtype_names")
        if any(size < 0 for size in shape):
            raise ApiError(400, f"{name} has the shape {shape}", param="shapes")
        found.append(Announced(name, kind, tuple(shape)))
    return tuple(found)
