"""Facts about this server for ``GET /server_info``: model, settings, flags, versions (pure).

The first fields are SGLang's. Keys are in none of them.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import msgspec

from coordinator.distribution import DISTRIBUTION, NOT_INSTALLED, installed_version
from coordinator.messages import Settings, State
from coordinator.numerics import Numerics
from coordinator.settings import flags
from router.config import HttpConfig
from router.mesh import ServedModel

PACKAGES = ("lockstep", "torch", "llguidance", "starlette", "uvicorn", "msgspec", "tokenizers")


class NumericsClass(msgspec.Struct):
    """Instances whose answers to one seed are equal, if their class is invariant."""

    system_fingerprint: str
    kernels: str
    dtype: str
    invariant: bool
    dp_ranks: list[int]


class ServerInfo(msgspec.Struct):
    version: str
    model_path: str | None
    """Directory of the model; None while no instance has joined."""
    served_model_name: str | None
    max_model_len: int | None
    dp_size: int
    """Number of instances in the mesh."""
    tp_size: int | None
    pp_size: int | None
    versions: dict[str, str]
    """Versions of packages where the router runs."""
    numerics: list[NumericsClass]
    """Numerics classes of the instances, by their lowest rank."""
    settings: Settings | None
    """Settings of the mesh: the model and how it is run."""
    flags: dict[str, Any]
    """Flags of the endpoint that differ from their defaults."""


class ServerConfig(msgspec.Struct):
    """Answer of vLLM's ``/server_info?config_format=json``."""

    vllm_config: dict[str, Any]


def server_config(info: ServerInfo) -> ServerConfig:
    """Facts about this server under the names of vLLM's settings."""
    return ServerConfig(
        {
            "model_config": {
                "model": info.model_path,
                "served_model_name": info.served_model_name,
                "max_model_len": info.max_model_len,
                "dtype": None if info.settings is None else info.settings.dtype,
            },
            "parallel_config": {
                "tensor_parallel_size": info.tp_size,
                "pipeline_parallel_size": info.pp_size,
                "data_parallel_size": info.dp_size,
            },
            "weight_transfer_config": {"backend": "path"},
        }
    )


class Sleeping(msgspec.Struct):
    """Answer of vLLM's ``/is_sleeping``: whether instances are to give back memory."""

    is_sleeping: bool


def version_of(package: str) -> str:
    return installed_version(DISTRIBUTION if package == "lockstep" else package)


def server_info(
    model: ServedModel | None,
    settings: Settings | None,
    num_instances: int,
    numerics: Mapping[Numerics, list[int]],
    config: HttpConfig,
) -> ServerInfo:
    """Facts about this server; ``settings`` is None while unknown."""
    versions = {package: version_of(package) for package in PACKAGES}
    known = {package: version for package, version in versions.items() if version != NOT_INSTALLED}
    return ServerInfo(
        version=versions["lockstep"],
        model_path=model.directory if model is not None else None,
        served_model_name=model.names[0] if model is not None else None,
        max_model_len=model.max_model_len if model is not None else None,
        dp_size=num_instances,
        tp_size=settings.tensor_parallel_size if settings is not None else None,
        pp_size=settings.pipeline_parallel_size if settings is not None else None,
        versions={"python": platform.python_version(), **known},
        numerics=[
            NumericsClass(each.fingerprint, each.kernels, each.dtype, each.invariant, ranks)
            for each, ranks in sorted(numerics.items(), key=lambda item: item[1])
        ],
        settings=settings,
        flags={field.key: value for field, value in flags.changed(config) if not field.secret},
    )


class IsScaling(msgspec.Struct, frozen=True):
    """Answer of vLLM's /is_scaling_elastic_ep."""

    is_scaling_elastic_ep: bool


def is_scaling(by_state: Mapping[str, int]) -> IsScaling:
    """Whether instances start or leave now."""
    return IsScaling(any(count for state, count in by_state.items() if state != State.READY))
