"""Errors of a GPU or its driver, which end an instance."""

from __future__ import annotations

SIGNS = ("CUDA error", "CUDA driver", "NVIDIA driver", "HIP error", "CUBLAS_STATUS", "NCCL error")
"""Words of torch's errors that mean a failed device or driver."""


def device_error(error: BaseException) -> str:
    """First line of a device's or driver's error; empty for other errors.

    A lost device, a kernel that failed and a driver that is too old are RuntimeErrors of torch.
    """
    text = str(error).strip()
    is_torchs = type(error).__name__ == "AcceleratorError" or any(sign in text for sign in SIGNS)
    return (text.partition("\n")[0] or "no details") if isinstance(error, RuntimeError) and is_torchs else ""
