"""The picker over gRPC, as a gateway speaks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from router.api.headers import PREFERRED_RANK
from router.config import HttpConfig
from router.epp.endpoint_watch import EndpointWatch
from router.epp.endpoints import Endpoint
from router.epp.exchange import DESTINATION, NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE
from router.epp.picker import Picker
from router.epp.prompts import PromptReader
from router.mesh import ServedModel
from router.text.text_models import TextModels
from tests.router.dispatch.test_reservations import Reservations, pool_of
from tests.router.fake_mesh import FakeMesh, saying

grpc = pytest.importorskip("grpc")

from router.epp import service, wire  # noqa: E402
from router.epp.wire import CLASSES, message  # noqa: E402

PROCESS = f"/{service.PROCESSOR}/Process"
CHECK = f"/{service.HEALTH}/Check"
TEXT = "Hello " * 60


class FakeClient:
    """A mesh of two instances that never get anything."""

    def __init__(self) -> None:
        self.pool = pool_of(2)
        self.view: object = "known"

    def reservations(self) -> Reservations:
        return Reservations(self.pool)


class Gateway:
    """A picker with two endpoints, and a gateway that asks it."""

    def __init__(self, served: ServedModel) -> None:
        self.client = FakeClient()
        self.watch = EndpointWatch()
        self.watch.endpoints = {f"10.0.0.{n}:8000": Endpoint(f"10.0.0.{n}:8000", 0) for n in (1, 2)}
        models = TextModels(FakeMesh(served, saying([1])), HttpConfig())
        self.picker = Picker(self.client, self.watch, PromptReader(models, HttpConfig()))
        self.health = service.PickerHealth(lambda: self.picker.is_ready)

    def run(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """The result of ``work`` with a channel to the server."""

        async def all_of_it() -> Any:
            server = service.make_server(service.Processing(self.picker, 1 << 20), self.health)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    return await work(channel)
            finally:
                await server.stop(0)

        return asyncio.run(all_of_it())

    def ask(self, *messages: Any) -> list[Any]:
        """All answers to these messages."""

        async def work(channel: Any) -> list[Any]:
            async def sent() -> AsyncIterator[Any]:
                for each in messages:
                    yield each

            call = channel.stream_stream(
                PROCESS,
                request_serializer=CLASSES["ProcessingRequest"].SerializeToString,
                response_deserializer=CLASSES["ProcessingResponse"].FromString,
            )
            return [answer async for answer in call(sent())]

        return self.run(work)

    def check(self, name: str) -> Any:
        async def work(channel: Any) -> Any:
            call = channel.unary_unary(
                CHECK,
                request_serializer=CLASSES["HealthCheckRequest"].SerializeToString,
                response_deserializer=CLASSES["HealthCheckResponse"].FromString,
            )
            return (await call(message("HealthCheckRequest", service=name))).status

        return self.run(work)


@pytest.fixture
def gateway(served: ServedModel) -> Iterator[Gateway]:
    return Gateway(served)


def head(path: str = "/v1/completions", *, mode: int | None = wire.FULL_DUPLEX_STREAMED, ends: bool = False,
         subset: Sequence[str] | None = None) -> Any:  # fmt: skip
    headers = [
        message("HeaderValue", key=key, raw_value=value.encode())
        for key, value in {":method": "POST", ":path": path, "x-session-id": "s"}.items()
    ]
    made = message(
        "ProcessingRequest",
        request_headers=message(
            "HttpHeaders", headers=message("HeaderMap", headers=headers), end_of_stream=ends
        ),
    )
    if mode is not None:
        made.protocol_config.request_body_mode = mode
    if subset is not None:
        entry = made.metadata_context.filter_metadata.add(key=SUBSET_NAMESPACE)
        entry.value.update({SUBSET: list(subset)})
    return made


def body(content: object, *, ends: bool = True) -> Any:
    chunk = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return message("ProcessingRequest", request_body=message("HttpBody", body=chunk, end_of_stream=ends))


def picked(answer: Any) -> tuple[str, int | None]:
    """Endpoint and rank of an answer, which names the endpoint twice."""
    common = getattr(answer, answer.WhichOneof("kind")).response
    headers = {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}
    assert all(each.append_action == wire.OVERWRITE for each in common.header_mutation.set_headers)
    assert (
        answer.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value
        == (headers[DESTINATION])
    )
    rank = headers.get(PREFERRED_RANK)
    assert (rank is None) == (PREFERRED_RANK in common.header_mutation.remove_headers)
    return headers[DESTINATION], None if rank is None else int(rank)


def test_a_streamed_body_comes_back_behind_a_head_with_the_choice(gateway: Gateway) -> None:
    request = msgspec.json.encode({"prompt": TEXT})
    first, *bodies = gateway.ask(head(), body(request[:10], ends=False), body(request[10:]))
    endpoint, rank = picked(first)
    assert endpoint in gateway.watch.endpoints
    assert rank in (0, 1)
    pieces = [each.request_body.response.body_mutation.streamed_response for each in bodies]
    assert b"".join(each.body for each in pieces) == request
    assert [each.end_of_stream for each in pieces] == [False, True]


def test_a_buffered_body_is_answered_with_the_choice(gateway: Gateway) -> None:
    first, second = gateway.ask(head(mode=wire.BUFFERED), body({"prompt": TEXT}))
    assert first.WhichOneof("kind") == "request_headers"
    assert not first.request_headers.response.header_mutation.set_headers
    assert picked(second)[1] in (0, 1)


def test_a_gateway_that_names_no_mode_streams(gateway: Gateway) -> None:
    first, second = gateway.ask(head(mode=None), body({"prompt": TEXT}))
    assert picked(first)[1] in (0, 1)
    assert second.request_body.response.body_mutation.streamed_response.end_of_stream


def test_the_same_prefix_goes_to_one_instance_and_others_spread(gateway: Gateway) -> None:
    def rank_of(prompt: str) -> int | None:
        return picked(gateway.ask(head(), body({"prompt": prompt}))[0])[1]

    here = rank_of(TEXT)
    assert rank_of("a dog " * 60) != here
    assert [rank_of(TEXT + tail) for tail in ("a", "b", "c")] == [here] * 3


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": TEXT}]}),
        ("/inference/v1/generate", {"token_ids": list(range(5, 60)), "sampling_params": {"max_tokens": 2}}),
        ("/invocations", {"prompt": TEXT}),
        ("/invocations", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/completions?x=1", {"prompt": [5, 6, 7]}),
    ],
)
def test_an_instance_is_chosen_for_every_endpoint_that_generates(
    gateway: Gateway, path: str, content: object
) -> None:
    assert picked(gateway.ask(head(path), body(content))[0])[1] in (0, 1)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", {"prompt": TEXT, "n": 2}),
        ("/v1/completions", {"prompt": TEXT, "data_parallel_rank": 1}),
        ("/v1/completions", {"prompt": TEXT, "model": "another"}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/tokenize", {"prompt": TEXT}),
        ("/nowhere", {"prompt": TEXT}),
    ],
)
def test_other_requests_go_to_a_router_which_answers_or_chooses(
    gateway: Gateway, path: str, content: object
) -> None:
    endpoint, rank = picked(gateway.ask(head(path), body(content))[0])
    assert endpoint in gateway.watch.endpoints
    assert rank is None


def test_a_request_without_a_body_gets_an_endpoint(gateway: Gateway) -> None:
    assert picked(gateway.ask(head("/v1/models", ends=True))[0])[1] is None


def test_only_endpoints_of_the_gateway_are_chosen(gateway: Gateway) -> None:
    for _ in range(3):
        answer = gateway.ask(head(subset=["10.0.0.2:8000"]), body({"prompt": TEXT}))[0]
        assert picked(answer)[0] == "10.0.0.2:8000"
    (refused,) = gateway.ask(head(subset=["10.0.0.9:8000"]), body({"prompt": TEXT}))
    assert refused.immediate_response.status.code == 503


def test_without_a_ready_endpoint_the_request_is_refused(gateway: Gateway) -> None:
    for endpoint in gateway.watch.endpoints.values():
        endpoint.failures = 3
    (refused,) = gateway.ask(head(), body({"prompt": TEXT}))
    assert refused.immediate_response.status.code == 503
    assert refused.immediate_response.body == b"no router of the mesh is ready"


def test_without_an_instance_the_router_is_asked_all_the_same(gateway: Gateway) -> None:
    for instance in gateway.client.pool:
        instance.attached = False
    assert picked(gateway.ask(head(), body({"prompt": TEXT}))[0])[1] is None


def test_counts_return_to_zero_and_follow_the_endpoint_that_served(gateway: Gateway) -> None:
    seen = []

    async def work(channel: Any) -> None:
        call = channel.stream_stream(
            PROCESS,
            request_serializer=CLASSES["ProcessingRequest"].SerializeToString,
            response_deserializer=CLASSES["ProcessingResponse"].FromString,
        )()
        await call.write(head())
        await call.write(body({"prompt": TEXT}))
        endpoint, _ = picked(await call.read())
        await call.read()
        counts = {name: each.in_flight for name, each in gateway.watch.endpoints.items()}
        seen.append(counts[endpoint])
        (other,) = set(counts) - {endpoint}
        answered = message("ProcessingRequest", response_headers=message("HttpHeaders"))
        answered.metadata_context.filter_metadata.add(key=NAMESPACE).value.update({SERVED: other})
        await call.write(answered)
        await call.read()
        seen.append(gateway.watch.endpoints[other].in_flight)
        call.cancel()

    gateway.run(work)
    assert seen == [1, 1]
    assert [each.in_flight for each in gateway.watch.endpoints.values()] == [0, 0]
    assert gateway.picker._reservations.num_open == 0


def test_health_is_told_by_service(gateway: Gateway) -> None:
    for name in ("", "liveness", "readiness", service.PROCESSOR):
        assert gateway.check(name) == wire.SERVING
    gateway.client.view = None
    assert gateway.check("liveness") == wire.SERVING
    for name in ("", "readiness", service.PROCESSOR):
        assert gateway.check(name) == wire.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'x'"):
        gateway.check("x")
