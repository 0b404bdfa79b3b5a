"""Files that the routers of one ``serve`` map, in the directory that their launcher made.

The launcher takes their space before any router starts; a router takes what is missing.
"""

from __future__ import annotations

from router.config import HttpConfig
from router.http.accept import Tally
from router.http.quotas import Quotas

CONNECTIONS = "connections"
QUOTAS = "quotas"
ANSWERS = "answers.sqlite"
"""Store of answers, without --store-path; SQLite takes its space."""


def shared_files(config: HttpConfig, front_ends: int) -> dict[str, int]:
    """Bytes of each file, by name, for so many routers."""
    return {
        CONNECTIONS: Tally.num_bytes(front_ends),
        QUOTAS: Quotas.num_bytes(len(config.key_limits), front_ends),
    }
