"""Facts of an instance's numerics class, and the kernels that ``--numerics`` chooses (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.messages import Settings
from coordinator.numerics import Arithmetic, Facts, Numerics, class_of
from engine.config import DeviceConfig, ModelConfig
from engine.host.versions import versions
from engine.kernels.core import library
from engine.model.checkpoint import CheckpointError, angles_follow_length, weight_format
from parallel.kernel_kinds import KINDS, Kind


def native_kind(device: DeviceConfig) -> Kind | None:
    """The kind of native kernels that ``--numerics`` names; None for any, or none."""
    return KINDS[device.numerics].name if device.numerics in KINDS else None


def kind_problem(device: DeviceConfig) -> str | None:
    """Why this CPU cannot run the kernels that ``--numerics`` names; None if it can."""
    kind = native_kind(device)
    missing = None if kind is None else library.why_not(kind)
    return None if missing is None else f"--numerics {kind}: {missing}"


def check_kind(device: DeviceConfig) -> None:
    """Check what ``--numerics`` names on the host that computes.

    Raises:
        CheckpointError: this CPU cannot run these kernels.
    """
    if problem := kind_problem(device):
        raise CheckpointError(problem)


def numerics_of(
    settings: Settings, model: ModelConfig, directory: str, workers: Sequence[Arithmetic]
) -> Numerics:
    """Numerics class of an instance with these settings and workers.

    Raises:
        CheckpointError: workers on several hosts read different weights.
    """
    return class_of(facts_of(settings, model, directory, workers))


def facts_of(settings: Settings, model: ModelConfig, directory: str, workers: Sequence[Arithmetic]) -> Facts:
    """All that decides the bits of an instance with these settings and workers.

    Raises:
        CheckpointError: workers on several hosts read different weights.
    """
    found = sorted({worker.weights for worker in workers})
    if len(found) > 1:
        raise CheckpointError(
            f"workers of this instance read different weights (digests {', '.join(found)}): give all hosts "
            "the same copy of the model"
        )
    return Facts(
        model=settings.fingerprint,
        weights=(model.online or weight_format(directory)) if model.reads_weights else "dummy",
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        has_whole_experts=settings.tensor_parallel_size > 1 and settings.enable_expert_parallel,
        angles_for=settings.max_model_len if angles_follow_length(directory) else 0,
        workers=tuple(workers),
        versions=versions(),
    )
