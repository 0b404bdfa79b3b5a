"""Settings of ``--kv-transfer-config``, vLLM's flag that gives instances a role (pure)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from coordinator.messages import Role

Connector = Literal[
    "DecodeBenchConnector",
    "ExampleConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "HiSparseConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "MultiConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
]
"""Connectors that vLLM 0.32 has. None is used here: blocks move in one way (:mod:`engine.transfers`)."""
ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.MIXED}
"""Role of an instance by vLLM's name for it."""


class KvTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that vLLM's flag may hold; only ``kv_role`` has an effect here."""

    kv_connector: Connector | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    engine_id: str | None = None
    kv_buffer_device: str | None = None
    kv_port: int | None = None
    kv_connector_extra_config: dict[str, Any] = {}
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_connector_module_path: None = None

    @property
    def role(self) -> Role | None:
        """The instances' role; None: ``kv_role`` is not set."""
        return None if self.kv_role is None else ROLES[self.kv_role]

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Names of the given settings that have no effect."""
        names = (name for name in self.__struct_fields__ if name not in ("kv_role", "kv_load_failure_policy"))
        defaults = KvTransferConfig()
        return tuple(name for name in names if getattr(self, name) != getattr(defaults, name))


def read_config(text: str) -> KvTransferConfig:
    """Parses ``--kv-transfer-config``.

    Raises:
        ValueError: it is no JSON object with these settings, or asks for something that is not built.
    """
    try:
        config = msgspec.json.decode(text, type=KvTransferConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"--kv-transfer-config: {_problem(str(error))}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--kv-transfer-config: {error}") from error
    if config.kv_load_failure_policy == "fail":
        raise ValueError(
            "--kv-transfer-config: kv_load_failure_policy fail: blocks that do not come are computed here, "
            "and no request fails for them: leave it out"
        )
    if config.kv_connector is not None and config.kv_role is None:
        raise ValueError(
            "--kv-transfer-config: kv_connector without kv_role: give kv_producer, kv_consumer or kv_both"
        )
    return config


def _problem(error: str) -> str:
    what, _, where = error.partition(" - at `$.")
    name = where.rstrip("`")
    if name == "kv_connector_module_path":
        return f"{name}: no code of others runs in the server: leave it out"
    if name == "kv_connector":
        return f"{name}: {what}; vLLM has {', '.join(get_args(Connector))}, and blocks move in our own way"
    return f"{name}: {what}" if name else what
