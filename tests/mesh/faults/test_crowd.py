"""A small crowd of bad clients leaves no trace; ``tests.mesh.faults.crowd`` runs a large one."""

from __future__ import annotations

import pytest

from tests.mesh.conftest import Mesh
from tests.mesh.faults.crowd import KINDS, run

pytestmark = pytest.mark.mesh


@pytest.mark.nightly
def test_a_crowd_of_bad_clients_leaves_no_trace(mesh: Mesh) -> None:
    router = mesh.command.child("Router")
    before = router.num_fds()
    found = run(mesh, router, 6 * len(KINDS))
    assert set(found["clients"].values()) == {6}
    assert found["descriptors"] <= before + 5
