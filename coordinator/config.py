"""Settings of the mesh: the coordinator's address, the number of instances, timeouts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.addresses import check_not_wildcard, check_written, is_loopback
from coordinator.settings.flags import Natural, Port, flag

MAX_INSTANCES = 65_536
"""Most instances of a mesh."""

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], flag(help="Lowest severity of log messages.")
]


LogFormat = Annotated[
    Literal["text", "json"],
    flag(help="Log format: lines of text, or one JSON object per message."),
]


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs and traces of a mesh."""

    log_format: LogFormat = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        flag(
            help="URL for OpenTelemetry traces (OTLP/HTTP), like http://127.0.0.1:4318; needs the extra otel."
        ),
    ] = None
    disable_log_stats: Annotated[
        bool, flag(help="Do not log throughput and load of each instance every 10 seconds.")
    ] = False

    def __post_init__(self) -> None:
        wanted = self.otlp_traces_endpoint
        if wanted is not None and not wanted.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint {wanted!r} is no URL: write it like http://127.0.0.1:4318"
            )


def endpoint(address: str, port: int) -> str:
    """A ZeroMQ endpoint; IPv6 addresses are put in brackets."""
    return url("tcp", address, port)


def url(scheme: str, address: str, port: int) -> str:
    """A URL of any scheme; IPv6 addresses are put in brackets."""
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


class MeshAddressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address of a mesh's coordinator, and the transport to it."""

    data_parallel_address: Annotated[
        str, flag("-dpa", help="Address of the coordinator, the same for all instances and routers.")
    ] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[Port, flag("-dpp", help="RPC port of the coordinator.")] = 29550
    mesh_key_file: Annotated[
        str | None,
        flag(
            path=True,
            help="File with the key of the mesh, made by `lockstep keygen`, the same for all its processes: "
            "it authenticates and encrypts connections. Required beyond loopback; unset: on loopback the "
            "head makes one, which processes of the same user find.",
        ),
    ] = None
    insecure_mesh: Annotated[
        bool,
        flag(help="Run without a mesh key on any address: unencrypted and unauthenticated."),
    ] = False

    def __post_init__(self) -> None:
        self._check_address("--data-parallel-address", self.data_parallel_address)

    def _check_address(self, name: str, address: str) -> None:
        check_written(name, address)
        if is_loopback(address):
            return
        check_not_wildcard(name, address)
        if not self.is_guarded:
            raise ValueError(
                f"{name} {address} is not loopback, so the mesh needs a key: make one with `lockstep "
                "keygen FILE`, copy it to all hosts and give --mesh-key-file FILE everywhere (or "
                "--insecure-mesh, if nobody else can reach that network)"
            )

    @property
    def is_guarded(self) -> bool:
        """Whether addresses other than loopback may be used.

        They may with a mesh key, or with ``--insecure-mesh``.
        """
        return self.mesh_key_file is not None or self.insecure_mesh

    @property
    def coordinator_endpoint(self) -> str:
        return endpoint(self.data_parallel_address, self.data_parallel_rpc_port)


class MeshConfig(MeshAddressConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings by which the processes of a mesh find each other."""

    data_parallel_size: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] | None,
        flag("-dp", help="Number of instances (data-parallel ranks) that the mesh starts with."),
    ] = None
    data_parallel_size_local: Annotated[
        Natural | None, flag("-dpl", help="Number of instances to start on this machine.")
    ] = None
    data_parallel_start_rank: Annotated[
        Natural | None,
        flag(
            "-dpr",
            "-dpn",
            "--data-parallel-rank",
            help="Rank of the first local instance; unset: the coordinator assigns free ranks.",
        ),
    ] = None
    headless: Annotated[
        bool, flag(help="Start instances only; they register with a coordinator elsewhere.")
    ] = False
    instance_address: Annotated[
        str | None,
        flag(help="Address on which local instances listen; unset: that of the route to the coordinator."),
    ] = None
    require_same_numerics: Annotated[
        bool,
        flag(
            help="Refuse an instance of another numerics class than the first one's: whose kernels, versions "
            "or -tp would give other bits. Given where the coordinator runs."
        ),
    ] = False
    startup_timeout: Annotated[
        float,
        Meta(gt=0),
        flag(help="Seconds without any progress after which a start is given up."),
    ] = 600.0
    observability: ObservabilityConfig = ObservabilityConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        size, start = self.data_parallel_size, self.data_parallel_start_rank
        if size is not None and start is not None:
            count = self.local_size
            if start >= size:
                raise ValueError(
                    f"--data-parallel-rank {start} is out of range: with -dp {size} ranks are 0 to {size - 1}"
                )
            if start + count > size:
                raise ValueError(
                    f"{count} local instances from rank {start} need ranks up to {start + count - 1}, "
                    f"but -dp {size} has ranks 0 to {size - 1}: lower -dpl or raise -dp"
                )
        if size is not None and (self.data_parallel_size_local or 0) > size:
            raise ValueError(
                f"-dpl {self.data_parallel_size_local} local instances are more than -dp {size} in all"
            )
        if self.headless and self.require_same_numerics:
            raise ValueError(
                "--require-same-numerics with --headless: the coordinator elsewhere decides; give it there"
            )
        if self.headless and self.data_parallel_size_local == 0:
            raise ValueError("--headless with -dpl 0 starts nothing: give -dpl 1 or more, or drop --headless")
        if self.instance_address is not None:
            self._check_address("--instance-address", self.instance_address)

    @property
    def local_size(self) -> int:
        """Number of instances to start on this host.

        ``-dpl`` if given; else one if a rank or no size is given; else all of ``-dp``.
        """
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        if self.data_parallel_start_rank is not None or self.data_parallel_size is None:
            return 1
        return self.data_parallel_size

    @property
    def known_size(self) -> int | None:
        """Instances that the mesh starts with; None: only its head, elsewhere, knows the number."""
        return self.data_parallel_size or (None if self.headless else 1)

    @property
    def instances_here(self) -> int:
        """Number of instances that will share this host's cores, as far as the flags tell.

        The local ones, or all instances of a mesh on loopback.
        """
        everywhere = self.data_parallel_size or 1
        return max(self.local_size, everywhere if is_loopback(self.data_parallel_address) else 1)

    @property
    def is_open(self) -> bool:
        """Whether other hosts can reach the mesh's sockets and no key keeps anybody out."""
        addresses = (self.data_parallel_address, self.instance_address or "127.0.0.1")
        return self.mesh_key_file is None and not all(map(is_loopback, addresses))


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the coordinator."""

    mesh: MeshConfig = MeshConfig()
    settings: Annotated[
        str | None,
        flag(help="JSON of the settings that instances must agree on; unset: those of the first instance."),
    ] = None
    mesh_name: Annotated[str, flag(help="Name of this mesh, sent in its view.")] = ""
    listen_fd: Annotated[
        int | None,
        flag(help="Inherited socket that already listens at the RPC port; unset: the port is bound."),
    ] = None
    log_level: LogLevel = "info"
