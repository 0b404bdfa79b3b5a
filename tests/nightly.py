"""Whether tests run at their full size, as ``make nightly`` asks for with ``LOCKSTEP_NIGHTLY=1``."""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("LOCKSTEP_NIGHTLY", "") not in ("", "0")
"""All seeds of the simulators, and ten minutes of chaos; otherwise what fits into a run for each push."""
