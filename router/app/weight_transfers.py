"""Endpoints by which a trainer hands over weights in parts, under vLLM's and SGLang's paths.

Parts are files on the mesh's hosts: directories, safetensors files, segments of shared memory. When the
trainer is done, they and the version in use make the next one (:mod:`engine.weight_versions.assembled`), and
all instances go over to it. Part of the admin API, with its port and keys.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.membership.operations import CONFLICT, FAILED
from coordinator.messages import InFlight, OperatorAnswer, OperatorCommand, UpdateWeights
from engine.trainer_group.wire import Announced
from engine.weight_versions.assembled import assemble, homes_of, remove_unneeded
from engine.weight_versions.contract import WeightsRefused
from router.app.ordered import BODY_LIMITS, OrderedCommands, json_answer
from router.app.rollouts import UPDATE_TIMEOUT, UpdateAnswer
from router.app.trainer_group import GroupMember, announced
from router.app.transfer_bodies import (
    NAMES_LIMITS,
    TENSORS_LIMITS,
    CallResults,
    FinishUpdate,
    TransferStatus,
    UpdateInfo,
    arguments_of,
    group_info,
    info_of,
    read_call,
    read_distributed,
    read_finish,
    read_group,
    read_init,
    read_part,
    read_start,
    read_tensors,
)  # fmt: skip
from router.app.transfer_session import WeightTransfer, check_announced, part_of, write_part
from router.app.weights_in_use import TransferMesh, VersionInUse
from router.errors import ApiError
from router.http.body import read_body

WORKER_METHODS = (
    "skyrl_start_weight_update", "update_weights_nccl", "update_weights_ipc", "skyrl_finish_weight_update",
)  # fmt: skip
"""What ``/collective_rpc`` takes; no other method of anything is called."""
TRANSFER_PATHS = frozenset(
    {
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
        "/shutdown_weight_transfer_engine",
        "/update_weights_from_tensor",
    }
)
"""Paths of these endpoints; under the admin API's access check."""


class TransferEndpoints:
    """Handlers of the endpoints that take weights in parts."""

    def __init__(
        self,
        mesh: TransferMesh,
        command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]],
        room: Path,
    ) -> None:
        """``room``: directory of versions that are put together, the same on every host."""
        self._commands = OrderedCommands(mesh, command)
        self._in_use = VersionInUse(mesh, command)
        self._room = room
        self._transfer = WeightTransfer()
        self._member = GroupMember()

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            *self._in_use.routes(),
            Route("/init_weight_transfer_engine", self.init, methods=post),
            Route("/start_weight_update", self.start, methods=post),
            Route("/update_weights", self.update, methods=post),
            Route("/finish_weight_update", self.finish, methods=post),
            Route("/init_weights_update_group", self.init_group, methods=post),
            Route("/update_weights_from_distributed", self.update_from_group, methods=post),
            Route("/destroy_weights_update_group", self.leave_group, methods=post),
            Route("/collective_rpc", self.call_workers, methods=post),
            Route("/shutdown_weight_transfer_engine", self.shut_down, methods=post),
            Route("/update_weights_from_tensor", self.update_from_tensor, methods=post),
        ]

    # ---- a transfer

    async def init(self, request: Request) -> Response:
        """A trainer introduces itself; a transfer that an earlier one left is given up.

        With an address, its process group is joined.
        """
        info = read_init(await read_body(request, BODY_LIMITS)).init_info
        await self._give_up()
        if "nccl_unique_id_b64" in info:
            raise ApiError(
                400, "groups form at a master_address, not by nccl_unique_id_b64", param="init_info"
            )
        if "master_address" in info:
            await self._member.join(group_info(info))
        return json_answer(TransferStatus("Weight transfer initialized"))

    async def shut_down(self, _request: Request) -> Response:
        await self._give_up()
        return json_answer(TransferStatus("Weight transfer shut down"))

    async def start(self, request: Request) -> Response:
        read_start(await read_body(request, BODY_LIMITS) or b"{}")
        self._transfer.begin()
        return json_answer(TransferStatus("Weight update started"))

    async def update(self, request: Request) -> Response:
        await self._add(read_part(await read_body(request, NAMES_LIMITS)).update_info)
        return json_answer(TransferStatus("Weights updated"))

    async def finish(self, request: Request) -> Response:
        """All instances go over to the version with these parts; 400 where that is abandoned."""
        await self._finish(request, read_finish(await read_body(request, BODY_LIMITS) or b"{}"))
        return json_answer(TransferStatus("Weight update finished"))

    async def call_workers(self, request: Request) -> Response:
        """vLLM's ``/collective_rpc``, for the methods that SkyRL's client calls and no others."""
        wanted = read_call(await read_body(request, NAMES_LIMITS))
        match wanted.method:
            case "skyrl_start_weight_update":
                arguments_of(wanted, {"is_checkpoint_format": bool})
                if wanted.kwargs.get("is_checkpoint_format") is False:
                    raise ApiError(400, "weights have the checkpoint's names here", param="kwargs")
                self._transfer.begin()
            case "update_weights_nccl" | "update_weights_ipc":
                await self._add(info_of(arguments_of(wanted, {"update_info": dict})["update_info"]))
            case "skyrl_finish_weight_update":
                arguments_of(wanted, {})
                await self._finish(request, FinishUpdate())
            case _:
                known = ", ".join(WORKER_METHODS)
                raise ApiError(
                    400, f"{wanted.method!r:.80} is no method here: there are {known}", param="method"
                )
        return json_answer(CallResults([None]))

    # ---- a process group

    async def init_group(self, request: Request) -> Response:
        """SGLang's call to join a trainer's group."""
        await self._give_up()
        await self._member.join(read_group(await read_body(request, BODY_LIMITS)))
        return json_answer(UpdateAnswer(success=True, message="The group has formed."))

    async def leave_group(self, _request: Request) -> Response:
        await self._give_up()
        return json_answer(UpdateAnswer(success=True, message="The group is left."))

    async def update_from_group(self, request: Request) -> Response:
        """SGLang's call to receive tensors from the group, and to go over to them."""
        wanted = read_distributed(await read_body(request, NAMES_LIMITS))
        part = await self._received(announced(wanted.names, wanted.dtypes, wanted.shapes))
        label, ends = wanted.weight_version or "", wanted.abort_all_requests
        return await self._as_sglang(request, uuid.uuid4().hex, part, label, ends=ends)

    async def _give_up(self) -> None:
        """Forget the transfer under way, and leave the trainer's group."""
        self._transfer.give_up()
        await self._member.leave()

    async def _add(self, wanted: UpdateInfo) -> None:
        """Add a part to the transfer; tensors of the group are received first."""
        if wanted.names is None:
            self._transfer.add(part_of(wanted))
            return
        if wanted.path is not None or wanted.shared_memory is not None:
            raise ApiError(400, "update_info has names, or a path, or shared_memory", param="update_info")
        self._transfer.check()
        part = await self._received(announced(wanted.names, wanted.dtype_names, wanted.shapes))
        self._transfer.add(part)

    async def _received(self, tensors: tuple[Announced, ...]) -> Path:
        """A file with what the trainer broadcasts now.

        What does not fit the model is refused before: then the group is left, so that its trainer does not
        wait for somebody to receive it.
        """
        directory = self._room / f"received-{uuid.uuid4().hex}"
        part = directory / "received.safetensors"
        try:
            homes = await asyncio.to_thread(homes_of, self._in_use.source)
            check_announced(tensors, homes)
            await asyncio.to_thread(directory.mkdir, mode=0o700, parents=True)
            await self._member.receive(tensors, part)
        except (WeightsRefused, OSError) as error:
            await self._give_up()
            raise ApiError(400, str(error)) from error
        finally:
            if not self._member.is_joined:
                self._transfer.give_up()
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        return part

    # ---- going over

    async def _finish(self, request: Request, wanted: FinishUpdate) -> None:
        name = uuid.uuid4().hex
        parts = self._transfer.end()
        try:
            await self._go_over(request, name, parts, wanted.weight_version or "", InFlight(wanted.in_flight))
        except ApiError as error:
            if error.status != FAILED:
                raise
            raise ApiError(400, str(error)) from error

    async def update_from_tensor(self, request: Request) -> Response:
        """SGLang's call with tensors in the body; pickled ones are refused."""
        wanted = read_tensors(await read_body(request, TENSORS_LIMITS))
        if wanted.load_format != "safetensors":
            raise ApiError(
                400,
                "pickled tensors are not read: send safetensors files in base64 with load_format "
                '"safetensors", or use /update_weights_from_disk',
                param="load_format",
            )
        if not wanted.serialized_named_tensors:
            raise ApiError(400, "there are no tensors", param="serialized_named_tensors")
        name = uuid.uuid4().hex
        part = self._room / name / "received.safetensors"
        await asyncio.to_thread(write_part, part, wanted.serialized_named_tensors[0])
        label, ends = wanted.weight_version or "", wanted.abort_all_requests
        return await self._as_sglang(request, name, part, label, ends=ends)

    async def _as_sglang(
        self, request: Request, name: str, part: Path, label: str, *, ends: bool
    ) -> Response:
        """SGLang's answer to an update by one part; ``ends``: requests in flight do."""
        in_flight = InFlight.ABORT if ends else InFlight.KEEP
        try:
            text = await self._go_over(request, name, [part], label, in_flight)
        except ApiError as error:
            if error.status not in (400, CONFLICT, FAILED):
                raise
            refused = UpdateAnswer(success=False, message=str(error))
            return json_answer(refused, status=409 if error.status == CONFLICT else 400)
        return json_answer(UpdateAnswer(success=True, message=text))

    # ----

    async def _go_over(
        self, request: Request, name: str, parts: list[Path], label: str, in_flight: InFlight
    ) -> str:
        """Put a version together, and wait until all instances use it."""
        number, made = self._commands.orders.weights.number + 1, self._room / name
        before = self._in_use.source
        try:
            source = await asyncio.to_thread(assemble, before, parts, made)
            wish = UpdateWeights(
                command=name, source=str(source), label=label, number=number, in_flight=in_flight
            )
            text = await self._commands.carry_out(request, wish, UPDATE_TIMEOUT)
        except WeightsRefused as error:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
            raise ApiError(400, str(error)) from error
        except ApiError as error:
            if error.status in (CONFLICT, FAILED):  # nobody will read it
                await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
            raise
        await self._commands.see(lambda orders: orders.weights.number >= number)
        await asyncio.to_thread(remove_unneeded, self._room, before, source)
        return text
