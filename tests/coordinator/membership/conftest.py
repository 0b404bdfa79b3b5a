"""A mesh of three in its first group."""

from __future__ import annotations

import pytest

from tests.coordinator.membership.group_mesh import Mesh


@pytest.fixture
def mesh() -> Mesh:
    mesh = Mesh()
    mesh.begin()
    mesh.new_forms()
    return mesh
