"""The pages of limits show the constants and flags as they are."""

from __future__ import annotations

import pytest

from tests.docs import limits


@pytest.mark.parametrize("name", ["limits.md", "limits-router.md", "limits-mesh.md", "limits-groups.md"])
def test_page_of_limits_is_what_the_constants_make(name: str) -> None:
    (path,) = (path for path in limits.pages() if path.name == name)
    assert path.read_text() == limits.pages()[path], "run `python -m tests.docs.limits`"


def test_constants_of_all_packages_are_found() -> None:
    found = {(limit.module, limit.name): limit.value for limit in limits.limits()}
    assert found["router/http/request_heads.py", "MOST_WAITING"] == 32
    assert found["coordinator/rpc/rpc.py", "MAX_QUEUED_MESSAGES"] == 20_000
    assert {module.split("/")[0] for module, _ in found} == set(limits.PACKAGES)


def test_values_are_computed_from_numbers_and_earlier_constants() -> None:
    source = 'A = 4 * 1024\n"""Bytes."""\nB, C = 2 * A, 1.5\n"""Both."""\nD = f(3)\n"""No number."""\n'
    assert list(limits.constants(source)) == [
        ("A", 4096, "Bytes."),
        ("B", 8192, "Both."),
        ("C", 1.5, "Both."),
    ]


def test_sizes_and_times_are_shown_with_their_unit() -> None:
    def shown(name: str, value: float, meaning: str) -> str:
        return limits.shown(limits.Limit("router/x.py", name, value, meaning))

    assert shown("MOST_BYTES", 8 << 20, "Of lines that wait.") == "8 MiB"
    assert shown("SILENCE", 10.0, "Seconds without a word.") == "10 s"
    assert shown("HANDSHAKE_MS", 15_000, "Until a peer must have shown what it is.") == "15,000 ms"
    assert shown("MAX_RECENT", 100, "Events that are remembered.") == "100"
