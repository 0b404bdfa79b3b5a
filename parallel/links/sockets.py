"""The connected sockets of one member of a group."""

from __future__ import annotations

import socket
from typing import NamedTuple


class GroupSockets(NamedTuple):
    """One member's connections to all others, by rank; their user closes them.

    Both ends of each have proven the mesh's key, if there is one, for this very group.
    """

    data: dict[int, list[socket.socket]]
    """Data sockets to each peer, which carry only tensors."""
    control: dict[int, socket.socket]
    """Control socket to each peer, for the last word of a leaving member."""
    is_encrypted: bool = False
    """Whether there are streams, and the kernel encrypts all of them."""
    refused: int = 0
    """Connections of strangers that were refused while the group formed."""

    def close(self) -> None:
        for streams in self.data.values():
            for stream in streams:
                stream.close()
        for each in self.control.values():
            each.close()
