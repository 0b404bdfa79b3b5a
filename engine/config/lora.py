"""Settings of low-rank adapters (LoRA), with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from coordinator.messages import MOST_ADAPTERS, AdapterSource
from coordinator.settings.flags import Count, flag

MOST_LORAS = 256
"""Most adapters that are computed with at once."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters that clients choose by the name of a model."""

    enable_lora: Annotated[bool, flag(help="Serve low-rank adapters (LoRA) beside the model.")] = False
    lora_modules: Annotated[
        tuple[str, ...],
        flag(
            help='Adapters as NAME=DIRECTORY, or as JSON: {"name": ..., "path": ...}. Clients ask for them '
            "by name, as model."
        ),
    ] = ()
    max_loras: Annotated[
        int,
        Meta(ge=1, le=MOST_LORAS),
        flag(help="Adapters that running requests of an instance have at once."),
    ] = 8
    max_lora_rank: Annotated[Count, flag(help="Highest rank of an adapter.")] = 16
    max_cpu_loras: Annotated[
        int,
        Meta(ge=1, le=MOST_ADAPTERS),
        flag(
            help="Most adapters of the mesh; those that were unloaded count while requests in flight have "
            "them."
        ),
    ] = MOST_ADAPTERS
    allowed_local_adapter_path: Annotated[
        str | None,
        flag(
            help="Directory that adapters must be in which are loaded while the mesh serves.  [default: any]"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.lora_modules and not self.enable_lora:
            raise ValueError("--lora-modules needs --enable-lora")
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"--lora-modules names {twice[0]} twice: give each adapter a name of its own")
        if len(names) > self.max_cpu_loras:
            raise ValueError(f"{len(names)} adapters are more than --max-cpu-loras {self.max_cpu_loras}")

    @property
    def sources(self) -> tuple[AdapterSource, ...]:
        """Adapters by name and directory; with digests as the mesh knows them.

        Raises:
            ValueError: one is written in another way.
        """
        return tuple(map(_source, self.lora_modules))


def _source(text: str) -> AdapterSource:
    how = "--lora-modules takes NAME=DIRECTORY, or"
    if text.lstrip().startswith("{"):
        try:
            found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
            name, path = str(found.pop("name")), str(found.pop("path"))
            source = AdapterSource(name, path, str(found.pop("digest", "")))
        except (msgspec.MsgspecError, KeyError) as error:
            raise ValueError(f'{how} {{"name": ..., "path": ...}}: {text} is neither') from error
        found.pop("base_model_name", None)
        if found:
            raise ValueError(f"--lora-modules knows no {min(found)}: name and path are what an adapter has")
    else:
        name, _, path = text.partition("=")
        source = AdapterSource(name, path)
    if not source.name.strip() or not source.path:
        raise ValueError(f"{how} a JSON object: {text} is neither")
    return source
