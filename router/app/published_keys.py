"""Endpoint of the public keys that sign capsules."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.api.answers import encode, json_response
from router.signing.keys import PublicKey, PublicKeys


class PublishedKeys:
    """Handler of ``GET /.well-known/lockstep-keys.json``; without keys the list is empty."""

    def __init__(self, keys: list[PublicKey]) -> None:
        self._keys = PublicKeys(keys)

    def __repr__(self) -> str:
        return f"<PublishedKeys {len(self._keys.keys)}>"

    async def get(self, _request: Request) -> Response:
        return json_response(encode(self._keys))
