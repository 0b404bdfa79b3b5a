"""Settings of the HTTP endpoint, and all settings of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from coordinator.addresses import is_loopback
from coordinator.config import LogLevel, MeshConfig, url
from coordinator.settings.flags import Bytes, Count, Natural, Port, Size, flag
from engine.config import EngineConfig, check_keys
from router.key_limits import KeyLimits, limits_of, read_key_limits
from router.media_rules import MediaRules
from router.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS, check_halves
from router.signing.keys import CapsuleKey
from router.structured_config import StructuredOutputsConfig, read_config

MOST_FRONT_ENDS = 256
"""Most routers; each is a process that fills a core."""


def _most_images(text: str) -> int:
    limits = _json_object("--limit-mm-per-prompt", text)
    if unknown := limits.keys() - {"image"}:
        raise ValueError(
            f"--limit-mm-per-prompt has {', '.join(sorted(unknown))}: models are served with images only"
        )
    most = limits.get("image", 0)
    if not isinstance(most, int) or most < 0:
        raise ValueError(f"--limit-mm-per-prompt has {most!r} images, which is no number of them")
    return most


def _json_object(flag_name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{flag_name} must be a JSON object: {error}") from error


def check_keys_of_clients(flag_name: str, keys: Iterable[str]) -> None:
    """Refuse keys that no client could send, and empty ones.

    The value of a variable that is not set is empty, as is the key of clients that present none.
    """
    for key in keys:
        if not key.strip():
            raise ValueError(
                f"{flag_name} is empty, which would let everybody in: give a key, or leave it out"
            )
        if key != key.strip() or not key.isprintable():
            raise ValueError(
                f"{flag_name} has blanks around it or line breaks in it, which no header can have"
            )


def _check_name(flag_name: str, given: str | None, known: Iterable[str]) -> None:
    if given is not None and given not in known:
        raise ValueError(f"{flag_name} must be one of {', '.join(known)}, not {given!r}")


def _check_head(mesh: MeshConfig) -> None:
    """Refuse ranks and local sizes that a head without -dp cannot have.

    Without -dp it makes a mesh of one instance, with rank 0.
    """
    if mesh.headless or mesh.data_parallel_size is not None:
        return
    first, count = mesh.data_parallel_start_rank or 0, mesh.local_size
    if first > 0 or (count > 1 and mesh.data_parallel_start_rank is not None):
        raise ValueError(
            f"--data-parallel-rank {first} without -dp: add --headless where the mesh is started elsewhere, "
            f"or say with -dp how many instances it has in all (at least {first + max(1, count)})"
        )
    if count > 1:
        raise ValueError(
            f"-dpl {count} without -dp: say with -dp how many instances the mesh has in all (-dp {count} for "
            "these alone), or add --headless where it is started elsewhere"
        )


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI-compatible endpoint."""

    host: Annotated[str, flag(help="Address of the endpoint; 0.0.0.0 opens it to the network.")] = "127.0.0.1"
    port: Annotated[Port, flag(help="Port of the endpoint.")] = 8000
    uds: Annotated[
        str | None,
        flag(path=True, help="Path of a Unix socket to listen at, instead of --host and --port."),
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        flag(
            repeated=True, secret=True, help="API key that clients must present; repeat the flag for several."
        ),
    ] = ()
    api_key_limits: Annotated[
        str | None,
        flag(
            path=True,
            help="YAML or JSON file of quotas by key: requests_per_minute, tokens_per_minute, "
            "concurrent_requests. Its keys are accepted like those of --api-key.",
        ),
    ] = None
    max_requests_per_minute: Annotated[
        Count | None,
        flag(help="Requests per minute of each key (without keys: of all clients); more get 429."),
    ] = None
    max_tokens_per_minute: Annotated[
        Size | None, flag(help="Tokens per minute of each key, prompts and output; requests beyond get 429.")
    ] = None
    max_concurrent_requests: Annotated[
        Count | None, flag(help="Concurrent requests of each key; more get 429.")
    ] = None
    admin_host: Annotated[str, flag(help="Address of the admin API, with --admin-port.")] = "127.0.0.1"
    admin_port: Annotated[Port | None, flag(help="Port of the admin API; unset: it has none.")] = None
    admin_port_serves_all: Annotated[
        bool,
        flag(
            help="The admin port has the endpoint's paths, too, for trainers whose clients know one address "
            "and no key. Without --admin-api-key only."
        ),
    ] = False
    admin_api_key: Annotated[
        tuple[str, ...],
        flag(
            repeated=True,
            secret=True,
            help="Key of the admin API; with one, the API is also at /admin of the endpoint.",
        ),
    ] = ()
    weight_transfer_dir: Annotated[
        str | None,
        flag(
            path=True,
            help="Directory of weight versions that a trainer hands over in parts, the same on every host; "
            "unset: a temporary one, for a mesh on one host.",
        ),
    ] = None
    capsule_key: Annotated[
        str | None,
        flag(
            path=True,
            help="Ed25519 private key in PEM that signs the capsules of answers; GET "
            "/.well-known/lockstep-keys.json has its public half. Needs the extra sign.",
        ),
    ] = None
    ssl_keyfile: Annotated[str | None, flag(path=True, help="Private key in PEM, to serve HTTPS.")] = None
    ssl_certfile: Annotated[
        str | None, flag(path=True, help="Certificate chain in PEM for --ssl-keyfile.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        flag(path=True, help="CA certificates in PEM that must have signed clients' certificates."),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(ge=0, le=2),
        flag(help="Client certificates: 0 not requested, 1 verified if sent, 2 required."),
    ] = 0
    root_path: Annotated[str, flag(help="Path prefix at which a proxy serves the endpoint.")] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        flag(help="Origins whose web pages may send requests (CORS), * for all; unset: none."),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], flag(help="HTTP methods allowed to --allowed-origins (CORS).")
    ] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], flag(help="Headers allowed to --allowed-origins (CORS).")] = (
        "*",
    )
    allow_credentials: Annotated[bool, flag(help="Allow cookies from --allowed-origins (CORS).")] = False
    load_balancing_policy: Annotated[
        Literal["prefix_aware", "least_loaded", "round_robin", "power_of_two", "consistent_hash"],
        flag("--policy", help="Policy that chooses the instance for a request."),
    ] = "prefix_aware"
    shadow_rate: Annotated[
        float,
        flag(
            help="Share of finished requests that another instance computes again when idle, to compare all "
            "bits; 0 to 1."
        ),
    ] = 0.0
    shadow_action: Annotated[
        Literal["log", "drain"],
        flag(
            help="Reaction to an instance whose result differs from two others': log it, or drain it as well."
        ),
    ] = "log"
    seed: Annotated[
        int | None,
        flag(help="Seed from which requests without one get theirs; unset: random seeds."),
    ] = None
    tokenizer: Annotated[
        str | None, flag(path=True, help="Directory with tokenizer.json; unset: the model's.")
    ] = None
    chat_template: Annotated[
        str | None, flag(help="Jinja file (or text) that replaces the model's chat template.")
    ] = None
    default_chat_template_kwargs: Annotated[
        str,
        flag(json=True, help="JSON object of variables for the chat template; requests may override them."),
    ] = "{}"
    limit_mm_per_prompt: Annotated[
        str, flag(json=True, help='JSON object: most images of a request, as {"image": 16}.')
    ] = '{"image": 16}'
    allowed_media_domains: Annotated[
        tuple[str, ...],
        flag(
            help="Hosts that images are fetched from, with :port if unusual; networks like 10.0.0.0/8 allow "
            "private addresses of these. Unset: nothing is fetched."
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        str | None, flag(path=True, help="Directory that file URLs of images may name; unset: none.")
    ] = None
    max_image_pixels: Annotated[Bytes, flag(help="Most pixels of an image; larger ones get 400.")] = 1 << 25
    response_role: Annotated[str, flag(help="Role of generated messages.")] = "assistant"
    enable_auto_tool_choice: Annotated[
        bool, flag(help="Let the model decide to call a request's tools; needs --tool-call-parser.")
    ] = False
    tool_call_parser: Annotated[
        str | None, flag(help=f"Format of the model's tool calls: {', '.join(TOOL_CALL_PARSERS)}.")
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[
        bool, flag(help="Leave tools out of the prompt if tool_choice is none.")
    ] = False
    reasoning_parser: Annotated[
        str | None, flag(help=f"Format of the model's reasoning: {', '.join(REASONING_PARSERS)}.")
    ] = None
    structured_outputs_config: Annotated[
        str,
        flag(
            json=True,
            help="JSON object: disable_any_whitespace, disable_additional_properties, enable_in_reasoning.",
        ),
    ] = "{}"
    generation_config: Annotated[
        str,
        flag(
            path=True,
            help="Source of sampling defaults: auto (the model's generation_config.json) or vllm (neutral).",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        flag(
            json=True,
            help='JSON object of sampling defaults over --generation-config, like {"temperature": 0.5}.',
        ),
    ] = "{}"
    max_logprobs: Annotated[
        int, Meta(ge=-1), flag(help="Most log-probabilities per token; -1: the whole vocabulary.")
    ] = 20
    pooling_cache: Annotated[
        int,
        Meta(ge=0, extra={"size": True}),
        flag(
            help="Bytes of each router for answers of a pooling model, given again to the same inputs (64M "
            "and the like work); 0: none are kept."
        ),
    ] = 0
    max_request_bytes: Annotated[Bytes, flag(help="Largest request body in bytes; larger ones get 413.")] = (
        8 * 1024**2
    )
    request_timeout: Annotated[float, Meta(gt=0), flag(help="Seconds for a client to send its request.")] = (
        60.0
    )
    timeout_keep_alive: Annotated[
        int,
        Meta(gt=0),
        flag(help="Seconds until an idle connection is closed; clients' pools should close theirs sooner."),
    ] = 120
    sse_keep_alive_interval: Annotated[
        Natural,
        flag(help="Seconds of silence after which a stream sends a comment, for proxies; 0: never."),
    ] = 0
    enable_request_id_headers: Annotated[
        bool, flag(help="Send X-Request-Id in answers, the client's or a new one.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, flag(help="Report in usage how many prompt tokens came from the prefix cache.")
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, flag(help="Serve GET /tokenizer_info: special tokens and the chat template.")
    ] = False
    enable_force_include_usage: Annotated[bool, flag(help="Report usage at the end of every stream.")] = False
    disable_access_log: Annotated[
        bool, flag("--disable-uvicorn-access-log", help="Do not log each HTTP request.")
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str, flag(help="Paths whose requests are not logged, separated by commas; empty: log all.")
    ] = "/health,/ping,/livez,/metrics,/load,/v1/loads,/dashboard/feed"
    store_path: Annotated[
        str | None,
        flag(
            path=True,
            help="SQLite file of stored answers, shared by all routers of a host; unset: they last as long "
            "as this serve.",
        ),
    ] = None
    store_url: Annotated[
        str | None,
        flag(
            secret=True,
            help="PostgreSQL database in place of --store-path, for routers of several hosts: "
            "postgresql://USER@HOST/DATABASE. The password may be in ~/.pgpass or PGPASSWORD.",
        ),
    ] = None
    store_max_bytes: Annotated[
        Bytes, flag(help="Most bytes of stored answers; then new ones are not stored.")
    ] = 1024**3
    store_ttl: Annotated[
        float, Meta(gt=0), flag(help="Seconds that a stored answer is kept after its end.")
    ] = 30 * 86400.0
    resumable: Annotated[
        Literal["asked", "all"],
        flag(help="Streams that may be resumed at any router: with X-Lockstep-Resumable: 1, or all."),
    ] = "asked"
    resume_window: Annotated[
        float, Meta(gt=0), flag(help="Seconds that a resumable stream waits for a client that is gone.")
    ] = 60.0
    batch_max_file_bytes: Annotated[
        Bytes, flag(help="Largest file that may be uploaded for the batch API; larger ones get 413.")
    ] = 200 * 1024**2
    batch_max_lines: Annotated[Count, flag(help="Most requests of a batch.")] = 50_000
    batch_lines_per_instance: Annotated[
        Count, flag(help="Requests of batches in flight for each instance, running or waiting there.")
    ] = 256
    dashboard: Annotated[bool, flag(help="Serve a live page about the mesh at / of the endpoint.")] = True
    shutdown_timeout: Annotated[
        float, Meta(ge=0), flag(help="Seconds for running requests to finish after SIGTERM.")
    ] = 5.0

    def __post_init__(self) -> None:
        if self.capsule_key is not None:
            CapsuleKey.read(self.capsule_key)
        for name, address in (("--host", self.host), ("--admin-host", self.admin_host)):
            if not address.strip():
                raise ValueError(f"{name} is empty: 127.0.0.1 is for this machine only, 0.0.0.0 for all")
        if self.admin_port is not None and not is_loopback(self.admin_host) and not self.admin_api_key:
            raise ValueError(
                f"--admin-host {self.admin_host} is not loopback: give --admin-api-key, too, or anybody "
                "there could drain the mesh"
            )
        if self.store_path is not None and self.store_url is not None:
            raise ValueError("--store-path and --store-url are two stores: give one of them")
        if self.uds is not None and not self.uds.strip():
            raise ValueError("--uds is empty: give the path of a Unix socket, or leave it out")
        if self.admin_port and self.admin_port == self.port and self.uds is None:
            raise ValueError(f"--admin-port {self.admin_port} is --port, too: choose another one")
        if not 0.0 <= self.shadow_rate <= 1.0:  # nor is NaN
            raise ValueError(
                f"--shadow-rate {self.shadow_rate:g} is no share of requests: give 0 (none) to 1 (all), "
                "such as 0.001"
            )
        if self.shadow_action == "drain" and not self.shadow_rate:
            raise ValueError(
                "--shadow-action drain needs --shadow-rate: no request is checked without it, and nothing "
                "would be drained"
            )
        _check_name("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_name("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        check_halves(self.reasoning_parser, self.tool_call_parser)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile need each other")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-keyfile and --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs")

        check_keys_of_clients("--api-key", self.api_key)
        check_keys_of_clients("--admin-api-key", self.admin_api_key)
        _json_object("--default-chat-template-kwargs", self.default_chat_template_kwargs)
        _json_object("--override-generation-config", self.override_generation_config)
        _most_images(self.limit_mm_per_prompt)
        _ = self.media_rules
        if self.max_tokens_per_minute is not None and self.max_tokens_per_minute < 1:
            raise ValueError("--max-tokens-per-minute must be at least 1")
        if self.api_key_limits is not None:
            check_keys_of_clients("a key of --api-key-limits", read_key_limits(self.api_key_limits))
        read_config(self.structured_outputs_config)

    @property
    def keys(self) -> tuple[str, ...]:
        """All that clients may present, each once."""
        return tuple(dict.fromkeys((*self.api_key, *self._limits_by_key)))

    @property
    def key_limits(self) -> list[KeyLimits]:
        """Limits of each of ``keys``; without keys, those of all clients."""
        general = KeyLimits(
            requests_per_minute=self.max_requests_per_minute,
            tokens_per_minute=self.max_tokens_per_minute,
            concurrent_requests=self.max_concurrent_requests,
        )
        return limits_of(self.keys, self._limits_by_key, general)

    @property
    def _limits_by_key(self) -> dict[str, KeyLimits]:
        return {} if self.api_key_limits is None else read_key_limits(self.api_key_limits)

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        """``structured_outputs_config``, read."""
        return read_config(self.structured_outputs_config)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """``default_chat_template_kwargs``, read."""
        return _json_object("--default-chat-template-kwargs", self.default_chat_template_kwargs)

    @property
    def most_images(self) -> int:
        """Most images of a request."""
        return _most_images(self.limit_mm_per_prompt)

    @property
    def media_rules(self) -> MediaRules:
        """Where images may be fetched from."""
        return MediaRules.of(self.allowed_media_domains, self.allowed_local_media_path)

    @property
    def sampling_overrides(self) -> dict[str, Any]:
        """``override_generation_config``, read."""
        return _json_object("--override-generation-config", self.override_generation_config)

    @property
    def address(self) -> str:
        """Where the endpoint is, for people."""
        return f"unix:{self.uds}" if self.uds is not None else url(self.scheme, self.host, self.port)

    @property
    def scheme(self) -> str:
        """What URLs of the endpoint begin with."""
        return "http" if self.ssl_certfile is None else "https"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes of one serve."""

    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
    api_server_count: Annotated[
        int,
        Meta(ge=1, le=MOST_FRONT_ENDS),
        flag("-asc", help="Number of router processes that share the endpoint's port."),
    ] = 1
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        flag(
            "-dpb",
            help="Where instances run: on this machine (mp), or anywhere in its Ray cluster (ray).",
        ),
    ] = "mp"
    restart: Annotated[
        bool, flag(help="Restart a local instance that died, under its rank, after growing delays.")
    ] = False
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_keys(self.mesh, self.engine.nodes)
        _check_head(self.mesh)
        if self.data_parallel_backend != "ray":
            return
        if self.engine.nodes.nnodes > 1:
            raise ValueError("--nnodes with --data-parallel-backend ray: Ray knows its nodes, drop --nnodes")
        if self.mesh.instance_address is not None:
            raise ValueError(
                f"--instance-address {self.mesh.instance_address} is of one host; with "
                "--data-parallel-backend ray each instance finds its own, on the way to -dpa"
            )

    @property
    def ray_flag(self) -> str | None:
        """The flag that selects Ray, if one does."""
        if self.data_parallel_backend == "ray":
            return "--data-parallel-backend ray"
        if self.engine.device.distributed_executor_backend == "ray":
            return "--distributed-executor-backend ray"
        return None


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router process.

    Only its launcher gives the sockets and its number among the routers.
    """

    mesh: MeshConfig = MeshConfig()
    http: HttpConfig = HttpConfig()
    http_descriptor: Annotated[
        Natural | None, flag(help="Inherited socket of the endpoint; unset: --host and --port are bound.")
    ] = None
    admin_descriptor: Annotated[Natural | None, flag(help="Inherited socket of the admin API.")] = None
    front_end: Annotated[Natural, flag(help="Number of this process among the routers.")] = 0
    front_ends: Annotated[Count, flag(help="Routers that share the endpoint's port.")] = 1
    counts_directory: Annotated[
        str | None, flag(help="Directory in which the processes of one serve share their counts.")
    ] = None
    log_level: LogLevel = "info"
