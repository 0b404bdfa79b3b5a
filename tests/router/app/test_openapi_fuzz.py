"""Schemathesis makes requests, mostly wrong ones, from the OpenAPI document: none ends in a 5xx.

``make fuzz`` makes many more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import NIGHTLY
from tests.router.conftest import Server

EXAMPLES = os.environ.get("LOCKSTEP_FUZZ_EXAMPLES", "5")
"""Random requests per operation."""
PHASES = "coverage,fuzzing" if NIGHTLY or "LOCKSTEP_FUZZ_EXAMPLES" in os.environ else "fuzzing"
"""At night, also requests that cover each schema.

For each push, test_any_body.py sends many wrong bodies.
"""


@pytest.mark.each_push
@pytest.mark.timeout(3600 if "LOCKSTEP_FUZZ_EXAMPLES" in os.environ else 240)
def test_no_request_ends_in_a_server_error(server: Server, tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "schemathesis"
    if not command.exists():
        pytest.skip("schemathesis is not installed: pip install '.[dev]'")
    done = subprocess.run(
        [
            str(command), "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error",
            "--phases", PHASES, "--max-examples", EXAMPLES, "--generation-deterministic", "--no-color",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
