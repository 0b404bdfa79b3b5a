"""Where the codes of a quantised weight stand that is not widened on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.gpu.coded_products import DeviceCodes

ATTRIBUTE = "lockstep_device_codes"
"""Attribute of an empty parameter: the codes that stand for it on the device."""


def coded_of(parameter: torch.Tensor) -> DeviceCodes | None:
    """The codes that stand for a parameter; None for a plain one."""
    found: DeviceCodes | None = getattr(parameter, ATTRIBUTE, None)
    return found
