"""Copies between host and device, without waiting where there is nothing to wait for.

A plain copy to a CUDA device waits until all that was launched before is done. From page-locked memory it
need not, and torch's allocator of such memory hands it out again only when the copy is over. So a step waits
once: in :func:`fetch`, for its results.
"""

from __future__ import annotations

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


def fetch(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's numbers on the host, once the device has computed them."""
    found: npt.NDArray[Any] = tensor.cpu().numpy()
    return found
