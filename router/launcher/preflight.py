"""Checks of ``serve`` before it starts anything, and the capacity of its machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coordinator.process import process
from coordinator.process.tracing import TracingMissing, check_installed
from coordinator.settings.flags import changed
from engine.config import QUANTIZED_MODELS, SHIPPED_MODEL
from engine.executor.cluster import why_not
from engine.groups.transport import installation_problem
from engine.host.cache_size import asked_problem
from engine.model.checkpoint import CheckpointError
from engine.numerics import kind_problem
from parallel.devices import visible_cuda_devices
from parallel.topology import usable_cores
from router.config import HttpConfig, ServeConfig
from router.http.tls import tls_problem
from router.launcher.scaling import MachineCapacity, ScalingRefused, check_cores
from router.stored.postgres_backend import url_problem
from router.text.sampling_defaults import sampling_defaults
from router.text.tokens import TokenizerError, load_tokenizer

OF_FRONT_ENDS = ("http", "api_server_count")
"""Fields of ``ServeConfig`` that only concern routers."""


def problem_with(config: ServeConfig) -> str | None:
    """Why no model can be served with these settings here; None if one can."""
    if sys.platform != "linux":
        return f"Lockstep runs on Linux only, and this is {sys.platform}: use Linux, or a container"
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries that look for their files would fail, each in its own way
        return "the current directory has been deleted: start it in another one"
    if problem := process.open_files_problem():
        return problem
    if config.mesh.data_parallel_rpc_port == 0:
        return "--data-parallel-rpc-port must be a port that all processes know, not 0"
    if problem := _store_problem(config) or _tls_problem(config):
        return problem
    if problem := _trace_problem(config) or _instance_problem(config):
        return problem
    if config.ray_flag is not None and (missing := why_not()) is not None:
        return f"{config.ray_flag}: {missing}"
    try:
        check_cores(config.mesh.local_size, machine_of(config))
        if config.mesh.observability.otlp_traces_endpoint is not None:
            check_installed()
    except (ScalingRefused, TracingMissing) as error:
        return str(error)
    return None


def _tls_problem(config: ServeConfig) -> str | None:
    """Why the router here cannot speak TLS; None if it can, or there is none."""
    return None if config.mesh.headless or config.engine.nodes.node_rank else tls_problem(config.http)


def _store_problem(config: ServeConfig) -> str | None:
    """Why answers cannot be stored where the flags want it; None if they can."""
    url = None if config.mesh.headless else config.http.store_url
    return None if url is None else url_problem(url)


def _trace_problem(config: ServeConfig) -> str:
    """Why the traces could not be written when the instances here end.

    Empty if they can, or none is asked for.
    """
    asked = config.engine.device.trace
    elsewhere = config.mesh.local_size == 0 or config.engine.nodes.node_rank > 0
    if asked is None or elsewhere or config.data_parallel_backend == "ray":
        return ""
    file = Path(asked)
    if not file.name or file.is_dir():
        return f"--trace {asked!r} is no file: give one, like trace.json"
    if not file.parent.is_dir():
        return f"--trace {asked}: there is no directory {file.parent}: make it, or choose another one"
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"--trace {asked}: {file.parent} cannot be written: choose another directory"
    return ""


def _instance_problem(config: ServeConfig) -> str | None:
    """Why instances here cannot run with these kernels, transport and cache; None if they can.

    Other hosts of a Ray cluster check it themselves.
    """
    elsewhere = config.ray_flag is not None or config.mesh.local_size == 0
    if elsewhere:
        return None
    if machine_of(config).devices is None and (problem := asked_problem(config.engine.cache)):
        return problem
    return kind_problem(config.engine.device) or installation_problem(config.engine.device)


def ignored_revision(config: ServeConfig) -> bool:
    """Whether --revision has no effect: the shipped model and directories have no revisions."""
    model = config.engine.model
    if model.revision is None:
        return False
    is_ours = model.model is None or model.model in (SHIPPED_MODEL, *QUANTIZED_MODELS)
    return is_ours or Path(model.model or ":").expanduser().exists()


def ignored_when_headless(config: ServeConfig) -> list[str]:
    """Flags without effect here: those of routers, which only the head has."""
    if not config.mesh.headless:
        return []
    return [field.long_name for field, _ in changed(config) if field.path[0] in OF_FRONT_ENDS]


def ignored_with_uds(config: ServeConfig) -> list[str]:
    """Flags without effect: those of an address, where the endpoint is at a path."""
    if config.http.uds is None:
        return []
    return [
        field.long_name for field, _ in changed(config) if field.path in (("http", "host"), ("http", "port"))
    ]


def machine_of(config: ServeConfig) -> MachineCapacity:
    """CUDA devices and cores that this machine has for instances."""
    device = config.engine.device
    if config.data_parallel_backend == "ray":  # which says itself what it has room for
        return MachineCapacity(devices=None, cores=sys.maxsize)
    devices = 0 if device.device == "cpu" else visible_cuda_devices()
    return MachineCapacity(
        devices=devices if devices or device.device == "cuda" else None,
        devices_per_instance=max(1, config.engine.num_local_workers),
        cores=usable_cores(),
        hosts_per_instance=config.engine.nodes.nnodes,
    )


def text_problem(config: ServeConfig, model_directory: str) -> str | None:
    """Why the router could not tokenize requests or set sampling parameters; None if it can."""
    if config.mesh.headless or config.engine.nodes.node_rank:
        return None  # there is no router here
    return (
        defaults_problem(config.http, model_directory)
        or template_problem(config.http)
        or _tokenizer_problem(config, model_directory)
    )


def defaults_problem(config: HttpConfig, model_directory: str) -> str | None:
    """Why the sampling defaults cannot be used, None if they can."""
    try:
        sampling_defaults(config, model_directory)
    except CheckpointError as error:
        return str(error)
    return None


def template_problem(config: HttpConfig) -> str | None:
    """Why --chat-template cannot be used, None if it can or is not given."""
    if config.chat_template is None:
        return None
    from router.text.chat_template import ChatTemplateError, named_chat_template  # slow to import

    try:
        named_chat_template(config.chat_template, {})
    except ChatTemplateError as error:
        return f"--chat-template cannot be used: {error}"
    return None


def _tokenizer_problem(config: ServeConfig, model_directory: str) -> str | None:
    directory = Path(config.http.tokenizer or model_directory).expanduser()
    try:
        load_tokenizer(directory)
    except TokenizerError as error:
        return str(error)
    return None
