"""Bodies and answers of the calls by which trainers hand over weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from router.app.trainer_group import GROUP_NAME, GroupInfo
from router.config import HttpConfig
from router.errors import ApiError
from router.http.body import decoder

NAMES_LIMITS = HttpConfig(max_request_bytes=16_000_000, request_timeout=60.0)
"""Limits of a body that lists tensors."""
TENSORS_LIMITS = HttpConfig(max_request_bytes=1_000_000_000, request_timeout=600.0)
"""Limits of a body that has tensors in it."""
MOST_NUMBERS = 10_000
"""Most numbers of a tensor that ``/get_weights_by_name`` returns."""


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


read_init = decoder(InitTransfer)
read_start = decoder(StartUpdate)
read_part = decoder(UpdatePart)
read_finish = decoder(FinishUpdate)
read_group = decoder(GroupInfo)
read_distributed = decoder(DistributedUpdate)
read_call = decoder(WorkerCall)
read_tensors = decoder(TensorUpdate)
read_label = decoder(LabelWeights)
read_check = decoder(CheckWeights)
read_name = decoder(NamedWeights)


def arguments_of(call: WorkerCall, known: Mapping[str, type]) -> dict[str, Any]:
    """Arguments of a call, all by name.

    Raises:
        ApiError: there are others, or they have other types (400).
    """
    are_right = all(isinstance(value, known.get(name, ())) for name, value in call.kwargs.items())
    if call.args or not are_right or ("update_info" in known and "update_info" not in call.kwargs):
        names = ", ".join(known) or "none"
        raise ApiError(400, f"{call.method} has these arguments, by name: {names}", param="kwargs")
    return call.kwargs


def info_of(given: dict[str, Any]) -> UpdateInfo:
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


def group_info(given: dict[str, Any]) -> GroupInfo:
    """Where a trainer's group forms, as JSON names it.

    Raises:
        ApiError: a field is missing, or has another type (400).
    """
    try:
        return msgspec.convert(given, GroupInfo)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"init_info: {error}", param="init_info") from error
