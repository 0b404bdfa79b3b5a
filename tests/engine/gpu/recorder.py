"""Stand-ins for Triton kernels on a pretended device, which note that they are launched."""

from __future__ import annotations

from typing import Any

import torch


class Kernel:
    """One kernel, launched as ``kernel[grid](...)``."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name = name
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments: Any, **constants: Any) -> None:
            assert all(int(each) > 0 for each in grid), (self.name, grid)
            for each in arguments:
                assert not isinstance(each, torch.Tensor) or each.device.type == "cuda", (self.name, each)
            self._launched.append(self.name)

        return launch


class Kernels:
    """In place of a module of kernels."""

    def __init__(self, launched: list[str]) -> None:
        self._launched = launched

    def __getattr__(self, name: str) -> Kernel:
        return Kernel(name, self._launched)
