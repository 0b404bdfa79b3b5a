"""Requests that wait beside the queue while blocks of their prefixes are fetched (pure)."""

from __future__ import annotations

from engine.scheduling.request import Request, RequestKey
from engine.transfers.incoming import IncomingTransfer


class WaitingRequests:
    """Requests that wait for a transfer each; several may wait for the same one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._transfers: dict[RequestKey, IncomingTransfer] = {}

    def __repr__(self) -> str:
        return f"<WaitingRequests: {len(self._transfers)}>"

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._transfers

    @property
    def requests(self) -> list[Request]:
        """All waiting requests."""
        return [transfer.requests[key] for key, transfer in self._transfers.items()]

    @property
    def num_tokens(self) -> int:
        """Tokens of all these requests."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def num_uncached(self) -> int:
        """Tokens of these requests that have to be computed in any case."""
        return sum(
            max(1, len(transfer.requests[key].token_ids) - len(transfer.wanted.names) * self._block_size)
            for key, transfer in self._transfers.items()
        )

    def add(self, request: Request, transfer: IncomingTransfer) -> None:
        """Have a request wait for a transfer."""
        transfer.requests[request.key] = request
        self._transfers[request.key] = transfer

    def remove(self, key: RequestKey) -> IncomingTransfer | None:
        """Take out a request; returns its transfer, None if it does not wait."""
        transfer = self._transfers.pop(key, None)
        if transfer is not None:
            del transfer.requests[key]
        return transfer

    def take(self, transfer: IncomingTransfer) -> list[Request]:
        """Take out the requests that wait for a transfer."""
        found, transfer.requests = list(transfer.requests.values()), {}
        for request in found:
            del self._transfers[request.key]
        return found
