"""Bits of states that outlive their instance, in files and in shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.inheritance.names import FILE_NAME
from engine.messages import Submit
from engine.transfers import price, sources
from tests.engine.invariance.answers import ALONE, Answers, Instance, load
from tests.engine.states.models import make_state_model
from tests.engine.states.serving import Serving
from tests.engine.states.test_transfers import prompt
from tests.waiting import PATIENCE

FAMILIES = [
    pytest.param(("qwen3_next", "bfloat16")),
    pytest.param(("falcon_h1", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("lfm2", "float32"), marks=pytest.mark.nightly),
    pytest.param(("mamba2", "float32"), marks=pytest.mark.nightly),
]
OWNER = """
import sys, time, json
from pathlib import Path
import torch
from engine.inheritance.shared_cache import SharedCache
from tests.engine.invariance.answers import load
from tests.engine.states.serving import Serving
from tests.engine.states.test_kept import made_submits
torch.set_num_threads(1)
directory, dtype, path = sys.argv[1:]
instance = load(Path(directory), dtype=dtype, batch_invariant=True)
instance.executor.shared = SharedCache(path)
serving = Serving(instance)
address, table = instance.executor.published(serving.identity)
serving.core.sharing.publish_blocks(address, table)
serving.answers(made_submits())
serving.turn()
print(json.dumps([address, {each: serving.found[each].token_ids for each in serving.found}]), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read even the little that tiny models compute faster."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 16)
    monkeypatch.setattr(sources, "LEAST_SECONDS", PATIENCE)
    monkeypatch.setattr(sources, "MOST_SECONDS", PATIENCE)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family, dtype = request.param
    torch.set_num_threads(1)
    return make_state_model(tmp_path_factory.mktemp(family), family, getattr(torch, dtype)), dtype


@pytest.fixture(scope="module")
def instance(model: tuple[Path, str]) -> Instance:
    return load(model[0], dtype=model[1], batch_invariant=True)


def made_submits() -> list[Submit]:
    """Prompts of different lengths, two of which begin alike over a boundary."""
    shared = [3 + number * 11 % 90 for number in range(140)]
    return [
        prompt([*shared, 9, 9, 4], 0, 5),
        prompt([*shared, *range(5, 60)], 1, 5),
        prompt([90 - each % 80 for each in range(200)], 2, 5),
    ]


@pytest.fixture(scope="module")
def alone(instance: Instance) -> Answers:
    return instance.answers(made_submits(), ALONE)[0]


def test_an_instance_that_starts_again_goes_on_from_states_in_files(
    instance: Instance, alone: Answers, tmp_path: Path
) -> None:
    submits = made_submits()
    first = Serving(instance, files=tmp_path)
    assert first.answers(submits) == alone
    kept = first.known_states()
    first.close()
    names = {path.stem for path in tmp_path.rglob("*.kv")}
    assert names >= {each.hex() for each in kept}, "each state has a file"

    again = Serving(instance, files=tmp_path)
    assert again.answers(submits[2:]) == {2: alone[2]}
    assert (again.counters.checked_blocks, again.counters.wrong_blocks) == (1, 0), (
        "the first is computed as well"
    )
    before = again.num_computed
    for each in submits[:2]:
        assert again.answers([each]) == {each.request: alone[each.request]}
    ends = [len(each.prompt_ids) % again.grid for each in submits[:2]]
    assert again.num_computed - before <= sum(ends) + 2 * 4, "all but the open cells was read"
    again.close()


def test_a_torn_or_short_file_of_a_state_is_not_used(
    instance: Instance, alone: Answers, tmp_path: Path
) -> None:
    submits = made_submits()
    first = Serving(instance, files=tmp_path)
    first.answers(submits)
    states = first.known_states()
    first.close()
    paths = [path for path in sorted(tmp_path.rglob("*.kv")) if bytes.fromhex(path.stem) in states]
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        if number % 2:
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        else:
            path.write_bytes(data[: len(data) // 3])
    again = Serving(instance, files=tmp_path)
    assert again.answers(submits) == alone
    assert again.counters.wrong_blocks > 0
    assert again.counters.outcomes.keys() == {"wrong"}
    again.close()


def test_a_state_that_its_writer_computed_wrongly_is_found(
    instance: Instance, alone: Answers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    submits = made_submits()
    first = Serving(instance, files=tmp_path)
    first.answers(submits)
    states = first.known_states()
    first.close()
    for name in states:  # a digest that is right, of bytes that are not
        slot = first.pool.slot_of(name)
        assert slot is not None
        parts = first.memory.parts_of(slot)
        for part in parts:
            part[1] ^= 64
        assert first.tier is not None
        first.tier._files.write(name, parts)
    again = Serving(instance, files=tmp_path)
    assert again.answers(submits[:1]) == {0: alone[0]}
    assert (again.counters.checked_blocks, again.counters.wrong_blocks) == (1, 1)
    assert "KV blocks of files are not asked for any more" in caplog.text
    assert again.answers(submits) == alone
    again.close()


@pytest.fixture
def memory() -> Iterator[str]:
    file = os.memfd_create(f"{FILE_NAME}states")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def test_states_of_a_killed_instance_are_inherited(
    model: tuple[Path, str], instance: Instance, alone: Answers, memory: str
) -> None:
    command = [sys.executable, "-c", OWNER, str(model[0]), model[1], memory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        address, found = json.loads(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    assert {int(each): ids for each, ids in found.items()} == {
        number: answer.token_ids for number, answer in alone.items()
    }
    heir = Serving(instance, inherits=True)
    submits = made_submits()
    try:
        for each in submits:
            assert heir.answers([each], address) == {each.request: alone[each.request]}
        assert heir.counters.outcomes.keys() == {"whole"}
        ends = [len(each.prompt_ids) % heir.grid for each in submits]
        assert heir.num_computed <= sum(ends) + len(submits) * 4, "all but the open cells was inherited"
        assert heir.core.reports.report(0, 0).blocks_used == 0
    finally:
        heir.close()
