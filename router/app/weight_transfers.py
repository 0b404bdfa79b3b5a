"""Endpoints by which a trainer hands over weights in parts, under vLLM's and SGLang's paths.

Parts are files on the mesh's hosts: directories, safetensors files, segments of shared memory. When the
trainer is done, they and the version in use make the next one (:mod:`engine.weight_versions.assembled`), and
all instances go over to it. Part of the admin API, with its port and keys.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.membership.operations import CONFLICT, FAILED
from coordinator.messages import InFlight, OperatorAnswer, OperatorCommand, UpdateWeights, View
from coordinator.numerics import Numerics
from engine.trainer_group.wire import KINDS, Announced
from engine.weight_versions.assembled import Homes, assemble, first_numbers, homes_of, remove_unneeded
from engine.weight_versions.contract import WeightsRefused
from router.app.ordered import BODY_LIMITS, OrderedCommands, json_answer, unavailable
from router.app.rollouts import UPDATE_TIMEOUT, UpdateAnswer
from router.app.trainer_group import GROUP_NAME, GroupInfo, GroupMember, announced
from router.config import HttpConfig
from router.errors import ApiError
from router.http.body import decoder, read_body
from router.mesh import ServedModel

SESSION_TIMEOUT = 600.0
"""Seconds without a call after which a transfer may be given up."""
MOST_PARTS = 10_000
"""Most parts of one transfer."""
NAMES_LIMITS = HttpConfig(max_request_bytes=16_000_000, request_timeout=60.0)
"""Limits of a body that lists tensors."""
TENSORS_LIMITS = HttpConfig(max_request_bytes=1_000_000_000, request_timeout=600.0)
"""Limits of a body that has tensors in it."""
MOST_NUMBERS = 10_000
"""Most numbers of a tensor that ``/get_weights_by_name`` returns."""
SEGMENTS = Path("/dev/shm")
"""Where Linux shows named segments of shared memory."""
SEGMENT = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9._-]{0,200})")
WORKER_METHODS = (
    "skyrl_start_weight_update", "update_weights_nccl", "update_weights_ipc", "skyrl_finish_weight_update",
)  # fmt: skip
"""What ``/collective_rpc`` takes; no other method of anything is called."""
UNLABELLED = "default"
"""Label of the weights that a mesh was started with."""
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
        "/weight_info",
        "/update_weight_version",
        "/weight_checker",
        "/weights_checker",
        "/get_weights_by_name",
        "/update_weights_from_tensor",
    }
)
"""Paths of these endpoints; under the admin API's access check."""


class TransferMesh(Protocol):
    """Interface of the mesh that these endpoints use."""

    @property
    def view(self) -> View | None: ...
    @property
    def model(self) -> ServedModel | None: ...
    def numerics(self) -> Mapping[Numerics, list[int]]: ...


class InitTransfer(msgspec.Struct):
    """Body of vLLM's ``/init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class StartUpdate(msgspec.Struct):
    """Body of vLLM's ``/start_weight_update``; what it has is without effect."""


class UpdateInfo(msgspec.Struct):
    """Where a part of new weights is; one of these fields is set."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    """Directory or safetensors file, on every host of the mesh."""
    shared_memory: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    """Name of a segment that holds one safetensors file."""
    names: list[str] | None = None
    """Tensors that the trainer broadcasts now, in this order, to its group."""
    dtype_names: list[str] = []
    shapes: list[list[int]] = []


class UpdatePart(msgspec.Struct):
    """Body of vLLM's ``/update_weights``."""

    update_info: UpdateInfo


class FinishUpdate(msgspec.Struct):
    """Body of vLLM's ``/finish_weight_update``."""

    weight_version: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    """Label of the version; None: its number."""
    in_flight: Literal["keep", "recompute", "abort", "finish"] = "keep"
    """What becomes of requests in flight; vLLM has no such field."""


class WorkerCall(msgspec.Struct):
    """Body of vLLM's ``/collective_rpc``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None
    """Without effect: each call has a limit of its own."""


class CallResults(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/collective_rpc``."""

    results: list[None]


class TensorUpdate(msgspec.Struct):
    """Body of SGLang's ``/update_weights_from_tensor``."""

    serialized_named_tensors: list[str]
    """Safetensors files in base64; the first has the tensors for all workers."""
    load_format: str | None = None
    """``safetensors``: pickled tensors are refused."""
    flush_cache: bool = True
    """Without effect: blocks of other weights have other names."""
    abort_all_requests: bool = False
    weight_version: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class DistributedUpdate(msgspec.Struct):
    """Body of SGLang's ``/update_weights_from_distributed``: tensors that are broadcast now."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP_NAME
    flush_cache: bool = True
    """Without effect: blocks of other weights have other names."""
    abort_all_requests: bool = False
    weight_version: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class LabelWeights(msgspec.Struct):
    """Body of vLLM's and SGLang's ``/update_weight_version``."""

    new_version: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    abort_all_requests: bool = False
    """SGLang's field; its default there is true."""


class Relabelled(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/update_weight_version``."""

    new_version: str
    message: str
    success: bool = True


class CheckWeights(msgspec.Struct):
    """Body of vLLM's ``/weight_checker`` and SGLang's ``/weights_checker``."""

    action: str = "checksum"
    baseline: dict[str, str] | None = None


class NamedWeights(msgspec.Struct):
    """Body of SGLang's ``/get_weights_by_name``."""

    name: str
    truncate_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_NUMBERS)] = 100


class TransferStatus(msgspec.Struct, frozen=True):
    """Answer of vLLM's calls that hand over weights."""

    message: str


class WeightInfo(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/weight_info``, with the number and digest of the version."""

    weight_version: str
    number: int
    digest: str


class Checksums(msgspec.Struct, frozen=True):
    """Answer to ``checksum``: one digest of all tensors."""

    checksums: dict[str, str]
    success: bool = True
    message: str = "Success."


class Comparison(msgspec.Struct, frozen=True):
    """Answer to ``compare``."""

    match: bool
    mismatches: list[str]


_read_init = decoder(InitTransfer)
_read_start = decoder(StartUpdate)
_read_part = decoder(UpdatePart)
_read_finish = decoder(FinishUpdate)
_read_group = decoder(GroupInfo)
_read_distributed = decoder(DistributedUpdate)
_read_call = decoder(WorkerCall)
_read_tensors = decoder(TensorUpdate)
_read_label = decoder(LabelWeights)
_read_check = decoder(CheckWeights)
_read_name = decoder(NamedWeights)


class WeightTransfer:
    """The transfer that a trainer has begun, and its parts so far."""

    def __init__(self) -> None:
        self._parts: list[Path] | None = None
        self._last_call = 0.0

    def __repr__(self) -> str:
        return f"<WeightTransfer {'none' if self._parts is None else f'{len(self._parts)} parts'}>"

    def begin(self) -> None:
        """Begin a transfer.

        Raises:
            ApiError: another one is under way (409).
        """
        silent = time.monotonic() - self._last_call
        if self._parts is not None and silent < SESSION_TIMEOUT:
            raise ApiError(
                409,
                f"another transfer is under way, last called {silent:.0f} s ago: finish it, or give it up "
                "with /init_weight_transfer_engine",
            )
        self._parts, self._last_call = [], time.monotonic()

    def add(self, part: Path) -> None:
        """Add a part.

        Raises:
            ApiError: no transfer was begun here (409), or it has too many parts (400).
        """
        parts = self._begun()
        if len(parts) == MOST_PARTS:
            raise ApiError(400, f"a transfer has at most {MOST_PARTS} parts")
        parts.append(part)
        self._last_call = time.monotonic()

    def check(self) -> None:
        """Check that a transfer was begun here.

        Raises:
            ApiError: none was (409).
        """
        self._begun()

    def end(self) -> list[Path]:
        """End the transfer; returns its parts.

        Raises:
            ApiError: none was begun here (409), or it has no parts (400).
        """
        parts, self._parts = self._begun(), None
        if not parts:
            raise ApiError(400, "no weights came between /start_weight_update and /finish_weight_update")
        return parts

    def give_up(self) -> None:
        """Forget the transfer, if there is one."""
        self._parts = None

    def _begun(self) -> list[Path]:
        if self._parts is None:
            raise ApiError(409, "no transfer is under way at this router: POST /start_weight_update first")
        return self._parts


class TransferEndpoints:
    """Handlers of the endpoints that take weights in parts, and tell of those in use."""

    def __init__(
        self,
        mesh: TransferMesh,
        command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]],
        room: Path,
    ) -> None:
        """``room``: directory of versions that are put together, the same on every host."""
        self._mesh = mesh
        self._commands = OrderedCommands(mesh, command)
        self._room = room
        self._transfer = WeightTransfer()
        self._member = GroupMember()

    def routes(self) -> list[Route]:
        post, both = ["POST"], ["GET", "POST"]
        return [
            Route("/init_weight_transfer_engine", self.init, methods=post),
            Route("/start_weight_update", self.start, methods=post),
            Route("/update_weights", self.update, methods=post),
            Route("/finish_weight_update", self.finish, methods=post),
            Route("/init_weights_update_group", self.init_group, methods=post),
            Route("/update_weights_from_distributed", self.update_from_group, methods=post),
            Route("/destroy_weights_update_group", self.leave_group, methods=post),
            Route("/collective_rpc", self.call_workers, methods=post),
            Route("/shutdown_weight_transfer_engine", self.shut_down, methods=post),
            Route("/update_weight_version", self.rename, methods=post),
            Route("/weight_info", self.weight_info, methods=["GET"]),
            Route("/weight_checker", self.check, methods=both),
            Route("/weights_checker", self.check, methods=both),
            Route("/get_weights_by_name", self.weights_by_name, methods=both),
            Route("/update_weights_from_tensor", self.update_from_tensor, methods=post),
        ]

    # ---- a transfer

    async def init(self, request: Request) -> Response:
        """A trainer introduces itself; a transfer that an earlier one left is given up.

        With an address, its process group is joined.
        """
        info = _read_init(await read_body(request, BODY_LIMITS)).init_info
        await self._give_up()
        if "nccl_unique_id_b64" in info:
            raise ApiError(
                400, "groups form at a master_address, not by nccl_unique_id_b64", param="init_info"
            )
        if "master_address" in info:
            await self._member.join(_group_info(info))
        return json_answer(TransferStatus("Weight transfer initialized"))

    async def shut_down(self, _request: Request) -> Response:
        await self._give_up()
        return json_answer(TransferStatus("Weight transfer shut down"))

    async def start(self, request: Request) -> Response:
        _read_start(await read_body(request, BODY_LIMITS) or b"{}")
        self._transfer.begin()
        return json_answer(TransferStatus("Weight update started"))

    async def update(self, request: Request) -> Response:
        await self._add(_read_part(await read_body(request, NAMES_LIMITS)).update_info)
        return json_answer(TransferStatus("Weights updated"))

    async def finish(self, request: Request) -> Response:
        """All instances go over to the version with these parts; 400 where that is abandoned."""
        await self._finish(request, _read_finish(await read_body(request, BODY_LIMITS) or b"{}"))
        return json_answer(TransferStatus("Weight update finished"))

    async def call_workers(self, request: Request) -> Response:
        """vLLM's ``/collective_rpc``, for the methods that SkyRL's client calls and no others."""
        wanted = _read_call(await read_body(request, NAMES_LIMITS))
        match wanted.method:
            case "skyrl_start_weight_update":
                _given(wanted, {"is_checkpoint_format": bool})
                if wanted.kwargs.get("is_checkpoint_format") is False:
                    raise ApiError(400, "weights have the checkpoint's names here", param="kwargs")
                self._transfer.begin()
            case "update_weights_nccl" | "update_weights_ipc":
                await self._add(_info_of(_given(wanted, {"update_info": dict})["update_info"]))
            case "skyrl_finish_weight_update":
                _given(wanted, {})
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
        await self._member.join(_read_group(await read_body(request, BODY_LIMITS)))
        return json_answer(UpdateAnswer(success=True, message="The group has formed."))

    async def leave_group(self, _request: Request) -> Response:
        await self._give_up()
        return json_answer(UpdateAnswer(success=True, message="The group is left."))

    async def update_from_group(self, request: Request) -> Response:
        """SGLang's call to receive tensors from the group, and to go over to them."""
        wanted = _read_distributed(await read_body(request, NAMES_LIMITS))
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
            self._transfer.add(_part(wanted))
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
            homes = await asyncio.to_thread(homes_of, self._source())
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
        wanted = _read_tensors(await read_body(request, TENSORS_LIMITS))
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
        await asyncio.to_thread(_write, part, wanted.serialized_named_tensors[0])
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

    # ---- the version in use

    async def weight_info(self, _request: Request) -> Response:
        weights = self._commands.orders.weights
        return json_answer(
            WeightInfo(weights.label or UNLABELLED, weights.number, weights.digest or self._loaded_digest())
        )

    async def rename(self, request: Request) -> Response:
        """Give the weights in use another label, on all instances.

        They are read again, so that a number stands for one label, also after deaths.
        """
        wanted = _read_label(await read_body(request, BODY_LIMITS))
        wish = UpdateWeights(
            command=uuid.uuid4().hex,
            source=str(self._source()),
            label=wanted.new_version,
            in_flight=InFlight.ABORT if wanted.abort_all_requests else InFlight.KEEP,
        )
        text = await self._commands.carry_out(request, wish, UPDATE_TIMEOUT)
        await self._commands.see(lambda orders: orders.weights.update == wish.command)
        return json_answer(Relabelled(new_version=wanted.new_version, message=text))

    async def check(self, request: Request) -> Response:
        """Digest of the weights that all instances have read, or a comparison with one."""
        wanted = _read_check(await read_body(request, NAMES_LIMITS) or b"{}")
        digest = self._commands.orders.weights.digest or self._loaded_digest()
        if wanted.action == "checksum":
            return json_answer(Checksums({"weights": digest}))
        if wanted.action == "compare" and wanted.baseline is not None:
            mismatches = sorted(name for name, each in wanted.baseline.items() if each != digest)
            return json_answer(Comparison(match=not mismatches, mismatches=mismatches))
        raise ApiError(
            400,
            "action is checksum, or compare with a baseline: weights in use are never overwritten",
            param="action",
        )

    async def weights_by_name(self, request: Request) -> Response:
        """The first numbers of a tensor, read where the version in use was read."""
        wanted = _read_name(await read_body(request, BODY_LIMITS))
        source = self._source()
        try:
            homes = await asyncio.to_thread(homes_of, source)
            numbers = await asyncio.to_thread(first_numbers, homes, wanted.name, wanted.truncate_size)
        except KeyError as error:
            raise ApiError(400, f"{source} has no floats named {wanted.name!r}", param="name") from error
        except (OSError, ValueError) as error:
            raise ApiError(400, str(error)) from error
        return Response(msgspec.json.encode(numbers), media_type="application/json")

    # ----

    async def _go_over(
        self, request: Request, name: str, parts: list[Path], label: str, in_flight: InFlight
    ) -> str:
        """Put a version together, and wait until all instances use it."""
        number, made = self._commands.orders.weights.number + 1, self._room / name
        before = self._source()
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

    def _source(self) -> Path:
        """Directory of the version in use."""
        weights, model = self._commands.orders.weights, self._mesh.model
        if weights.number:
            return Path(weights.source)
        if model is None:
            raise unavailable("the mesh has not begun")
        return Path(model.directory)

    def _loaded_digest(self) -> str:
        """Digest of the weights that the mesh was started with; empty while unknown."""
        return next((each.weights for each in self._mesh.numerics()), "")


def _given(call: WorkerCall, known: Mapping[str, type]) -> dict[str, Any]:
    """Arguments of a call, all by name.

    Raises:
        ApiError: there are others, or they have other types (400).
    """
    are_right = all(isinstance(value, known.get(name, ())) for name, value in call.kwargs.items())
    if call.args or not are_right or ("update_info" in known and "update_info" not in call.kwargs):
        names = ", ".join(known) or "none"
        raise ApiError(400, f"{call.method} has these arguments, by name: {names}", param="kwargs")
    return call.kwargs


def _info_of(given: dict[str, Any]) -> UpdateInfo:
    """Where a part is, as JSON names it.

    Raises:
        ApiError: it is nowhere that is read (400).
    """
    if "ipc_handles_pickled" in given or "ipc_handles" in given:
        raise ApiError(
            400,
            "pickled handles of device memory (ipc_handles_pickled) are not read: name a path or a segment "
            "of shared_memory",
            param="update_info",
        )
    try:
        return msgspec.convert(given, UpdateInfo)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"update_info: {error}", param="update_info") from error


def _group_info(given: dict[str, Any]) -> GroupInfo:
    """Where a trainer's group forms, as JSON names it.

    Raises:
        ApiError: a field is missing, or has another type (400).
    """
    try:
        return msgspec.convert(given, GroupInfo)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"init_info: {error}", param="init_info") from error


def check_announced(tensors: Sequence[Announced], homes: Homes) -> None:
    """Check by the model's files that tensors are its own.

    Raises:
        WeightsRefused: one is unknown, or of another type or shape.
    """
    for each in tensors:
        if each.name not in homes:
            raise WeightsRefused(f"the trainer's {each.name} is no tensor of this model's checkpoint")
        known, kind = homes[each.name][1], KINDS[each.dtype][0]
        if (known.shape, known.kind) != (each.shape, kind):
            raise WeightsRefused(
                f"the trainer's {each.name} is {kind} {list(each.shape)}, "
                f"not {known.kind} {list(known.shape)}"
            )


def _part(wanted: UpdateInfo) -> Path:
    """The file or directory that an update names."""
    if (wanted.path is None) == (wanted.shared_memory is None):
        raise ApiError(400, "update_info has one of path and shared_memory.", param="update_info")
    if wanted.path is not None:
        if not wanted.path.startswith("/"):
            raise ApiError(400, "path is an absolute path.", param="update_info")
        return Path(wanted.path)
    assert wanted.shared_memory is not None
    found = SEGMENT.fullmatch(wanted.shared_memory)
    if found is None:
        raise ApiError(400, f"{wanted.shared_memory!r} is no name of a segment.", param="update_info")
    return SEGMENTS / found[1]


def _write(path: Path, text: str) -> None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, "a tensor file is not in base64", param="serialized_named_tensors") from error
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(data)
