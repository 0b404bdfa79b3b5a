"""What tests of fused layers change in the code of families is changed back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.gpu.families import own_functions_again


@pytest.fixture(autouse=True)
def _families_get_back_their_functions() -> Iterator[None]:
    with own_functions_again():
        yield
