"""Encoder of images: a checkpoint's vision tower and projector, as transformers has them."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, CLIPVisionModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from engine.host.memory import turn
from engine.kernels.core.library import KernelLibrary
from engine.model.checkpoint import CheckpointError, ReadingStopped
from engine.model.errors import first_line
from engine.model.sharding.shard_weights import all_tensors
from engine.model.weight_files import OpenFile
from engine.model.weight_set import weight_files
from engine.model.weights import LOADING, align, share_again
from engine.prompt_images import PLACES, PromptImage
from parallel.compiler import cpu_flags

OF_TEXT = re.compile(r"(^|\.)(language_model|text_model|lm_head)\.")
"""Names of tensors that an encoder does without."""


def computing_type(dtype: torch.dtype, device: torch.device, kernels: KernelLibrary | None) -> torch.dtype:
    """Type that a tower computes in, whose rows are of ``dtype``.

    CPUs without products in bfloat16 take more than twice as long in it as in float32. The kernels in use
    decide, not the CPU: hosts of one numerics class compute alike.
    """
    multiplies = kernels is not None and kernels.multiplies_bfloat16
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 and not multiplies else dtype


def computed_on(computes: torch.dtype) -> str:
    """Type and instructions of a CPU that decide the bits of rows."""
    tiles = " AMX" if computes == torch.bfloat16 and "amx_bf16" in cpu_flags() else ""
    kind = str(computes).removeprefix("torch.")
    return f"images in {kind} on {torch.backends.cpu.get_cpu_capability()}{tiles}"


class ImageTower:
    """What makes rows of the text model's width out of an image's pixels.

    Images are encoded one by one, so that the rows of one do not depend on others.
    """

    def __init__(
        self,
        model: Any,
        hidden: int,
        dtype: torch.dtype,
        computes: torch.dtype,
        device: torch.device,
        *,
        is_mapped: bool = False,
    ) -> None:
        """``model``: of transformers, with ``get_image_features``, whose numbers are of type ``computes``.

        ``hidden``: the text model's width. ``is_mapped``: its weights lie in a mapped file.
        """
        self._model = model
        self.is_mapped = is_mapped
        self.computes = computes
        self._hidden = hidden
        self.dtype = dtype
        self.device = device

    def __repr__(self) -> str:
        return f"<ImageTower of {type(self._model).__name__}>"

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, as they are computed with."""
        return sum(each.nbytes for each in (*self._model.parameters(), *self._model.buffers()))

    def share_weights(self) -> None:
        """Have weights that were read for it alone with other processes of this host."""
        with turn():  # the others find the first one's
            share_again([*self._model.parameters(), *self._model.buffers()])

    def run_layers_by(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        """Let ``run`` call each layer from now on."""
        for layer in _layers(self._model):
            layer.forward = partial(_run_by, run, weakref.ref(layer))  # nothing holds itself

    @property
    def num_added(self) -> int:
        """First layers of the text model behind which images add something."""
        return len(getattr(self._model.config.vision_config, "deepstack_visual_indexes", None) or ())

    def encode(self, image: PromptImage) -> torch.Tensor:
        """Rows [planes, placeholders, hidden] of an image, in the model's type.

        Planes behind the first are added behind the text model's first layers.

        Raises:
            Exception: it is none that this model's processor makes.
        """
        arguments = {each.name: self._tensor(each.dtype, each.shape, each.data) for each in image.tensors}
        if (places := arguments.get(PLACES)) is not None:
            _check_places(places, self._model.config.vision_config)
        with torch.inference_mode():
            found = self._model.get_image_features(**arguments, return_dict=True)
        rows = found.pooler_output
        if rows is None:  # Llama 4 projects outside of it
            rows = self._model.multi_modal_projector(found.last_hidden_state.flatten(0, -2))
        planes = [rows, *(getattr(found, "deepstack_features", None) or ())]
        return torch.stack([self._rows(each) for each in planes]).to(self.dtype).contiguous()

    def no_rows(self, count: int) -> torch.Tensor:
        """Rows of zeros in place of those of an image that cannot be encoded."""
        return torch.zeros(1 + self.num_added, count, self._hidden, dtype=self.dtype, device=self.device)

    def _rows(self, found: Any) -> torch.Tensor:
        if isinstance(found, list | tuple):
            return torch.cat([each.reshape(-1, self._hidden) for each in found])
        return found.reshape(-1, self._hidden)

    def _tensor(self, dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
        array = np.frombuffer(data, dtype=dtype).reshape(shape)
        tensor = torch.from_numpy(array.copy())
        return tensor.to(self.device, self.computes if tensor.is_floating_point() else None)


def _check_places(places: torch.Tensor, config: Any) -> None:
    """Check the columns and rows of patches; -1: a patch is none.

    An index outside of a table ends all that a process does on a GPU.

    Raises:
        ValueError: they are none of a processor of this configuration.
    """
    width, height = (places.reshape(-1, 2).amax(0).clamp(min=0) + 1).tolist()
    side = config.pooling_kernel_size
    fits = width * height <= places.numel() // 2 and max(width, height) <= config.position_embedding_size
    if width % side or height % side or not fits:
        raise ValueError(f"{width} x {height} places for {places.numel() // 2} patches")


def _layers(module: torch.nn.Module) -> Iterator[Any]:
    """Members of its outermost lists."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _layers(child)


def _run_by(
    run: Callable[[Callable[[], Any]], Any], own: Callable[[], Any], *args: Any, **fields: Any
) -> Any:
    layer = own()
    return run(lambda: type(layer).forward(layer, *args, **fields))


def _without_poolers(model: torch.nn.Module) -> frozenset[str]:
    """Take out what makes one vector of a whole image.

    Each served family takes rows of patches. Returns the beginnings of names of tensors that no result
    needs, there or not.
    """
    found = set()
    for name, module in model.named_modules():
        if getattr(module, "use_head", False):  # SigLIP's attention of one learnt query
            module.use_head, module.head = False, None
            found.add(f"{name}.head.")
        elif isinstance(module, CLIPVisionModel):
            module.post_layernorm = torch.nn.Identity()  # of the class token
            found.add(f"{name}.post_layernorm.")
    return frozenset(found)


def load_tower(
    directory: Path,
    dtype: torch.dtype,
    computes: torch.dtype,
    device: torch.device,
    sharers: int = 1,
    weights: tuple[Path, OpenFile] | None = None,
) -> ImageTower:
    """Read what a checkpoint has beside its language part.

    That is made without any layer, so its weights are not read but for the embedding, which is dropped.
    ``sharers``: processes of this host that do so at once. ``weights``: directory of other weights of the
    same model, and what opens its files, to be shared afterwards; None: its own.

    Raises:
        CheckpointError: it has no encoder of images that transformers knows.
        ReadingStopped: what opens files stops.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    hidden = int(config.get_text_config(decoder=True).hidden_size)
    source = directory
    tensors: dict[str, Any] | None = None
    try:
        with LOADING, ExitStack() as opened:  # transformers changes itself meanwhile, and not for one thread
            if weights is not None:
                source, open_file = weights
                tensors = all_tensors(
                    [opened.enter_context(open_file(each)) for each in weight_files(source)]
                )
            model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
            model, found = model_class.from_pretrained(
                directory if tensors is None else None,
                config=_without_layers(config),
                dtype=computes,
                local_files_only=True,
                state_dict=tensors,
                output_loading_info=True,
            )
    except (CheckpointError, ReadingStopped):
        raise
    except Exception as error:  # whatever a config.json may do to transformers' code
        raise CheckpointError(
            f"{source}: the encoder of images cannot be read. transformers says: {first_line(error)}"
        ) from error
    unused = tuple(_without_poolers(model))
    needed = (name for name in found["missing_keys"] if not OF_TEXT.search(name))
    if missing := sorted(name for name in needed if not name.startswith(unused)):
        raise CheckpointError(f"{source}: the encoder of images lacks {len(missing)} tensors: {missing[0]}")
    inner = getattr(model, "model", model).to(device).eval().requires_grad_(False)
    for name in ("language_model", "text_model"):
        if hasattr(inner, name):
            setattr(inner, name, None)
    is_mapped = False
    if weights is None:
        with turn():  # of processes that would all make a copy, the others find the first one's
            is_mapped = not align(inner, sharers)
    return ImageTower(inner, hidden, dtype, computes, device, is_mapped=is_mapped)


def _without_layers(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):  # of Gemma 4: by layer, too
        if getattr(text, name, None):
            setattr(text, name, 0)
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    return config
