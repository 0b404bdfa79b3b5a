"""Pages of tensors on the host, given back to the system while the tensors stay."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

MADV_DONTNEED, MADV_REMOVE = 4, 9
"""Linux' numbers of advice: forget private pages, and those of shared memory."""


def give_back_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Give whole pages of tensors back; returns their bytes. They read as zeros then.

    For tensors whose numbers nobody needs any more. On devices nothing is given back.
    """
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    given = 0
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size <= 0:
            continue
        # Shared pages stay with a plain DONTNEED; private ones know no REMOVE.
        if advise(begin, size, MADV_REMOVE) == 0 or advise(begin, size, MADV_DONTNEED) == 0:
            given += size
    return given
