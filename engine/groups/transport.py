"""Check that this host can use the transport of ``--mesh-transport``."""

from __future__ import annotations

from engine.config import DeviceConfig
from parallel.links.ucx_installation import find_ucx
from parallel.links.ucx_links import why_not


def installation_problem(device: DeviceConfig) -> str | None:
    """Why UCX cannot be found, if ``--mesh-transport`` names it; loads nothing."""
    if device.mesh_transport != "ucx":
        return None
    try:
        find_ucx()
    except OSError as error:
        return f"--mesh-transport ucx: {error}"
    return None


def transport_problem(device: DeviceConfig) -> str | None:
    """Why ``--mesh-transport ucx`` cannot be used here; builds and loads it."""
    problem = why_not() if device.mesh_transport == "ucx" else None
    return None if problem is None else f"--mesh-transport ucx: {problem}"
