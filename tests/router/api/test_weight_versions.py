"""``weight_version`` in answers: which weights made which tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from coordinator.numerics import Numerics
from router.capsule import CapsuleWeights
from router.config import HttpConfig
from router.mesh import NumericsSwitch, ServedModel, WeightSpan
from router.text.tokens import Tokenizer
from tests.router.api.test_capsules import ask, capsule_in
from tests.router.conftest import Server, events, ids_of, serving
from tests.router.fake_mesh import Facts, FakeMesh, saying

CLASS = Numerics("fp_000000000001", "avx2", "bfloat16", invariant=True)
USER: list[Any] = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 8},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 8},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 8},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 8},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 8}},
}
ONE = [WeightSpan(0, 6, "step-6")]
TWO = [*ONE, WeightSpan(2, 7), WeightSpan(99, 8)]
"""The last one has made no token that was sent yet."""
RANGES = [
    {"choice": 0, "first_token": 0, "weight_version": "step-6"},
    {"choice": 0, "first_token": 2, "weight_version": "7"},
]


@pytest.fixture(scope="module")
def shared(served: ServedModel) -> Iterator[Server]:
    model = msgspec.structs.replace(served, fingerprint="abc")
    with serving(FakeMesh(model, saying([]), Facts(numerics={CLASS: [0]})), HttpConfig()) as server:
        yield server


@pytest.fixture
def server(shared: Server, tokenizer: Tokenizer) -> Iterator[Server]:
    shared.mesh.reset(saying(ids_of(tokenizer, " Hello world!")))
    shared.mesh.fingerprints[0] = CLASS.fingerprint
    yield shared
    shared.wait_until_idle()


def facts_in(path: str, answer: Any) -> Any:
    """The object of an answer that names weight versions."""
    return answer["usage"] if path == "/v1/messages" else answer


def last_of(path: str, text: str) -> Any:
    """The last object of a stream that names them."""
    found = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/responses":
        return found[-1]["response"]
    if path == "/v1/messages":
        return found[-2]["usage"]
    return found[-1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_of_one_version_names_it(server: Server, path: str, *, streams: bool) -> None:
    server.mesh.weight_spans[0] = ONE
    answer = server.post(path, BODIES[path] | {"stream": streams})
    found = last_of(path, answer.text) if streams else facts_in(path, answer.json())
    assert found["weight_version"] == "step-6"
    assert "weight_versions" not in found
    assert found.get("system_fingerprint", CLASS.fingerprint) == CLASS.fingerprint


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_over_a_change_has_its_ranges(server: Server, path: str, *, streams: bool) -> None:
    server.mesh.weight_spans[0] = TWO
    answer = server.post(path, BODIES[path] | {"stream": streams})
    found = last_of(path, answer.text) if streams else facts_in(path, answer.json())
    assert found["weight_version"] == "7"
    if "generate" in path:
        ranges = [each for choice in found["choices"] for each in choice.get("weight_versions", [])]
        assert ranges == ([] if streams else RANGES), "in a stream they come with their tokens"
    else:
        assert found["weight_versions"] == RANGES
    if path != "/v1/messages" and not (streams and "generate" in path):
        assert found["system_fingerprint"] == "fp_000000000001-weights-6-7"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_token_ids_come_with_their_weights(server: Server, path: str) -> None:
    server.mesh.weight_spans[0] = TWO
    body = BODIES[path] | {"return_token_ids": True}
    (choice,) = server.post(path, body).json()["choices"]
    assert choice["weight_versions"] == RANGES
    count, found = 0, []
    for chunk in events(server.post(path, body | {"stream": True}).text):
        for each in chunk["choices"]:
            ids = each.get("token_ids") or []
            ranges = each.get("weight_versions", [])
            assert all(count <= one["first_token"] < count + len(ids) for one in ranges)
            count, found = count + len(ids), found + ranges
    assert found == RANGES


def test_the_usage_of_a_stream_names_the_version(server: Server) -> None:
    server.mesh.weight_spans[0] = TWO
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}}
        *_, end, usage = events(server.post(path, body).text)
        assert end["weight_versions"] == usage["weight_versions"] == RANGES
        assert usage["system_fingerprint"] == "fp_000000000001-weights-6-7"


def test_choices_of_several_versions(server: Server) -> None:
    server.mesh.weight_spans.update({0: ONE, 1: [WeightSpan(0, 7)]})
    answer = server.post("/v1/completions", BODIES["/v1/completions"] | {"n": 2, "temperature": 1}).json()
    assert answer["weight_version"] == "7"
    assert answer["weight_versions"] == [RANGES[0], {"choice": 1, "first_token": 0, "weight_version": "7"}]


def test_a_prompt_alone_names_what_computed_it(server: Server) -> None:
    server.mesh.weight_spans[0] = ONE
    body = BODIES["/v1/completions"] | {"max_tokens": 0, "echo": True, "prompt_logprobs": 1}
    assert server.post("/v1/completions", body).json()["weight_version"] == "step-6"


def test_a_capsule_has_the_versions_of_its_tokens(server: Server) -> None:
    path = "/v1/completions"
    server.mesh.weight_spans[0] = [WeightSpan(0, 0)]
    plain = capsule_in(ask(server, path, BODIES[path]))
    assert (plain.format, plain.weights) == (3, ()), "older readers know it"
    server.mesh.weight_spans[0] = TWO
    capsule = capsule_in(ask(server, path, BODIES[path]))
    assert (capsule.format, capsule.weights) == (4, (CapsuleWeights(0, tuple(TWO[:2])),))
    assert capsule.prompts[0].samples[0].system_fingerprint == CLASS.fingerprint
    server.mesh.changes[0] = [NumericsSwitch(2, CLASS.fingerprint, None)]
    assert capsule_in(ask(server, path, BODIES[path])).prompts[0].samples[0].numerics_changes


def test_a_capsule_has_the_class_of_weights_that_the_mesh_has_no_more(server: Server) -> None:
    path, gone = "/v1/completions", Numerics("fp_00000000000a", "avx2", "float32", True, "digest 1")
    server.mesh.fingerprints[0] = gone.fingerprint
    assert capsule_in(ask(server, path, BODIES[path])).numerics == (), "its name alone is known"
    server.mesh.first_classes[0] = gone
    assert capsule_in(ask(server, path, BODIES[path])).numerics == (gone,)
    both = BODIES[path] | {"n": 2, "temperature": 1}
    server.mesh.fingerprints[1] = CLASS.fingerprint
    server.mesh.first_classes[1] = CLASS
    assert set(capsule_in(ask(server, path, both)).numerics) == {gone, CLASS}
