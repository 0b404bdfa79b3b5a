"""Caches of real instances with planted faults, each of which is named and forgotten.

The faults are planted from outside: in memory that outlives an instance, and in files.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.model.finding import MODELS_DIRECTORY
from engine.tiers.block_files import HEADER, SUFFIX, BlockFiles
from tests.mesh.caches.planted_cache import BLOCK_SIZE, PlantedCache, names_of
from tests.mesh.faults.test_kv_files import change_weights
from tests.mesh.faults.test_transfers import FLAGS, LENGTH, ask, of, streams
from tests.mesh.harness import Command, Ports, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]
FOUND = (LENGTH - 1) // BLOCK_SIZE
"""Blocks of a prompt that are found; so many pieces have one checked."""
MOST_ASKED = 10
"""Requests until a fault is named: ten times the interval of checks."""
CHECKED = [*FLAGS, "--enable-prompt-tokens-details", "--cache-check-interval", str(FOUND)]
SHARED = [*CHECKED, "--enable-kv-inheritance"]
WRONG = 20
"""Block of a prompt in which the fault is."""
PLACES = ("own", "instance", "file", "memory", "unknown")

Answer = tuple[list[int], list[str]]


def prompt_of(first: int) -> list[int]:
    """The prompt of :func:`.ask`."""
    return [4 + (first + 7 * index) % 4000 for index in range(LENGTH)]


def counted(ports: Ports, what: str, rank: int) -> dict[str, int]:
    """Spot checks of an instance by source; ``what``: checked or wrong."""
    found = {kind: int(of(ports, f"lockstep:cache_{what}_total", rank, kind=kind)) for kind in PLACES}
    return {kind: count for kind, count in found.items() if count}


def until_named(ports: Ports, first: int, rank: int) -> None:
    """Ask one prompt until a wrong piece is named; each request has one piece checked."""
    before = sum(counted(ports, "checked", rank).values())
    for number in range(before + 1, before + MOST_ASKED + 1):
        ask(ports, first, rank)
        wait_until(
            lambda number=number: sum(counted(ports, "checked", rank).values()) >= number,
            20,
            "each request has a piece checked",
        )
        if counted(ports, "wrong", rank):
            return
    raise AssertionError(f"nothing was named in {MOST_ASKED * FOUND} hits")


def truth_of(ports: Ports, rank: int, *firsts: int) -> dict[int, Answer]:
    """Answers to prompts that nothing is cached of."""
    found = {}
    for first in firsts:
        *answer, cached = ask(ports, first, rank)
        assert cached == 0
        found[first] = (answer[0], answer[1])
    time.sleep(0.3)  # the blocks are reported at the latest by then
    return found


def check_named(command: Command, ports: Ports, rank: int, truth: dict[int, Answer], kind: str) -> None:
    """Assert that one source was named, and that no answer comes from what is wrong."""
    assert counted(ports, "wrong", rank) == {kind: 1}
    assert "a piece of the cache is not what is computed here: all is forgotten" in command.log
    listed = re.search(r"(\d+) requests had found it, or what stands behind it: (.*)", command.log)
    assert listed is not None
    assert len(listed[2].split(", ")) == int(listed[1]) > 0
    for _ in range(2):
        for first, answer in truth.items():
            assert ask(ports, first, rank)[:2] == answer
    assert sum(counted(ports, "wrong", rank).values()) == 1
    assert "Traceback" not in command.log


def check_forgotten(ports: Ports, first: int, rank: int) -> None:
    """Assert that nothing is cached of a prompt with right blocks of the same source."""
    assert ask(ports, first, rank)[2] == 0


FLIPPED, MISPLACED = "a flipped bit", "another block's content"
FAULTS: dict[str, Callable[[PlantedCache, list[bytes], list[bytes]], object]] = {
    FLIPPED: lambda cache, names, _: cache.flip(names[WRONG]),
    MISPLACED: lambda cache, names, others: cache.put_under(names[WRONG], others[WRONG]),
}


@pytest.mark.parametrize("fault", [FLIPPED, pytest.param(MISPLACED, marks=pytest.mark.nightly)])
def test_a_fault_of_an_instance_s_own_memory_is_named(tmp_path: Path, fault: str) -> None:
    ports = Ports()
    with serve(tmp_path / "log", "-dp", "1", *ports.head(), *SHARED) as command:
        command.wait_for("1 instance ready")
        truth = truth_of(ports, 0, 10, 500)
        FAULTS[fault](PlantedCache(command.child("Engine_0")), *(names_of(prompt_of(each)) for each in truth))
        until_named(ports, 10, 0)
        check_forgotten(ports, 500, 0)
        check_named(command, ports, 0, truth, "own")
        assert "the fault is of this instance: its memory, or what it computed" in command.log
        line = "cache pieces, 1 wrong (24 h): see the logs"
        wait_until(lambda: line in " ".join(ports.status().split()), 10, "it is shown", every=1.0)
        assert command.stop() == 0


@pytest.mark.parametrize("fault", [pytest.param(FLIPPED, marks=pytest.mark.nightly), MISPLACED])
def test_a_poisoned_transfer_is_named_and_its_source_not_asked_again(tmp_path: Path, fault: str) -> None:
    """The digests of the transfer are right: its source has something else in memory."""
    ports = Ports()
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *SHARED) as command:
        command.wait_for("2 instances ready")
        truth = truth_of(ports, 0, 10, 500)
        assert ask(ports, 500, 1)[2] > 0, "it is fetched, too, and right"
        wait_until(lambda: sum(counted(ports, "checked", 1).values()) == 1, 20, "it has a piece checked")
        FAULTS[fault](PlantedCache(command.child("Engine_0")), *(names_of(prompt_of(each)) for each in truth))
        until_named(ports, 10, 1)
        assert of(ports, "vllm:external_prefix_cache_hits_total", 1) >= FOUND * BLOCK_SIZE
        check_forgotten(ports, 500, 1)
        check_named(command, ports, 1, truth, "instance")
        assert re.search(
            r"KV blocks of tcp://\S+ are not asked for any more: a block of it is not", command.log
        )
        until_named(ports, 10, 0)
        check_named(command, ports, 0, truth, "own")
        assert command.stop() == 0


@pytest.mark.nightly
def test_an_inherited_block_that_is_half_written_is_named(tmp_path: Path) -> None:
    ports = Ports()
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *SHARED, "--restart") as command:
        command.wait_for("2 instances ready")
        truth = truth_of(ports, 1, 10)

        def die() -> None:
            heir = command.child("Engine_1")
            PlantedCache(heir).halve(names_of(prompt_of(10))[WRONG])
            heir.kill()

        asyncio.run(streams(ports, [prompt_of(10)], die))
        assert of(ports, "lockstep:kv_inherited_tokens_total", 0) >= FOUND * BLOCK_SIZE
        until_named(ports, 10, 0)
        check_named(command, ports, 0, truth, "memory")
        command.stop()


def test_a_file_of_other_weights_is_named_and_no_file_read_again(tmp_path: Path) -> None:
    """Its digest is that of these weights' file; the first prompt's files are right."""
    model = Path(shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "model"))
    other = Path(shutil.copytree(model, tmp_path / "other"))
    change_weights(other)
    ports, directory = Ports(), tmp_path / "kv"
    flags = [*CHECKED, "--served-model-name", SHIPPED_MODEL, "--kv-cache-dir", str(directory)]
    truth: dict[int, Answer] = {}
    for number, each in enumerate((model, other)):
        with serve(tmp_path / f"log-{number}", str(each), "-dp", "1", *ports.head(), *flags) as command:
            command.wait_for("1 instance ready")
            found = truth_of(ports, 0, 10, 500)
            assert found != truth
            truth = truth or found
            assert command.stop() == 0
    name = names_of(prompt_of(500))[WRONG]
    ours, theirs = (next(directory.glob(f"{each.name}/*/*/{name.hex()}{SUFFIX}")) for each in (model, other))
    content = theirs.read_bytes()[HEADER.size :]
    assert content != ours.read_bytes()[HEADER.size :]
    folder = ours.parents[1]
    identity = folder.name.split("-")[1]
    BlockFiles(directory, f"{folder.parent.name}/{folder.name}", identity).write(name, [memoryview(content)])
    assert len(ours.read_bytes()) == HEADER.size + len(content)

    with serve(tmp_path / "log", str(model), "-dp", "1", *ports.head(), *flags) as command:
        command.wait_for("1 instance ready")
        *found_again, cached = ask(ports, 10, 0)
        assert tuple(found_again) == truth[10]
        assert cached > 0
        wait_until(lambda: of(ports, "lockstep:kv_checked_total", 0) == 1, 5, "it is counted")
        assert of(ports, "lockstep:kv_wrong_total", 0) == 0
        until_named(ports, 500, 0)
        check_forgotten(ports, 10, 0)
        check_named(command, ports, 0, truth, "file")
        assert "is not used any more: empty it, and see who else can write there" in command.log
        assert command.stop() == 0


STREAMED = 1000
"""Tokens of an answer that outlasts the checks."""


async def stream_and_look(
    command: Command, ports: Ports, firsts: list[int]
) -> list[tuple[str, list[int], int]]:
    """Id and tokens of each instance's answer, and their number at its wrong piece's discovery.

    Each goes on behind a prompt of its own, whose cached blocks are wrong. Further requests have more pieces
    checked beside it.
    """
    async with openai.AsyncOpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:

        async def one(rank: int) -> tuple[str, list[int], int]:
            found: list[int] = []
            begun, named_at = asyncio.Event(), -1

            async def look() -> None:
                nonlocal named_at
                await begun.wait()
                for _ in range(MOST_ASKED):
                    await asyncio.to_thread(ask, ports, firsts[rank], rank)
                    if re.search(rf"\(Engine_{rank} .* all is forgotten", command.log):
                        break
                named_at = len(found)

            looking = asyncio.create_task(look())
            request = ""
            async for chunk in await client.completions.create(
                model=SHIPPED_MODEL, prompt=prompt_of(firsts[rank]), max_tokens=STREAMED, temperature=0, stream=True,
                extra_headers={"x-data-parallel-rank": str(rank)},
                extra_body={"return_token_ids": True, "ignore_eos": True},
            ):  # fmt: skip
                request = chunk.id
                for choice in chunk.choices:
                    found += choice.token_ids  # type: ignore[attr-defined]
                begun.set()
            await looking
            return request, found, named_at

        return await asyncio.gather(*(one(rank) for rank in range(len(firsts))))


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_running_requests_that_found_a_wrong_piece_are_listed_and_computed_again(
    tmp_path: Path, size: int
) -> None:
    """What they give from then on is what follows their tokens in truth."""
    ports, firsts = Ports(), [10, 500][:size]
    flags = [*SHARED, "--num-gpu-blocks-override", "1200"]
    with serve(tmp_path / "log", "-dp", str(size), *ports.head(), *flags) as command:
        command.wait_for(f"{size} instance{'s' * (size > 1)} ready")
        for rank, first in enumerate(firsts):
            truth_of(ports, rank, first)
            PlantedCache(command.child(f"Engine_{rank}")).flip(names_of(prompt_of(first))[WRONG])
        streamed = asyncio.run(stream_and_look(command, ports, firsts))
        again = re.findall(r"requests that found something are computed again: (.*)", command.log)
        listed = re.findall(r"had found it, or what stands behind it: (.*)", command.log)
        assert len(again) == size
        for rank, (request, tokens, named_at) in enumerate(streamed):
            wait_until(lambda rank=rank: counted(ports, "wrong", rank) == {"own": 1}, 10, "it is counted")
            assert len(tokens) == STREAMED
            assert any(request in line for line in again)
            assert any(request in line for line in listed)
            assert named_at < STREAMED - 10, "it still ran"
            assert tokens[named_at:] == continued(ports, [*prompt_of(firsts[rank]), *tokens[:named_at]], rank)
        assert "Traceback" not in command.log
        assert command.stop() == 0


def continued(ports: Ports, prompt: list[int], rank: int) -> list[int]:
    """Greedy tokens behind a prompt, up to the end of a streamed answer."""
    client = openai.OpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model=SHIPPED_MODEL, prompt=prompt, max_tokens=STREAMED + LENGTH - len(prompt), temperature=0,
        extra_headers={"x-data-parallel-rank": str(rank)},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    found: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return found
