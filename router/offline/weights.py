"""New weights and adapters for the mesh of an ``LLM``."""

from __future__ import annotations

import asyncio
import uuid

from coordinator.commands import ask
from coordinator.membership.operations import ACCEPTED, DONE
from coordinator.messages import InFlight, LoadAdapter, UpdateWeights
from coordinator.rpc.keys import MeshKeys

ASK_INTERVAL = 0.02
"""Seconds between two questions how far an update is."""
ASK_TIMEOUT = 10.0
"""Seconds to wait for the coordinator's answer."""
UPDATE_TIMEOUT = 1200.0
"""Seconds in which all instances must have gone over."""


def update_command(path: str, label: str, in_flight: str) -> UpdateWeights:
    """Command to go over to the weights of a directory.

    Raises:
        ValueError: there is no such mode for requests in flight.
    """
    if in_flight not in set(InFlight):
        raise ValueError(f"in_flight is one of {', '.join(InFlight)}, not {in_flight!r}")
    return UpdateWeights(command=uuid.uuid4().hex, source=path, label=label, in_flight=InFlight(in_flight))


async def carry_out(endpoint: str, keys: MeshKeys | None, wish: UpdateWeights | LoadAdapter) -> str:
    """Repeat a command until all instances follow; returns the coordinator's last answer.

    Raises:
        ValueError: the weights, or the adapter, cannot be used; the old ones go on.
        TimeoutError: instances have not gone over yet, though they may.
    """
    async with asyncio.timeout(UPDATE_TIMEOUT):
        while True:
            try:
                answer = await ask(endpoint, wish, ASK_TIMEOUT, keys)
            except TimeoutError:
                continue  # the coordinator may be away for a moment
            if answer.status == DONE:
                return answer.text
            if answer.status != ACCEPTED:
                what = "weights are" if isinstance(wish, UpdateWeights) else f"adapter {wish.name!r} is"
                raise ValueError(f"the {what} not used: {answer.text}")
            await asyncio.sleep(ASK_INTERVAL)
