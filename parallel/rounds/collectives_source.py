"""Source of the compiled collectives in shared memory, and its struct.

This module loads no torch.
"""

from __future__ import annotations

import ctypes

from parallel.compiler import INCLUDE
from parallel.links.native_links import OFF, SLOWER
from parallel.native_source import NativeSource

CheckFunction = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
"""Check of a wait: (rank, address of a word, target) -> whether to give up."""


class CGroup(ctypes.Structure):
    """The struct ``Group`` of ``collectives.cpp``."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "rank", "size", "slot_bytes", "region_bytes", "view_bytes", "view_region_bytes",
                "own_bytes", "two_step_bytes",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "counter", "notes", "announced", "sent", "envelopes", "taken", "slots", "letters", "views",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("members", "terms")),
        ("check", CheckFunction),
        ("crowded", ctypes.c_int64),
        ("budget", ctypes.c_double),
        ("shared", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("known", "num_views", "letters_sent")),
        ("letter_user", ctypes.c_int64 * 2),
        ("letter_number", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("culprit", "found", "expected")),
    ]  # fmt: skip


SOURCE = NativeSource(
    path=INCLUDE / "collectives.cpp",
    headers=(INCLUDE,),
    structs={"group": CGroup},
    off=OFF,
    absent="native collectives: off,",
    instead=SLOWER,
)
