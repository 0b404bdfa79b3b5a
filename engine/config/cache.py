"""Settings of the KV cache: its size, and where its blocks may go."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.messages import Role
from coordinator.settings.flags import Bytes, Count, flag
from engine.config import kv_events, kv_transfer
from engine.config.kv_events import KvEventsConfig
from engine.config.kv_transfer import KvTransferConfig

KVCacheDType = Literal["auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3", "fp8_per_token_head"]

GPU_MEMORY = 0.92
"""Default share of a GPU's memory, for all instances on it together."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024), flag(help="Tokens per KV block.")] = 16
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        flag(
            help="Share of a GPU's memory that an instance may use; unset: 0.92, in equal parts for the "
            "instances that share the GPU."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Bytes | None,
        flag(help="Bytes for each worker's KV cache (4G and the like work); unset: from free memory."),
    ] = None
    num_gpu_blocks_override: Annotated[
        Count | None, flag(help="Number of KV blocks, whatever the memory (any device).")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        flag(
            help="What keys and values are kept as; auto: the data type of the model; int8, fp8 (e4m3): a "
            "byte each, with a scale for each token and KV head, so that nearly twice as many blocks fit."
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, flag(help="Reuse KV blocks of equal prefixes.")] = True
    enable_kv_transfer: Annotated[
        bool,
        flag(
            help="Fetch KV blocks of equal prefixes from other instances where that is faster than computing "
            "them, and lend them blocks."
        ),
    ] = True
    cache_check_interval: Annotated[
        int,
        Meta(ge=0),
        flag(
            help="Compute one in so many cached blocks again that requests have found, wherever it came "
            "from. If it differs, nothing of its source is used any more; 0: none. Where bits do not depend "
            "on the batch."
        ),
    ] = 1000
    enable_kv_inheritance: Annotated[
        bool,
        flag(
            help="Keep KV caches in memory of `serve`, so that other instances of the host copy what one "
            "that died had computed. On CPUs, without -tp and -pp."
        ),
    ] = False
    kv_cache_dir: Annotated[
        str | None,
        flag(
            path=True,
            help="Directory where computed KV blocks are written to files as well, so that instances that "
            "share it, and those that start later, find prefixes there.",
        ),
    ] = None
    kv_cache_dir_size: Annotated[
        Bytes,
        flag(
            help="Bytes of all KV blocks in --kv-cache-dir (100G and the like work); those used least "
            "lately are deleted beyond that."
        ),
    ] = 16 * 1024**3
    kv_events_config: Annotated[
        str | None,
        flag(
            json=True,
            help='JSON object, like {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}: changes of '
            "the prefix cache are published in vLLM's form, for routers outside.",
        ),
    ] = None
    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"],
        flag(
            help="What these instances are preferred for: prefill: long prompts, whose requests move to "
            "another instance with their KV blocks after the first token; decode: all but long prompts; "
            "null: both. lockstep role changes it while they serve."
        ),
    ] = "null"
    kv_transfer_config: Annotated[
        str | None,
        flag(
            json=True,
            help='JSON object, like {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}: the form of '
            "--disaggregation-mode in vLLM (kv_producer: prefill, kv_consumer: decode, kv_both: null). "
            "Blocks move in our own way, whatever the connector.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.kv_cache_dir is not None and not self.moves_blocks:
            off = "prefix-caching" if not self.enable_prefix_caching else "kv-transfer"
            raise ValueError(f"--kv-cache-dir does nothing with --no-enable-{off}: drop one of the two")
        if self.enable_kv_inheritance and not self.moves_blocks:
            off = "prefix-caching" if not self.enable_prefix_caching else "kv-transfer"
            raise ValueError(
                f"--enable-kv-inheritance does nothing with --no-enable-{off}: drop one of the two"
            )
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ValueError(
                "--kv-events-config does nothing with --no-enable-prefix-caching: drop one of the two"
            )
        if self.kv_transfer is not None:
            self._check_transfer(self.kv_transfer)

    def _check_transfer(self, given: KvTransferConfig) -> None:
        if given.kv_connector is not None and not self.moves_blocks:
            off = "prefix-caching" if not self.enable_prefix_caching else "kv-transfer"
            raise ValueError(f"--kv-transfer-config does nothing with --no-enable-{off}: drop one of the two")
        mode = self.disaggregation_mode
        if mode != "null" and given.role not in (None, mode):
            raise ValueError(
                f"--disaggregation-mode {mode} and --kv-transfer-config with {given.kv_role} are two roles: "
                "drop one of the two"
            )

    @property
    def moves_blocks(self) -> bool:
        """Whether KV blocks have names by which other instances and files may have them."""
        return self.enable_prefix_caching and self.enable_kv_transfer

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """The parsed ``kv_events_config``; None: nothing is published."""
        config = None if self.kv_events_config is None else kv_events.read_config(self.kv_events_config)
        return config if config is not None and config.is_on else None

    @property
    def kv_transfer(self) -> KvTransferConfig | None:
        """The parsed ``kv_transfer_config``; None: it is not set."""
        return None if self.kv_transfer_config is None else kv_transfer.read_config(self.kv_transfer_config)

    @property
    def role(self) -> Role:
        """Role that these instances start with."""
        if self.disaggregation_mode != "null":
            return Role(self.disaggregation_mode)
        given = self.kv_transfer
        return Role.MIXED if given is None or given.role is None else given.role

    @property
    def kv_codes(self) -> Literal["int8", "fp8"] | None:
        """Quantised type of the KV cache; None: the model's own data type."""
        if self.kv_cache_dtype == "auto":
            return None
        return "int8" if self.kv_cache_dtype.startswith("int8") else "fp8"

    def utilization(self, sharers: int) -> float:
        """Share of a device's memory for each of the instances that share it."""
        given = self.gpu_memory_utilization
        return GPU_MEMORY / sharers if given is None else given
