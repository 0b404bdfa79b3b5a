"""Encoder of images: a checkpoint's vision tower and projector, as transformers has them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.model.checkpoint import CheckpointError
from engine.model.errors import first_line
from engine.model.weights import LOADING
from engine.prompt_images import PromptImage
from parallel.compiler import cpu_flags

BFLOAT16_PRODUCTS = {"avx512_bf16", "amx_bf16"}
"""Flags of CPUs that multiply in bfloat16."""


def computing_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Type that a tower computes in, whose rows are of ``dtype``.

    CPUs without products in bfloat16 take more than twice as long in it as in float32.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and not cpu_flags() & BFLOAT16_PRODUCTS:
        return torch.float32
    return dtype


class ImageTower:
    """What makes rows of the text model's width out of an image's pixels.

    Images are encoded one by one, so that the rows of one do not depend on others.
    """

    def __init__(self, model: Any, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """``model``: of transformers, with ``get_image_features``, in its :func:`computing_type`.

        ``hidden``: the text model's width.
        """
        self._model = model
        self._hidden = hidden
        self.dtype = dtype
        self.device = device

    def __repr__(self) -> str:
        return f"<ImageTower of {type(self._model).__name__}>"

    @property
    def num_added(self) -> int:
        """First layers of the text model behind which images add something."""
        return len(getattr(self._model.config.vision_config, "deepstack_visual_indexes", None) or ())

    def encode(self, image: PromptImage) -> torch.Tensor:
        """Rows [planes, placeholders, hidden] of an image, in the model's type.

        Planes behind the first are added behind the text model's first layers.
        """
        arguments = {each.name: self._tensor(each.dtype, each.shape, each.data) for each in image.tensors}
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
        computes = computing_type(self.dtype, self.device)
        return tensor.to(self.device, computes if tensor.is_floating_point() else None)


def load_tower(
    directory: Path, dtype: torch.dtype, device: torch.device, weights: Path | None = None
) -> ImageTower:
    """Read what a checkpoint has beside its language part.

    That is made without any layer, so its weights are not read but for the embedding, which is dropped.
    ``weights``: directory of other weights of the same model, which may change afterwards; None: its own.

    Raises:
        CheckpointError: it has no encoder of images that transformers knows.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    hidden = int(config.get_text_config(decoder=True).hidden_size)
    try:
        with LOADING:  # transformers changes itself meanwhile, and not for one thread
            model = AutoModelForImageTextToText.from_pretrained(
                weights or directory,
                config=_without_layers(config),
                dtype=computing_type(dtype, device),
                local_files_only=True,
            )
    except Exception as error:  # whatever a config.json may do to transformers' code
        raise CheckpointError(
            f"{weights or directory}: the encoder of images cannot be read. "
            f"transformers says: {first_line(error)}"
        ) from error
    inner = getattr(model, "model", model).to(device).eval().requires_grad_(False)
    for name in ("language_model", "text_model"):
        if hasattr(inner, name):
            setattr(inner, name, None)
    if weights is not None:  # its files may be mapped
        for tensor in (*inner.parameters(), *inner.buffers()):
            tensor.data = tensor.data.clone()
    return ImageTower(inner, hidden, dtype, device)


def _without_layers(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    return config
