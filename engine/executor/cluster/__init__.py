"""Ray backends: workers as actors, and instances anywhere in a cluster.

These are ``--distributed-executor-backend ray`` and ``--data-parallel-backend ray``. The only modules that
load Ray, and only when it is asked for. Ray places processes and notices their deaths; what passes through
calls of its actors is msgpack of Lockstep's own messages, as bytes.
"""

from __future__ import annotations

import importlib.util

from coordinator.distribution import install_extra

INSTALL = f"Ray is not installed here: {install_extra('ray')}, on all nodes of the cluster"


def why_not() -> str | None:
    """Why Ray cannot be used on this host, None if it can.

    Does not load it.
    """
    return None if importlib.util.find_spec("ray") is not None else INSTALL
