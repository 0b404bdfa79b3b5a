"""Transports of tensors between hosts: the values of ``--mesh-transport``, and what makes their links.

This module loads no torch, and a transport's own module only where it is used.
"""

from __future__ import annotations

from typing import Literal

from parallel.links.forming_group import FormingGroup
from parallel.links.native_links import NativeLinks

LinkTransport = Literal["auto", "tcp", "ucx"]
"""Transports that are links.

auto: UCX where all members have an RDMA device that is up, else TCP.
"""
MeshTransport = Literal[LinkTransport, "gloo"]
"""The flag ``--mesh-transport``."""


def make_links(forming: FormingGroup, asked: LinkTransport, *, host: str) -> NativeLinks | None:
    """This member's links to all others; None where the group keeps to TCP sockets.

    All members of a group ask for the same. ``host`` is the address of the interface to use.

    Raises:
        CollectiveError: somebody does not come.
        ValueError: a transport is asked for by name, and a member cannot use it.
    """
    if asked == "tcp" or forming.size == 1:
        return None
    from parallel.links.ucx_links import meet

    return meet(forming, asked, host=host)
