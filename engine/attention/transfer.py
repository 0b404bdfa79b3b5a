"""Copies between host and device that wait for the device only where they must.

A plain copy to a CUDA device waits until all that was launched before is done. From page-locked memory it
need not, and torch's allocator of such memory hands it out again only when the copy is over. So a step waits
once: for its results, which :func:`begin_fetch` begins to copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on CPU it shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def begin_fetch(tensor: torch.Tensor) -> Callable[[], npt.NDArray[Any]]:
    """Begin to copy a tensor to the host; returns a function that waits.

    A host that has something to do while the device computes does it in between.
    """
    if tensor.device.type == "cpu":
        here: npt.NDArray[Any] = tensor.numpy()
        return lambda: here
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def numbers() -> npt.NDArray[Any]:
        copied.synchronize()
        found: npt.NDArray[Any] = copy.numpy()
        return found

    return numbers
