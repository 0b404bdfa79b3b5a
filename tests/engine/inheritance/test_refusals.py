"""Settings with which nothing could be inherited."""

from __future__ import annotations

import pytest

from engine.config import CacheConfig


@pytest.mark.parametrize("off", ["enable_prefix_caching", "enable_kv_transfer"])
def test_inheritance_needs_names_and_transfers(off: str) -> None:
    with pytest.raises(ValueError, match=r"--enable-kv-inheritance does nothing with --no-enable-.*: drop"):
        CacheConfig(enable_kv_inheritance=True, **{off: False})
