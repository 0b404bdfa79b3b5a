"""Endpoints that load and unload low-rank adapters, under vLLM's and SGLang's paths.

Part of the admin API, with its port and keys; on the endpoint's port if an environment variable allows it. A
load is an order to all instances: a command to the coordinator, repeated until all have the adapter.
"""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.messages import (
    AdapterSource,
    LoadAdapter,
    OperatorAnswer,
    OperatorCommand,
    UnloadAdapter,
)
from engine.adapters.adapter_settings import CONFIG, WEIGHTS
from router.app.ordered import BODY_LIMITS, HasView, OrderedCommands, json_answer
from router.config import HttpConfig
from router.errors import ApiError, ErrorKind
from router.http.body import decoder, read_body
from router.http.large_bodies import run_sized

SWITCHES = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "LOCKSTEP_ALLOW_RUNTIME_LORA_UPDATING")
"""Environment variables that open these paths on the endpoint's port."""
TENSOR_LIMITS = HttpConfig(max_request_bytes=1 << 29, request_timeout=120.0)
"""Limits of a body that brings tensors: bytes and seconds."""
LOAD_TIMEOUT = 180.0
"""Seconds for an adapter to be served by all instances, or given up."""
UPLOADS = "lockstep-loaded-adapters"
"""Directory of adapters that came as tensors, in the allowed or a temporary one."""
UNLISTED_FOR = 600.0
"""Seconds until such files are removed, if the mesh does not list them."""
ADAPTER_PATHS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/skyrl/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/load_lora_adapter_from_tensors",
    }
)
"""Paths of these endpoints."""
INVALID = "InvalidUserInput"
"""vLLM's ``type`` of an error about an adapter."""
NOT_THERE = "is no adapter: it has no"
"""Words of a reason for which vLLM answers 404."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
Place = Annotated[str, msgspec.Meta(max_length=4096)]


class LoadRequest(msgspec.Struct):
    """Body of vLLM's ``/v1/load_lora_adapter`` and SGLang's ``/load_lora_adapter``."""

    lora_name: Name = ""
    lora_path: Place = ""
    load_inplace: bool = False
    pinned: bool = False
    """Without effect: all adapters stay in memory."""


class UnloadRequest(msgspec.Struct):
    """Body of ``/v1/unload_lora_adapter`` and ``/unload_lora_adapter``."""

    lora_name: Name = ""
    lora_int_id: int | None = None
    """Not used: the name is enough."""


class TensorsRequest(msgspec.Struct):
    """Body of SGLang's ``/load_lora_adapter_from_tensors``."""

    lora_name: Name
    config_dict: dict[str, Any]
    serialized_tensors: str
    """A safetensors file, in base64."""
    load_inplace: bool = False
    pinned: bool = False
    load_format: str | None = None
    added_tokens_config: dict[str, Any] | None = None


class ReplacedAdapter(msgspec.Struct, frozen=True):
    """Answer of SkyRL's path."""

    lora_name: str
    status: str = "ok"


class LoadedAdapters(msgspec.Struct, frozen=True):
    """Answer of SGLang's paths."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]
    """Directories by name."""


_read_load = decoder(LoadRequest)
_read_unload = decoder(UnloadRequest)
_read_tensors = decoder(TensorsRequest)


def loads_adapters(variables: Mapping[str, str]) -> bool:
    """Whether the environment opens these paths on the endpoint's port."""
    return any(variables.get(name, "").strip().lower() in ("1", "true") for name in SWITCHES)


class AdapterEndpoints:
    """Handlers of the endpoints that change the mesh's list of adapters."""

    def __init__(
        self, mesh: HasView, command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]]
    ) -> None:
        self._mesh = mesh
        self._commands = OrderedCommands(mesh, command)

    def __repr__(self) -> str:
        return f"<AdapterEndpoints, {len(self._listed())} adapters>"

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/skyrl/v1/load_lora_adapter", self.load_in_place, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/load_lora_adapter", self.load_as_sglang, methods=["POST"]),
            Route("/unload_lora_adapter", self.unload_as_sglang, methods=["POST"]),
            Route("/load_lora_adapter_from_tensors", self.load_from_tensors, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        wanted = _read_load(await read_body(request, BODY_LIMITS))
        await self._load(request, wanted)
        return _text(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    async def load_in_place(self, request: Request) -> Response:
        """SkyRL's path, which takes the place of an adapter of the same name."""
        wanted = _read_load(await read_body(request, BODY_LIMITS))
        wanted.load_inplace = True
        await self._load(request, wanted)
        return json_answer(ReplacedAdapter(wanted.lora_name))

    async def unload(self, request: Request) -> Response:
        wanted = _read_unload(await read_body(request, BODY_LIMITS))
        await self._unload(request, wanted.lora_name)
        return _text(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")

    async def load_as_sglang(self, request: Request) -> Response:
        wanted = _read_load(await read_body(request, BODY_LIMITS))
        return await self._as_sglang(self._load(request, wanted))

    async def unload_as_sglang(self, request: Request) -> Response:
        wanted = _read_unload(await read_body(request, BODY_LIMITS))
        return await self._as_sglang(self._unload(request, wanted.lora_name))

    async def load_from_tensors(self, request: Request) -> Response:
        """Load an adapter that comes with the request, by way of files for all instances."""
        body = await read_body(request, TENSOR_LIMITS)
        wanted = await run_sized(lambda: _read_tensors(body), len(body))
        if wanted.added_tokens_config:
            raise ApiError(400, "Trained tokens are not served.", param="added_tokens_config", kind=INVALID)
        place = await run_sized(lambda: self._keep(wanted), len(body))
        load = LoadRequest(wanted.lora_name, str(place), wanted.load_inplace)
        return await self._as_sglang(self._load(request, load))

    # ----

    async def _load(self, request: Request, wanted: LoadRequest) -> None:
        if not wanted.lora_name or not wanted.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", kind=INVALID)
        name, path = wanted.lora_name, wanted.lora_path
        if not path.startswith("/"):
            message = f"Loading lora {name} failed: No adapter found for {path}: give a directory as /PATH"
            raise ApiError(404, message, param="lora_path")
        wish = LoadAdapter(command=uuid.uuid4().hex, name=name, path=path, in_place=wanted.load_inplace)
        try:
            await self._carry_out(request, wish)
        except ApiError as error:
            if error.status == 400 and NOT_THERE in str(error):
                message = f"Loading lora {name} failed: No adapter found for {path}: {error}"
                raise ApiError(404, message, param="lora_path") from error
            raise

    async def _unload(self, request: Request, name: str) -> None:
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise ApiError(400, message, kind=INVALID)
        await self._carry_out(request, UnloadAdapter(command=uuid.uuid4().hex, name=name))

    async def _carry_out(self, request: Request, wish: LoadAdapter | UnloadAdapter) -> None:
        """Send a command until all instances follow, and this router knows."""
        try:
            await self._commands.carry_out(request, wish, LOAD_TIMEOUT)
        except ApiError as error:
            if error.status != 400:
                raise
            raise ApiError(400, str(error), kind=INVALID) from error
        await self._commands.see(lambda orders: wish.command in orders.adapters.commands)

    async def _as_sglang(self, work: Awaitable[None]) -> Response:
        """SGLang's answer to a command: what is loaded now."""
        problem, status = "", 200
        try:
            await work
        except ApiError as error:
            if error.kind not in (INVALID, ErrorKind.NOT_FOUND):
                raise
            problem, status = str(error), 400
        found = {each.name: each.path for each in self._listed()}
        answer = LoadedAdapters(success=not problem, error_message=problem, loaded_adapters=found)
        return json_answer(answer, status)

    def _listed(self) -> tuple[AdapterSource, ...]:
        view = self._mesh.view
        if view is None or view.settings is None or view.settings.lora is None:
            return ()
        listed = view.orders.adapters
        return listed.adapters if listed.number else view.settings.lora.adapters

    # ---- adapters that come as tensors

    def _keep(self, wanted: TensorsRequest) -> Path:
        """Write an adapter to files; returns their directory, which its contents name."""
        if (wanted.load_format or "safetensors") != "safetensors":
            message = f"load_format is safetensors, not {wanted.load_format!r:.40}"
            raise ApiError(400, message, param="load_format", kind=INVALID)
        try:
            tensors = base64.b64decode(wanted.serialized_tensors, validate=True)
        except binascii.Error as error:
            raise _no_tensors() from error
        if tensors[8:9] != b"{":  # the header of a safetensors file
            raise _no_tensors()
        settings = msgspec.json.encode(wanted.config_dict, order="sorted")
        root = self._uploads()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_unlisted(root)
        place = root / blake3(settings + b"\0" + tensors).hexdigest(16)
        made = Path(tempfile.mkdtemp(dir=root, prefix="new-"))
        (made / CONFIG).write_bytes(settings)
        (made / WEIGHTS).write_bytes(tensors)
        try:
            made.rename(place)
        except OSError:  # it is there: the same files
            shutil.rmtree(made)
        os.utime(place)
        return place

    def _uploads(self) -> Path:
        view = self._mesh.view
        lora = None if view is None or view.settings is None else view.settings.lora
        if view is None or lora is None:
            message = "this mesh serves no adapters: start it with --enable-lora"
            raise ApiError(400, message, kind=INVALID)
        return Path(lora.allowed_path or tempfile.gettempdir()) / UPLOADS / (view.mesh or "mesh")

    def _remove_unlisted(self, root: Path) -> None:
        """Remove files of adapters that the mesh does not have, and that are not new."""
        view = self._mesh.view
        if view is None:
            return
        orders = view.orders
        sources = [*self._listed(), *orders.adapters.retired]
        if orders.adapter_load is not None:
            sources.append(orders.adapter_load.source)
        listed = {each.path for each in sources}
        for place in root.iterdir():
            if str(place) not in listed and time.time() - place.stat().st_mtime > UNLISTED_FOR:
                shutil.rmtree(place, ignore_errors=True)


def _no_tensors() -> ApiError:
    return ApiError(
        400,
        "serialized_tensors must be a safetensors file in base64 (safetensors.torch.save): pickled tensors "
        "are not read.",
        param="serialized_tensors",
        kind=INVALID,
    )


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
