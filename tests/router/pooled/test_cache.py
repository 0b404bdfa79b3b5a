"""Answers of pooling models that are kept by their content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from coordinator.numerics import Numerics
from coordinator.pooled_model import PoolingTask
from engine.messages import Delta
from engine.pooling_params import Pooled, PoolingParams
from router.config import HttpConfig
from router.http.large_bodies import VERY_LARGE_BODY, run_sized
from router.mesh import Prompt, ServedModel
from router.metrics.pooling_counts import PoolingCounts
from router.pooled.cache import OVERHEAD, AnswerNames, PoolingCache
from tests.router.conftest import Server, serving
from tests.router.fake_mesh import Facts, FakeMesh
from tests.router.pooled.test_pooled_endpoints import EMBEDDER, good, pooled

FIRST = Numerics("fp_1", "avx512", "float32", invariant=True, weights="a")
SECOND = msgspec.structs.replace(FIRST, fingerprint="fp_2", weights="b")
EMBED = PoolingParams(PoolingTask.EMBED)


class Mesh:
    """A served mesh with a cache, whose every answer differs from the one before."""

    def __init__(self, server: Server, facts: Facts) -> None:
        self.server, self._facts = server, facts
        self.runs(FIRST)

    def runs(self, *classes: Numerics) -> None:
        """Have instances of these classes, the last of which computes."""
        self._facts.numerics = {each: [rank] for rank, each in enumerate(classes)}
        self.server.mesh.first_classes[0] = classes[-1]

    def embed(self, *inputs: Any, headers: Any = None, **fields: Any) -> list[Any]:
        body = {"input": list(inputs), **fields}
        answer = good(self.server.client.post("/v1/embeddings", json=body, headers=headers))
        return [each["embedding"] for each in answer["data"]]

    @property
    def num_computed(self) -> int:
        return len(self.server.mesh.prompts)


@pytest.fixture
def mesh(served: ServedModel) -> Iterator[Mesh]:
    number, facts = itertools.count(), Facts()

    def script(prompt: Prompt) -> list[Delta]:
        return pooled(float(next(number)), 0.0, 0.0, 1.0)

    model = msgspec.structs.replace(served, pooling=EMBEDDER)
    config = HttpConfig(pooling_cache=10 * (16 + OVERHEAD))
    with serving(FakeMesh(model, script, facts), config) as server:
        yield Mesh(server, facts)
        server.wait_until_idle()


def test_the_same_input_is_computed_once_and_has_the_same_bits(mesh: Mesh) -> None:
    first, second = mesh.embed("Hello", "world")
    assert mesh.num_computed == 2
    assert mesh.embed("world", "Hello", "new")[:2] == [second, first]
    assert mesh.num_computed == 3
    page = mesh.server.client.get("/metrics").text
    assert 'lockstep:pooling_cache_total{event="hit"} 2.0' in page
    assert 'lockstep:pooling_cache_total{event="miss"} 3.0' in page
    assert f"lockstep:pooling_cache_bytes {3.0 * (16 + OVERHEAD)}" in page


def test_another_question_is_another_answer(mesh: Mesh) -> None:
    asked: list[dict[str, Any]] = [
        {}, {"dimensions": 2}, {"normalize": False}, {"normalize": True}, {"prompt_name": "query"},
    ]  # fmt: skip
    found = [mesh.embed("Hello", **each)[0] for each in asked]
    assert mesh.num_computed == len(asked)
    assert [mesh.embed("Hello", **each)[0] for each in asked] == found
    assert mesh.num_computed == len(asked)


def test_other_weights_are_never_answered_by_what_was_kept(mesh: Mesh) -> None:
    before = mesh.embed("Hello")
    mesh.runs(SECOND)
    after = mesh.embed("Hello")
    assert after != before
    assert mesh.embed("Hello") == after
    mesh.runs(FIRST)
    assert mesh.embed("Hello") not in (before, after), "cleared, not hidden"
    assert 'event="cleared"} 2.0' in mesh.server.client.get("/metrics").text


def test_an_answer_of_weights_that_came_meanwhile_is_not_kept(mesh: Mesh) -> None:
    mesh.server.mesh.first_classes[0] = SECOND  # while the router still sees the first
    assert mesh.embed("Hello") != mesh.embed("Hello")


@pytest.mark.parametrize(
    "classes",
    [
        (FIRST, SECOND),
        (msgspec.structs.replace(FIRST, invariant=False),),
        (msgspec.structs.replace(FIRST, weights=""),),
    ],
)
def test_a_mesh_without_one_answer_to_an_input_keeps_none(mesh: Mesh, classes: tuple[Numerics, ...]) -> None:
    mesh.runs(*classes)
    assert mesh.embed("Hello") != mesh.embed("Hello")


def test_a_client_that_names_an_instance_has_it_compute(mesh: Mesh) -> None:
    headers = {"X-data-parallel-rank": "0"}
    assert mesh.embed("Hello", headers=headers) != mesh.embed("Hello", headers=headers)


def test_the_oldest_answers_go_when_there_is_no_room(mesh: Mesh) -> None:
    words = [[number] for number in range(1, 12)]
    (first, *_, last) = [mesh.embed(each) for each in words]
    assert mesh.embed(words[-1]) == last
    assert mesh.embed(words[0]) != first
    assert mesh.num_computed == 12


def test_names_of_many_tokens_are_not_made_where_one_request_is_worked_on(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def sized(work: Callable[[], Any], size: int) -> Any:
        sizes.append(size)
        return run_sized(work, size)

    monkeypatch.setattr("router.pooled.run.run_sized", sized)
    mesh.embed(*([[1] * 256] * 513))
    assert sizes == [VERY_LARGE_BODY]


def test_it_holds_no_more_than_its_bytes() -> None:
    counts = PoolingCounts()
    cache = PoolingCache(3000, counts)
    assert cache.use([FIRST])
    for number in range(50):
        cache.put(bytes([number]), Pooled(bytes(10 * number), (10 * number // 4,)), FIRST)
        assert counts.num_bytes is not None
        assert 0 < counts.num_bytes <= 3000
    cache.put(b"large", Pooled(bytes(4000), (1000,)), FIRST)
    assert cache.get(b"large") is None
    assert len(cache) + counts.events["evicted"] == 50


def test_no_instance_for_a_moment_leaves_answers_there() -> None:
    cache = PoolingCache(3000, PoolingCounts())
    assert cache.use([FIRST])
    cache.put(b"name", Pooled(b"1234", (1,)), FIRST)
    assert not cache.use([])
    assert cache.use([FIRST])
    assert cache.get(b"name") is not None


def test_a_name_has_all_that_decides_the_content(served: ServedModel) -> None:
    model = msgspec.structs.replace(served, pooling=EMBEDDER)
    other = msgspec.structs.replace(EMBEDDER, pooling="mean")
    names = [
        AnswerNames(each, params).name(ids, types)
        for each in (
            model,
            msgspec.structs.replace(model, pooling=other),
            msgspec.structs.replace(model, fingerprint="other"),
        )
        for params in (
            EMBED,
            PoolingParams(PoolingTask.TOKEN_EMBED),
            PoolingParams(PoolingTask.EMBED, dimensions=2),
            PoolingParams(PoolingTask.EMBED, normalize=False),
            PoolingParams(PoolingTask.EMBED, activation=False),
            PoolingParams(PoolingTask.EMBED, activation=True),
        )
        for ids in ([1, 2], [1, 2, 3], [258])
        for types in (b"", b"\0\1")
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert AnswerNames(model, EMBED).name([1, 2], b"") == names[0]
