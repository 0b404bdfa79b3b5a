"""Settings of the HTTP front end, and the whole of what the command line accepts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from coordinator.config import LogLevel, MeshConfig
from coordinator.flags import Natural, Port, Size, flag
from engine.config import EngineConfig


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI-compatible endpoint."""

    host: Annotated[str, flag(help="Address of the endpoint; 0.0.0.0 opens it to the network.")] = "127.0.0.1"
    port: Annotated[Port, flag(help="Port of the endpoint.")] = 8000
    api_key: Annotated[
        tuple[str, ...], flag(repeated=True, help="Key that clients must present; repeat it for several.")
    ] = ()
    seed: Annotated[
        int | None,
        flag(help="Seed of the seeds given to requests that bring none; unset: unpredictable ones."),
    ] = None
    tokenizer: Annotated[str | None, flag(help="Directory with tokenizer.json; unset: the model's.")] = None
    chat_template: Annotated[
        str | None, flag(help="Jinja file (or text) used instead of the model's chat template.")
    ] = None
    generation_config: Annotated[
        str,
        flag(
            help="auto: the model's generation_config.json gives sampling defaults; vllm: neutral defaults."
        ),
    ] = "auto"
    max_logprobs: Annotated[Natural, flag(help="Most log-probabilities per token.")] = 20
    max_request_bytes: Annotated[Size, flag(help="Largest request body; larger ones are answered 413.")] = (
        8 * 1024**2
    )
    request_timeout: Annotated[
        float, Meta(gt=0), flag(help="Seconds a client may take to send its request.")
    ] = 60.0
    enable_request_id_headers: Annotated[bool, flag(help="Answer with X-Request-Id.")] = False
    enable_prompt_tokens_details: Annotated[
        bool, flag(help="Tell in usage how many prompt tokens came from the cache.")
    ] = False
    disable_access_log: Annotated[bool, flag(help="Do not log each HTTP request.")] = False
    shutdown_timeout: Annotated[
        float, Meta(ge=0), flag(help="Seconds that requests may still run after SIGTERM.")
    ] = 5.0


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``serve`` accepts."""

    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
    log_level: LogLevel = "info"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router process."""

    mesh: MeshConfig = MeshConfig()
    http: HttpConfig = HttpConfig()
    log_level: LogLevel = "info"
