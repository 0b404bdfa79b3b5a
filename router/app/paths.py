"""The path that a client probably meant, and the message for unknown paths (pure).

Knows the endpoints as :mod:`router.app.openapi` lists them; :mod:`router.app.app` and
:mod:`router.app.middleware` ask.
"""

from __future__ import annotations

import difflib
import re

from router.app.adapters import ADAPTER_PATHS
from router.app.openapi import OPERATIONS
from router.app.rollouts import PATHS
from router.app.sleeping import SLEEP_PATHS
from router.app.weight_transfers import TRANSFER_PATHS
from router.app.weights_in_use import IN_USE_PATHS

KNOWN = tuple(dict.fromkeys(each.path for each in OPERATIONS if "{" not in each.path))
"""Paths without parameters."""

NOT_BUILT = re.compile(
    r"(/v\d)?/(moderations|images|audio|realtime|files|batches"
    r"|uploads|fine_tuning|assistants|threads|vector_stores)(/.*)?",
    re.DOTALL,
)
"""Paths of other inference servers that this one does not have."""

ELASTIC = "/scale_elastic_ep"
"""vLLM's path to scale; under the admin API's access check."""
REBALANCE = "/eplb/rebalance"
"""Path that has the coordinator rebalance experts now; under the admin API's access check."""
RESET = "/reset_prefix_cache"
"""vLLM's path to forget cached prefixes; under the admin API's access check."""

ADMIN_PATHS = (
    frozenset({"/admin", ELASTIC, REBALANCE, RESET})
    | PATHS
    | TRANSFER_PATHS
    | IN_USE_PATHS
    | SLEEP_PATHS
    | ADAPTER_PATHS
)
"""Paths of the admin API beside those that begin with ``/admin/``."""

LIKENESS = 0.8
"""Least similarity (difflib's ratio) at which a path counts as a misspelling of another."""
MAX_COMPARED = 100
"""Characters of a path that is compared with others: the time grows with their square."""


def is_admin(path: str) -> bool:
    """Whether a path belongs to the admin API."""
    return path in ADMIN_PATHS or path.startswith("/admin/")


def meant(path: str) -> str | None:
    """Endpoint that a client may have meant; None if none is similar."""
    if (whole := f"/v1{path}") in KNOWN:
        return whole
    if len(path) > MAX_COMPARED:
        return None
    return next(iter(difflib.get_close_matches(path.lower(), KNOWN, n=1, cutoff=LIKENESS)), None)


def not_there(path: str, prefix: str = "") -> str:
    """Message for an unknown path, for a client whose paths have a ``prefix``."""
    listed = f"GET {prefix}/openapi.json lists what it has."
    if NOT_BUILT.fullmatch(path):
        return f"This server has no {prefix}{path}: it serves a model that generates text. {listed}"
    if is_admin(path):
        where = "serve --admin-port, or --admin-api-key here"
        return f"This server has no {prefix}{path}: it is part of the admin API ({where})."
    if (found := meant(path)) is not None:
        return f"This server has no {prefix}{path}: did you mean {prefix}{found}?"
    return f"This server has no {prefix}{path}. {listed}"
