"""Sizing of an instance's KV cache: blocks by memory, and the longest context."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from engine.config import CacheConfig, EngineConfig
from engine.host.memory import available_memory, most_memory
from engine.pieces.kinds import FEWEST_SLOTS
from engine.step import ModelFacts

logger = logging.getLogger(__name__)


LEAST_CACHE = 0.25
"""Minimum fraction of the KV cache that remains when room is kept for experts."""


class TooLittleMemory(RuntimeError):
    """Error: too little memory for the KV cache; the message has the remedy."""


SLOTS_PER_REQUEST = 8
"""Slots of each boundary kind for a request.

Two are for its rows, the others for kept positions.
"""


class CacheSize(NamedTuple):
    """Size of an instance's cache."""

    num_blocks: int
    max_model_len: int
    """Tokens of the longest context."""
    num_boundaries: int = 0
    """Slots of each boundary kind."""


def size_cache(
    config: EngineConfig,
    facts: ModelFacts,
    free_memory: Callable[[], int],
    neighbours: int,
    asked_requests: int | None = None,
) -> CacheSize:
    """Numbers of KV blocks and of other slots, and the longest context; logs all.

    Args:
        config: of the instance, with a known ``max_model_len``.
        facts: what the loaded model costs per token.
        free_memory: bytes that the cache may take where nothing was asked for.
        neighbours: instances on this host, this one included: they share its memory.
        asked_requests: the instance's own ``--max-num-seqs``, whose states must fit; None: as many as fit.

    Raises:
        TooLittleMemory: not even one block fits, or more was asked for than there is at all.
    """
    cache = config.cache
    block_bytes = facts.kv.bytes_per_token * cache.block_size
    asked_len = config.model.max_model_len
    assert asked_len is not None
    if facts.device == "cpu" and not config.workers_elsewhere and (problem := asked_problem(cache)):
        raise TooLittleMemory(problem)
    useful = -(-asked_len // cache.block_size) * config.scheduler.most_requests()
    boundary_bytes = sum(kind.num_bytes for kind in facts.boundaries)
    num_boundaries = SLOTS_PER_REQUEST * config.scheduler.most_requests() if boundary_bytes else 0
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    else:
        sharers = neighbours if facts.device == "cpu" else 1
        memory = cache.kv_cache_memory_bytes or free_memory() // sharers
        if boundary_bytes:
            num_boundaries = boundary_slots(memory, boundary_bytes, num_boundaries, useful * block_bytes)
            least = least_slots(asked_requests or 0, memory, boundary_bytes, block_bytes)
            num_boundaries = max(num_boundaries, least)
            memory -= num_boundaries * boundary_bytes
        num_blocks = min(memory // block_bytes, useful) if block_bytes else useful
        if num_blocks < 1:
            utilization = "" if facts.device == "cpu" else " or --gpu-memory-utilization"
            raise TooLittleMemory(
                f"{_bytes(memory)} for the KV cache is too little for one block of "
                f"{cache.block_size} tokens ({_bytes(block_bytes)}): raise "
                f"--kv-cache-memory-bytes{utilization}, or lower --block-size"
            )
    if facts.device == "cpu" and not config.workers_elsewhere:
        num_bytes = num_blocks * block_bytes + num_boundaries * boundary_bytes
        blocks = f"{num_blocks} KV blocks of {cache.block_size} tokens"
        if num_boundaries:
            blocks += f" and {num_boundaries} recurrent states of {_bytes(boundary_bytes)}"
        _check_memory(blocks, num_bytes * config.num_local_workers, neighbours)
    if facts.device == "cpu" and cache.gpu_memory_utilization is not None:
        logger.warning("--gpu-memory-utilization is ignored on a CPU: give --kv-cache-memory-bytes")
    size = CacheSize(num_blocks, min(asked_len, num_blocks * cache.block_size), num_boundaries)
    _log_size(config, facts, size)
    return size


def _log_size(config: EngineConfig, facts: ModelFacts, size: CacheSize) -> None:
    """Log how large a cache is, and what it does not hold."""
    cache, asked_len, num_blocks = config.cache, config.model.max_model_len, size.num_blocks
    assert asked_len is not None
    block_bytes = facts.kv.bytes_per_token * cache.block_size
    capacity = num_blocks * cache.block_size
    asked_blocks = (cache.kv_cache_memory_bytes or 0) // max(block_bytes, 1)
    less = cache.num_gpu_blocks_override is None and num_blocks < asked_blocks
    logger.info(
        "%s, %.1f M parameters, %.1f MiB of weights in %s on %s",
        facts.architecture, facts.num_parameters / 1e6, facts.weight_bytes / 2**20, facts.dtype, facts.device,
    )  # fmt: skip
    logger.info(
        "# KV blocks: %d, %d tokens (%.1f MiB); %.2fx the context of %d tokens%s",
        num_blocks, capacity, num_blocks * block_bytes / 2**20, capacity / asked_len, asked_len,
        ", as many as --max-num-seqs requests can use: not all of --kv-cache-memory-bytes" * less,
    )  # fmt: skip
    if size.num_boundaries:
        boundary_bytes = sum(kind.num_bytes for kind in facts.boundaries)
        logger.info(
            "# state: %d requests fit, %s each, flat in context (%d slots of %s, %d for a running request; "
            "the others keep prefixes)",
            size.num_boundaries // FEWEST_SLOTS, _bytes(FEWEST_SLOTS * boundary_bytes), size.num_boundaries,
            _bytes(boundary_bytes), FEWEST_SLOTS,
        )  # fmt: skip
    if capacity < asked_len:
        logger.warning(
            "the KV cache holds %d tokens, less than the context of %d: requests for more are refused, those "
            "that name no max_tokens end there; raise --kv-cache-memory-bytes or lower --max-model-len",
            capacity, asked_len,
        )  # fmt: skip


def boundary_slots(memory: int, boundary_bytes: int, useful: int, block_bytes: int) -> int:
    """Slots of each boundary kind, such that blocks and boundary pieces fill memory alike.

    Args:
        memory: bytes for the cache.
        boundary_bytes: bytes of the pieces of one position.
        useful: slots that requests can use.
        block_bytes: bytes of all blocks that requests can use.

    Raises:
        TooLittleMemory: there is no room for the fewest slots.
    """
    if memory < FEWEST_SLOTS * boundary_bytes:
        raise TooLittleMemory(
            f"{_bytes(memory)} for the KV cache is too little for {FEWEST_SLOTS} states of a request "
            f"({_bytes(boundary_bytes)} each): raise --kv-cache-memory-bytes"
        )
    wanted = useful * boundary_bytes
    share = memory * wanted // (wanted + block_bytes)
    return max(FEWEST_SLOTS, min(useful, share // boundary_bytes))


def least_slots(requests: int, memory: int, boundary_bytes: int, block_bytes: int) -> int:
    """Slots of each boundary kind that so many running requests need, each beside a block.

    Raises:
        TooLittleMemory: they do not fit.
    """
    each = FEWEST_SLOTS * boundary_bytes + block_bytes
    if requests * each > memory:
        raise TooLittleMemory(
            f"--max-num-seqs {requests}: {FEWEST_SLOTS} states of {_bytes(boundary_bytes)} for each request "
            f"and a block of keys and values take {_bytes(requests * each)}, and {_bytes(memory)} for the KV "
            f"cache hold {memory // each}: lower --max-num-seqs or raise --kv-cache-memory-bytes"
        )
    return FEWEST_SLOTS * requests


def asked_problem(cache: CacheConfig) -> str | None:
    """Reason why no CPU worker can have the requested cache size; else None.

    A cache is never larger than requests can use, so only the flag itself shows that it is a slip.
    """
    asked, most = cache.kv_cache_memory_bytes or 0, most_memory()
    if asked <= most or cache.num_gpu_blocks_override is not None:
        return None
    return (
        f"--kv-cache-memory-bytes asks for {_bytes(asked)} for each worker, and all memory here is "
        f"{_bytes(most)}: lower it, or leave it out"
    )


def _check_memory(named: str, num_bytes: int, neighbours: int) -> None:
    """``num_bytes`` are those of one instance, for what is ``named``.

    Raises:
        TooLittleMemory: so much as ``neighbours`` of them take is not there at all.
    """
    blocks = f"{named} would take {_bytes(num_bytes)}"
    each = f" for each of {neighbours} instances" * (neighbours > 1)
    if num_bytes * neighbours > most_memory():
        raise TooLittleMemory(
            f"{blocks}{each}, and all memory here is {_bytes(most_memory())}: lower "
            "--num-gpu-blocks-override or --kv-cache-memory-bytes, or leave them out"
        )
    if num_bytes > (free := available_memory()):
        logger.warning(
            "%s, and %s are free: the kernel ends processes when memory runs out; lower "
            "--num-gpu-blocks-override or --kv-cache-memory-bytes", blocks, _bytes(free),
        )  # fmt: skip


def share_of_device(*, total: int, free: int, reserved: int, peak: int, utilization: float) -> int:
    """Bytes of a CUDA device for the KV cache of one worker.

    What is left of its share of the device after its largest step, or of what others leave it, if less.

    Args:
        total: bytes of the device.
        free: those that nobody has now.
        reserved: those that this process's allocator has now.
        peak: the most that it has had.
        utilization: the share, ``--gpu-memory-utilization``.
    """
    return max(0, min(int(total * utilization), free + reserved) - peak)


def left_beside(
    cache: int, *, total: int, free: int, reserved: int, peak: int, utilization: float, sharers: int
) -> int:
    """Bytes of device memory free for an instance beside its KV cache.

    What another is still to take of its own share is free now, and does not count.

    Args:
        cache: bytes for the KV cache, of :func:`share_of_device`, which has the others.
        sharers: instances on the device.
    """
    nobodys = total - int(total * utilization) * sharers
    return max(0, min(free + reserved - peak - cache, nobodys)) // sharers


def leave_room(cache: int, left: int, room: int) -> int:
    """Bytes for the KV cache where ``room`` bytes must stay free beside it.

    It is as it was if that is too dear.

    Args:
        cache: bytes that it would take.
        left: bytes of the device that nobody takes then.
        room: for the experts of an instance that may be lost.
    """
    smaller = cache - max(0, room - left)
    return smaller if smaller >= cache * LEAST_CACHE else cache


def experts_after_loss(num_experts: int, workers: int, lost: int) -> int:
    """Most experts of a worker when so many workers are lost.

    0 if none is left."""
    left = workers - lost
    return -(-num_experts // left) if left > 0 else 0


def _bytes(count: int) -> str:
    """Readable number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
