"""``lockstep epp``: an endpoint picker for gateways."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import uvloop

from coordinator.addresses import is_loopback
from coordinator.config import LogFormat, LogLevel, MeshAddressConfig, url
from coordinator.distribution import install_extra
from coordinator.process import process
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.settings.flags import Bytes, Port, flag, parse
from router.config import HttpConfig
from router.dispatch.client import MeshClient
from router.dispatch.policy import Policy
from router.epp.certificate import CertificateError, certificate
from router.epp.endpoint_watch import EndpointWatch
from router.epp.endpoints import EndpointError, EndpointTarget, parsed
from router.epp.picker import Picker
from router.epp.prompts import PromptReader
from router.text.text_models import TextModels

logger = logging.getLogger(__name__)

NEEDED = ("grpc", "google.protobuf")
"""Modules that the extra ``epp`` installs."""
END_GRACE = 10.0
"""Seconds for open streams of gateways to end after SIGTERM."""


class EppConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endpoint picker."""

    mesh: MeshAddressConfig = MeshAddressConfig()
    host: Annotated[str, flag(help="Address on which gateways reach the picker; 0.0.0.0 for all.")] = (
        "127.0.0.1"
    )
    grpc_port: Annotated[Port, flag(help="Port of external processing, and of health checks.")] = 9002
    grpc_health_port: Annotated[Port, flag(help="Port of health checks alone, without TLS.")] = 9003
    endpoints: Annotated[
        tuple[str, ...],
        flag(help="Routers of the mesh, HOST:PORT; a name stands for all of its addresses."),
    ] = ()
    endpoints_file: Annotated[
        str | None,
        flag(path=True, help="YAML file of routers in llm-d's format; read again when it changes."),
    ] = None
    secure_serving: Annotated[
        bool, flag(help="TLS at the gRPC port, as gateways of Kubernetes expect it.")
    ] = False
    cert_path: Annotated[
        str | None,
        flag(path=True, help="Directory with tls.crt and tls.key for --secure-serving; unset: self-signed."),
    ] = None
    load_balancing_policy: Annotated[
        Literal["prefix_aware", "least_loaded", "round_robin", "power_of_two", "consistent_hash"],
        flag("--policy", help="Policy that chooses the instance for a request."),
    ] = "prefix_aware"
    max_request_bytes: Annotated[
        Bytes, flag(help="Largest body that is read for the choice; larger ones go by load alone.")
    ] = 8 * 1024**2
    root_path: Annotated[str, flag(help="Path prefix of the endpoint; the same as the routers'.")] = ""
    tokenizer: Annotated[
        str | None, flag(path=True, help="Directory with tokenizer.json; the same as the routers'.")
    ] = None
    chat_template: Annotated[str | None, flag(help="Chat template; the same as the routers'.")] = None
    default_chat_template_kwargs: Annotated[
        str, flag(json=True, help="Variables for the chat template; the same as the routers'.")
    ] = "{}"
    exclude_tools_when_tool_choice_none: Annotated[
        bool, flag(help="Leave tools out of the prompt if tool_choice is none, as the routers do.")
    ] = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        if not self.endpoints and self.endpoints_file is None:
            raise ValueError("give the routers of the mesh: --endpoints HOST:PORT ..., or --endpoints-file")
        for text in self.endpoints:
            try:
                parsed(text)
            except EndpointError as error:
                raise ValueError(f"--endpoints: {error}") from None
        if self.cert_path is not None and not self.secure_serving:
            raise ValueError("--cert-path is for --secure-serving: give both, or none")
        if self.grpc_port and self.grpc_port == self.grpc_health_port:
            raise ValueError(f"--grpc-health-port {self.grpc_port} is --grpc-port, too: choose another one")

    @property
    def targets(self) -> list[EndpointTarget]:
        return [parsed(text) for text in self.endpoints]

    @property
    def http(self) -> HttpConfig:
        """HTTP settings that decide how prompts are made of requests."""
        return HttpConfig(
            root_path=self.root_path,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            default_chat_template_kwargs=self.default_chat_template_kwargs,
            exclude_tools_when_tool_choice_none=self.exclude_tools_when_tool_choice_none,
        )


def main(argv: list[str] | None = None) -> int:
    config = parse(
        EppConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep epp",
        description="Tell a gateway where requests go (Gateway API Inference Extension).",
        shares_file=True,
    )
    if not is_installed():
        print(f"lockstep epp: error: it needs gRPC: {install_extra('epp')}", file=sys.stderr)
        return process.EXIT_USAGE
    process.set_up("Picker", config.log_level, config.log_format)
    keys = process.member_keys(config.mesh, "lockstep epp")
    try:
        return uvloop.run(_run(config, keys))
    except CertificateError as error:
        print(f"lockstep epp: error: {error}", file=sys.stderr)
        return process.EXIT_USAGE


def is_installed() -> bool:
    """Whether the packages of the extra ``epp`` are installed."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in NEEDED)
    except ModuleNotFoundError:  # of the package around one
        return False


async def _run(config: EppConfig, keys: MeshKeys | None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    from router.epp import service  # the extra's packages, which only this command needs

    mesh = MeshClient(
        config.mesh.coordinator_endpoint,
        tokenizer=config.tokenizer,
        keys=keys,
        policy=Policy(config.load_balancing_policy),
    )
    http = config.http
    watch = EndpointWatch(config.targets, config.endpoints_file)
    picker = Picker(mesh, watch, PromptReader(TextModels(mesh, http), http))
    health = service.PickerHealth(lambda: picker.is_ready)
    server = service.make_server(service.Processing(picker, config.max_request_bytes), health)
    health_server = service.make_health_server(health)
    try:
        port = _listen(server, config, secure=config.secure_serving)
        health_port = health_server.add_insecure_port(_address(config.host, config.grpc_health_port))
    except RuntimeError as error:
        logger.error("--grpc-port or --grpc-health-port cannot be bound: %s", error)
        return process.EXIT_FAILED
    following = [asyncio.create_task(mesh.run()), asyncio.create_task(watch.run())]
    await server.start()
    await health_server.start()
    logger.info("endpoint picker at %s, health at port %d", url("grpc", config.host, port), health_port)
    if not is_loopback(config.host) and not config.secure_serving:
        logger.warning("without --secure-serving, requests pass from the gateway in plain text")
    try:
        return await _until_end(following)
    finally:
        await asyncio.gather(server.stop(END_GRACE), health_server.stop(END_GRACE))
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def _listen(server: Any, config: EppConfig, *, secure: bool) -> int:
    """Bind the port of external processing; returns its number."""
    address = _address(config.host, config.grpc_port)
    if not secure:
        return int(server.add_insecure_port(address))
    import grpc

    path = None if config.cert_path is None else Path(config.cert_path)
    key, chain = certificate(path, config.host)
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)])))


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _until_end(following: list[asyncio.Task[None]]) -> int:
    """Wait for a signal, or for a background task to fail; returns the exit status."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    waiting = asyncio.create_task(ended.wait())
    done, _ = await asyncio.wait([waiting, *following], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done - {waiting}:
        with contextlib.suppress(asyncio.CancelledError):
            return _status_of(task.exception())
    logger.info("ends")
    return 0


def _status_of(error: BaseException | None) -> int:
    if isinstance(error, OtherProtocol):
        logger.error("the coordinator is of another version: %s", error)
    elif isinstance(error, KeyRefused):
        logger.error("%s", error)
    else:
        logger.error("the connection to the mesh failed: the picker ends", exc_info=error)
    return process.EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
