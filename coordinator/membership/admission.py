"""Why an instance may not join (pure): different settings, impossible ranks and sizes."""

from __future__ import annotations

from collections.abc import Collection, Set

import msgspec
from msgspec import Struct

from coordinator.config import MAX_INSTANCES
from coordinator.messages import Register, Settings
from coordinator.numerics import Numerics, slowest_kind

AGREED = {
    "fingerprint": "model",
    "served_model_name": "--served-model-name",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "vocab_size": "vocabulary",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "pipeline_split": "--pipeline-split",
    "enable_expert_parallel": "-ep",
    "expert_placement_strategy": "--expert-placement-strategy",
    "balancing": "--enable-eplb with --eplb-config and --eplb-survive",
    "all2all_backend": "--all2all-backend",
    "mesh_transport": "--mesh-transport",
    "pooling": "--runner with --convert and --pooler-config",
    "lora": "--enable-lora with --lora-modules, --max-loras and --max-lora-rank",
    "data_parallel_size": "-dp",
}
"""Settings in which instances of a mesh must agree -> how the user knows them."""
NEEDS_SIZE = frozenset({"enable_expert_parallel", "data_parallel_size"})
"""Settings that an instance without ``-dp`` cannot know.

It takes them from the mesh. All other settings are compared as flags ask for them, so they must not depend on
the number of instances.
"""
ONLY_SPREAD = frozenset({"balancing", "pipeline_split"})
"""Settings in which instances need not agree where each of them holds all experts."""


def problem_with(
    message: Register, size: int | None, settings: Settings | None, ranks: Collection[int]
) -> str | None:
    """Why an instance can never join a mesh with this size and these settings.

    None if it can. ``size`` and ``settings`` are None as long as the mesh has none; ``ranks`` are those of
    its instances.
    """
    if message.size is not None and size is not None and message.size != size:
        return f"-dp {message.size} differs from the mesh's -dp {size}: start all parts with the same -dp"
    for name, number in (("-dp", message.size or 0), ("rank", message.rank or 0)):
        if number >= MAX_INSTANCES:
            return f"{name} {number} is more than the {MAX_INSTANCES} instances that a mesh can have"
    if message.rank is None and len(ranks) >= MAX_INSTANCES:
        return f"the mesh has {len(ranks)} instances, as many as a mesh can have"
    if message.rank is not None and message.rank < 0:
        return f"rank {message.rank} is negative"
    if message.rank is not None and message.size is not None and message.rank >= message.size:
        return (
            f"rank {message.rank} is out of range: with -dp {message.size} ranks are 0 to {message.size - 1}"
        )
    if settings is None:
        return None
    if message.settings is None:
        return None
    unknown = NEEDS_SIZE if message.size is None else frozenset[str]()
    differences = differences_of(message.settings, settings, "the mesh", unknown)
    if not differences:
        return None
    return "this instance differs from the mesh: " + "; ".join(differences)


def without_adapters(message: Register) -> Register:
    """A registration without adapters, for a mesh that has others by now."""
    settings = message.settings
    if settings is None or settings.lora is None:
        return message
    lora = msgspec.structs.replace(settings.lora, adapters=())
    return msgspec.structs.replace(message, settings=msgspec.structs.replace(settings, lora=lora))


def lacks_adapters(message: Register) -> bool:
    """Whether an instance cannot read an adapter of its command line."""
    lora = None if message.settings is None else message.settings.lora
    return lora is not None and not all(each.digest for each in lora.adapters)


def without_weights(numerics: Numerics) -> Numerics:
    """A numerics class without what follows from the weights."""
    return msgspec.structs.replace(numerics, fingerprint="", weights="")


def other_class(numerics: Numerics | None, members: Collection[Numerics]) -> str | None:
    """Why an instance computes other bits than the mesh, and what to do.

    None if it is of one of their numerics classes, or if they have none yet.
    """
    if not members or numerics in members:
        return None
    theirs = " and ".join(sorted(map(str, set(members))))
    if numerics is None:
        return f"this instance names no numerics class, the mesh has {theirs}: install the same version"
    text = f"this instance is of numerics class {numerics}, the mesh of {theirs}"
    everybody = [numerics, *members]
    if len({each.kernels for each in everybody}) == 1:
        return f"{text}: start all instances with the same -tp, and versions of lockstep, torch and others"
    kind = slowest_kind(everybody)
    return f"{text}: --numerics chooses the same kernels" + (f", as in --numerics {kind}" if kind else "")


class OneModel:
    """Digest of a mesh's weights: that of the first instance that loaded them."""

    def __init__(self) -> None:
        self._weights = ""

    def __repr__(self) -> str:
        return f"<OneModel {self._weights or 'unknown'}>"

    def problem_with(self, numerics: Numerics | None, *, change: bool = False) -> str | None:
        """Why an instance has other weights than the mesh.

        None if it has the same ones, or random ones, or if weights ``change``: the digest of each version is
        checked when it is prepared.
        """
        if numerics is None or not numerics.weights or change:
            return None
        self._weights = self._weights or numerics.weights
        if numerics.weights == self._weights:
            return None
        return (
            f"the weights of this instance (digest {numerics.weights}) are not those of the mesh (digest "
            f"{self._weights}): give it the same files, or start the whole mesh with the new ones"
        )


def crowd_for(message: Register, settings: Settings | None, ranks: Collection[int]) -> str | None:
    """Why an instance must wait while those of ``ranks`` live; None if not.

    It waits if there would be more members than experts to give each of them one.
    """
    if settings is None or not settings.enable_expert_parallel:
        return None
    others, each = len(ranks) - (message.rank in ranks), settings.tensor_parallel_size
    if not 0 < settings.num_experts < (others + 1) * each:
        return None
    spread = "as many instances" if each == 1 else f"{others} instances of {each} ranks each"
    return f"the model's {settings.num_experts} experts are spread over {spread}: one more gets none"


def differences_of(theirs: Settings, ours: Settings, who: str, unknown: Set[str] = frozenset()) -> list[str]:
    """The settings in which a newcomer differs from ``who``, as text for people.

    ``who`` names what it wants to join. ``unknown`` are fields that it cannot know.
    """
    irrelevant = frozenset[str]() if ours.enable_expert_parallel else ONLY_SPREAD
    differences = [
        f"{label} is {_shown(getattr(theirs, key))}, {who} has {_shown(getattr(ours, key))}"
        for key, label in AGREED.items()
        if key not in unknown and key not in irrelevant and getattr(theirs, key) != getattr(ours, key)
    ]
    if theirs.fingerprint != ours.fingerprint:
        differences[0] = (
            f"model is {theirs.model} (fingerprint {theirs.fingerprint}), "
            f"{who} has {ours.model} (fingerprint {ours.fingerprint})"
        )
    return differences


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Struct):
        return ", ".join(f"{name} {getattr(value, name)}" for name in value.__struct_fields__)
    return "not given" if value is None else str(value) or "not given"
