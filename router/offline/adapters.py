"""Adapters that prompts of an ``LLM`` ask for, as in vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from coordinator.messages import AdapterSource, LoadAdapter
from router.mesh import ServedModel
from router.offline.inputs import one_per_prompt
from router.offline.params import LoRARequest

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one for each; None: the model itself."""


class PromptAdapters:
    """Names of prompts' adapters; what is not served yet is loaded."""

    def __init__(self, load: Callable[[LoadAdapter], tuple[AdapterSource, ...]], *, is_enabled: bool) -> None:
        """``load`` has all instances serve an adapter, and returns all that there are.

        ``is_enabled``: with ``enable_lora=True``.
        """
        self._load = load
        self._is_enabled = is_enabled

    def names(self, given: Adapters, count: int, served: ServedModel) -> tuple[list[str], ServedModel]:
        """Name of each prompt's adapter, empty for none, and the model.

        Raises:
            ValueError: one is not served, and cannot be loaded.
            TypeError: something that is no :class:`LoRARequest`.
        """
        requests = one_per_prompt(given, count, "lora_request")
        for each in requests:
            if each is not None and not isinstance(each, LoRARequest):
                raise TypeError(f"lora_request must be a LoRARequest, or a list of them, not {each!r:.60}")
        for each in dict.fromkeys(filter(None, requests)):
            served = self._served(each, served)
        return ["" if each is None else each.lora_name for each in requests], served

    def _served(self, wanted: LoRARequest, served: ServedModel) -> ServedModel:
        """The model with one more adapter, if it has not got it."""
        name, path = wanted.lora_name, str(Path(wanted.lora_path).expanduser().absolute())
        known = next((each for each in served.adapters if each.name == name), None)
        if known is not None and not wanted.load_inplace and (not wanted.lora_path or path == known.path):
            return served
        if known is not None and not wanted.load_inplace:
            raise ValueError(
                f"the adapter {name!r} is served from {known.path}, not from {path}: give this one another "
                "name, or load_inplace=True"
            )
        if not (self._is_enabled and wanted.lora_path):
            raise ValueError(
                f"there is no adapter {name!r}: LLM(..., enable_lora=True, "
                f"lora_modules=['{name}=DIRECTORY']) serves it, or LoRARequest({name!r}, 1, DIRECTORY)"
            )
        command = uuid.uuid4().hex
        wish = LoadAdapter(command=command, name=name, path=path, in_place=wanted.load_inplace)
        return msgspec.structs.replace(served, adapters=self._load(wish))
