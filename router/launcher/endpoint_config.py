"""Address of the endpoint of a ``serve`` on this host, from its settings file.

For ``lockstep chat`` and ``bench``.
"""

from __future__ import annotations

import ssl
from typing import Annotated

import msgspec

from coordinator.addresses import is_loopback
from coordinator.config import url
from coordinator.settings.flags import Port, flag

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address to connect to on this host, for an endpoint that listens on all addresses."""


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The endpoint of a serve."""

    host: Annotated[str, flag(help="Address of the endpoint.")] = "127.0.0.1"
    port: Annotated[Port, flag(help="Port of the endpoint.")] = 8000
    uds: Annotated[
        str | None, flag(path=True, help="Path of the endpoint's Unix socket, instead of those.")
    ] = None
    ssl_certfile: Annotated[
        str | None, flag(path=True, help="Certificate in PEM of an endpoint that speaks HTTPS.")
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        flag(
            repeated=True,
            help="Of several the first is used; unset: that in LOCKSTEP_API_KEY, or OPENAI_API_KEY.",
        ),
    ] = ()

    @property
    def base_url(self) -> str:
        """Base URL of the endpoint, without a path."""
        scheme = "http" if self.ssl_certfile is None else "https"
        if self.uds is not None:
            return f"{scheme}://localhost"
        return url(scheme, EVERYWHERE.get(self.host, self.host), self.port)

    def trust(self) -> ssl.SSLContext | None:
        """TLS context that trusts the endpoint's own certificate, on loopback under any name.

        Raises:
            OSError: it cannot be read, or is none.
        """
        if self.ssl_certfile is None:
            return None
        context = ssl.create_default_context()
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(self.ssl_certfile)
        is_here = self.uds is not None or is_loopback(EVERYWHERE.get(self.host, self.host))
        context.check_hostname = not is_here
        return context
