"""The model that computes nothing stands in for real ones in benchmarks."""

from __future__ import annotations

from engine.executor_contract import Executor
from examples.benchmarks.null_model import NullExecutor


def test_an_instance_finds_all_that_it_uses() -> None:
    used = {name for name in vars(Executor) if not name.startswith("_")} | {*Executor.__annotations__}
    missing = {name for name in used if not hasattr(NullExecutor, name)}
    assert not missing
