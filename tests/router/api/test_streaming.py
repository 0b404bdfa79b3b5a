"""Samples, merged generations, and what a stream does when things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.messages import Delta, FinishReason
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from router.api.answers import Answer, AnswerFacts, ChunkedAnswer
from router.api.completions import CompletionAnswer
from router.api.headers import RequestTerms
from router.api.parameters import sampling_params
from router.api.prompts import completion_prompts
from router.api.request_run import RequestRun, merged
from router.api.request_samples import make_samples
from router.api.streaming import EventStream, made_of, unless_gone, whole_answer
from router.api.tracing import UNTRACED, RequestTrace
from router.api.understanding import Understood
from router.config import HttpConfig
from router.errors import ApiError, ClientGone
from router.http.body import decoder
from router.http.connection import CUT_OFF
from router.mesh import MeshError, Prompt, TokenSink
from router.metrics.metrics import Metrics
from router.openai_api import CompletionRequest
from router.recorded import Recorder
from router.text.output_stream import OutputStream, TextPiece, join
from router.text.stops import StopStrings
from router.text.text_model import TextModel
from router.text.tokens import Tokenizer
from router.turns.turn_format import TurnFormat
from tests.router.fake_mesh import FakeMesh, Script, failing, logprobs_of, saying
from tests.router.tiny_tokenizer import EOS, IM_END

# ---- one sample


def sample_of(tokenizer: Tokenizer, **params: Any) -> OutputStream:
    settings = SamplingParams(**params)
    stops = StopStrings(settings.stop) if settings.stop else None
    return OutputStream(0, Prompt("id", [5], settings, 1), settings, tokenizer, stops=stops)


def test_capsules_with_images_are_written_in_a_thread(tokenizer: Tokenizer) -> None:
    params = SamplingParams()
    threads: list[threading.Thread] = []

    def make() -> bytes:
        threads.append(threading.current_thread())
        return b""

    for images in ((), (PromptImage(0, 1, b"d" * 16),)):
        prompt = Prompt("id", [5], params, 1, images=images)
        for recorder in (None, Recorder()):
            sample = OutputStream(0, prompt, params, tokenizer, recorder=recorder)
            asyncio.run(made_of([sample], make))
    assert [each is threading.current_thread() for each in threads] == [True, True, True, False]


def say(sample: OutputStream, deltas: Sequence[Delta]) -> TextPiece:
    pieces = []
    for delta in deltas:
        pieces.append(sample.take(delta))
        if sample.finish_reason is not None:
            break
    return join(pieces)


def one_by_one(ids: Sequence[int], reason: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    return [*(Delta(1, [id]) for id in ids[:-1]), Delta(1, [ids[-1]], reason)]


def test_text_and_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello 🙂 you", add_special_tokens=False)
    for deltas in (one_by_one(ids), [Delta(1, ids, FinishReason.LENGTH)]):
        piece = say(sample_of(tokenizer), deltas)
        assert (piece.text, piece.token_ids) == ("Hello 🙂 you", ids)
        assert (piece.finish_reason, piece.stop_reason) == ("length", None)


def test_the_token_that_stops_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello!", add_special_tokens=False)
    stopped = Delta(1, ids, FinishReason.STOP, stop_reason=ids[-1])
    piece = say(sample_of(tokenizer), [stopped])
    assert (piece.text, piece.token_ids, piece.stop_reason) == ("Hello", ids, ids[-1])
    assert say(sample_of(tokenizer, include_stop_str_in_output=True), [stopped]).text == "Hello!"


def test_which_token_a_client_is_told_to_have_stopped_at(tokenizer: Tokenizer) -> None:
    """Any but the end of sequence, unless that is a stop token like others."""

    def reason(token_id: int, **params: Any) -> int | str | None:
        delta = Delta(1, [token_id], FinishReason.STOP, stop_reason=token_id)
        return say(sample_of(tokenizer, **params), [delta]).stop_reason

    assert reason(EOS) is None
    assert reason(EOS, stop_token_ids=(EOS,)) is None
    assert reason(EOS, stop_token_ids=(EOS,), ignore_eos=True) == EOS
    assert reason(IM_END) == IM_END


@pytest.mark.parametrize("whole", [True, False])
def test_a_stop_string_ends_it(tokenizer: Tokenizer, whole: bool) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    deltas = [Delta(1, ids, FinishReason.LENGTH)] if whole else one_by_one(ids)
    sample = sample_of(tokenizer, stop=(" thr",), logprobs=0)
    piece = say(sample, deltas)
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("one two", "stop", " thr")
    assert tokenizer.decode(piece.token_ids).startswith("one two thr")
    assert len(piece.token_ids) == len(piece.offsets) == sample.num_tokens < len(ids)
    assert (
        say(sample_of(tokenizer, stop=(" thr",), include_stop_str_in_output=True), deltas).text
        == "one two thr"
    )


@pytest.mark.parametrize("params", [{}, {"stop": (" four",)}, {"logprobs": 0}])
def test_a_piece_of_several_tokens_says_where_each_begins(tokenizer: Tokenizer, params: Any) -> None:
    ids = tokenizer.encode("one 🙂 two three", add_special_tokens=False)
    alone = sample_of(tokenizer, **params)
    parts = [part for delta in one_by_one(ids) for part in alone.take(delta).parts]
    together = sample_of(tokenizer, **params)
    first = together.take(Delta(1, ids[:-2]))
    second = together.take(Delta(1, ids[-2:], FinishReason.LENGTH))
    assert [*first.parts, *second.parts] == parts
    assert together.num_tokens == len(parts) == len(ids)


def test_min_tokens_disarms_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two one two", add_special_tokens=False)
    half = len(tokenizer.encode("one two", add_special_tokens=False))
    assert say(sample_of(tokenizer, stop=("two",)), one_by_one(ids)).text == "one "
    assert say(sample_of(tokenizer, stop=("two",), min_tokens=half), one_by_one(ids)).text == "one two one "


def test_what_is_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello Obs", add_special_tokens=False)
    piece = say(sample_of(tokenizer, stop=("Observation",)), one_by_one(ids))
    assert (piece.text, piece.finish_reason) == ("Hello Obs", "length")
    emoji = tokenizer.encode("🙂", add_special_tokens=False)
    assert say(sample_of(tokenizer), one_by_one(emoji[:2])).text == "\ufffd"
    assert say(sample_of(tokenizer, stop=("\ufffd",)), one_by_one(emoji[:2])).finish_reason == "stop"


def test_offsets_point_into_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello 🙂 you", add_special_tokens=False)
    piece = say(sample_of(tokenizer, logprobs=0), one_by_one(ids))
    assert piece.offsets == sorted(piece.offsets)
    assert piece.offsets[-1] == len(piece.text) - len(tokenizer.token_text(ids[-1]))


def test_an_error_delta_raises(tokenizer: Tokenizer) -> None:
    sample = sample_of(tokenizer)
    with pytest.raises(ApiError, match="out of luck") as caught:
        sample.take(Delta(1, [], FinishReason.ERROR, error="out of luck"))
    assert caught.value.status == 400
    assert caught.value.headers == {"x-should-retry": "false"}
    assert sample.finish_reason == "error"


# ---- many generations


def batches_of(mesh: FakeMesh, prompts: Sequence[Prompt]) -> list[list[tuple[int, Delta]]]:
    async def run() -> list[list[tuple[int, Delta]]]:
        generations = [mesh.generate(prompt) for prompt in prompts]
        return [batch async for batch in merged(generations)]

    return asyncio.run(run())


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"{n}", [5], SamplingParams(), 1, sample_index=n) for n in range(count)]


def test_what_comes_together_is_merged() -> None:
    batches = batches_of(FakeMesh(None, saying([5, 6, 7])), prompts(4))
    assert sum(map(len, batches)) == 12
    assert len(batches) <= 4
    for position in range(4):
        own = [delta.token_ids[0] for batch in batches for place, delta in batch if place == position]
        assert own == [5, 6, 7]


def test_an_error_of_one_comes_after_what_was_said() -> None:
    class Broken:
        rank = 0

        async def __aiter__(self) -> Any:
            yield Delta(1, [5])
            raise MeshError(503, "ServiceUnavailableError", "gone")

        def hand_over(self, sink: TokenSink) -> None: ...

        def close(self) -> None: ...

    async def run() -> None:
        seen = []

        async def read() -> None:
            async for batch in merged([Broken(), Broken()]):
                seen.extend(batch)

        with pytest.raises(MeshError, match="gone"):
            await read()
        assert len(seen) == 2

    asyncio.run(run())


# ---- a call


class Ends(RequestTrace):
    """Why the samples of a trace ended."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str | None] = []

    def end(
        self, samples: Sequence[OutputStream], arrival: float, first_at: float | None, ended: float
    ) -> None:
        assert arrival <= ended
        self.reasons += [sample.finish_reason for sample in samples]


class Call(NamedTuple):
    """A request that can run, and its answer."""

    run: RequestRun
    answer: Answer


def call_of(
    mesh: FakeMesh,
    model: TextModel,
    metrics: Metrics | None = None,
    trace: RequestTrace = UNTRACED,
    **fields: Any,
) -> Call:
    request = decoder(CompletionRequest)(msgspec.json.encode({"prompt": "Hello", "max_tokens": 50} | fields))
    params = sampling_params(request, model, 20)
    turn_format = TurnFormat(request, HttpConfig())
    understood = Understood(request, model, params, completion_prompts(request, model), turn_format)
    samples = make_samples(understood, RequestTerms(id="id"))
    answer = CompletionAnswer(understood, AnswerFacts(id="id", created=1, model="tiny", samples=samples))
    return Call(RequestRun(mesh, metrics or Metrics(mesh), samples, time.perf_counter(), trace=trace), answer)


class Client:
    """The other end of an ASGI application."""

    def __init__(self, leaves_after: int | None = None, blocks_after: int | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self._leaves_after = leaves_after
        self._blocks_after = blocks_after

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.messages) == self._blocks_after:
            await asyncio.Event().wait()
        self.messages.append(message)
        if len(self.messages) == self._leaves_after:
            self.left.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", True)


async def stream(call: Call, client: Client) -> None:
    await EventStream(*call)({}, client.receive, client.send)


async def whole(call: Call, client: Client) -> bytes:
    return await whole_answer(call.run, call.answer.body, client.receive)


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run it; no task may be left behind."""

    async def checked() -> None:
        await work()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(checked())


@pytest.fixture
def words(tokenizer: Tokenizer) -> Script:
    return saying(tokenizer.encode(" Hello world!", add_special_tokens=False))


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_to_its_end(text_model: TextModel, words: Script, n: int) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, words), Client()
        metrics = Metrics(mesh)
        await stream(call_of(mesh, text_model, metrics, n=n, stream=True), client)
        assert client.messages[0]["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in client.messages[0]["headers"]
        assert client.text.endswith("data: [DONE]\n\n")
        assert client.is_complete
        assert (mesh.num_open, metrics.in_flight) == (0, 0)
        assert metrics.success == {("0", "length"): n}

    run(work)


@pytest.mark.parametrize("streams", [True, False])
def test_what_tells_much_is_made_in_a_thread(text_model: TextModel, words: Script, streams: bool) -> None:
    async def work() -> None:
        loop_thread = threading.current_thread()
        for num_prompt, apart in ((8, False), (200, True)):
            prompt = [5 + at % 400 for at in range(num_prompt)]
            client = Client()
            fields = {"prompt": prompt, "echo": True, "logprobs": 20, "stream": streams}
            call = call_of(FakeMesh(None, words), text_model, **fields)
            places = []

            def note(make: Callable[..., bytes], places: list[bool] = places) -> Callable[..., bytes]:
                def noting(*args: Any, **options: Any) -> bytes:
                    places.append(threading.current_thread() is not loop_thread)
                    return make(*args, **options)

                return noting

            call.answer.whole, call.answer.chunk = note(call.answer.whole), note(call.answer.chunk)
            if streams:
                await stream(call, client)
                first = msgspec.json.decode(client.text.split("\n\n")[0].removeprefix("data: "))
            else:
                first = msgspec.json.decode(await whole(call, client))
            assert places == [apart, *[False] * (len(places) - 1)]
            told = first["choices"][0]["logprobs"]["top_logprobs"]
            assert told[0] is None
            names = {text_model.tokenizer.token_text(prompt[1] + more) for more in (0, 1, 2)}
            assert told[1].keys() == names

    run(work)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("leaves_after", [1, 2, 3])
def test_a_client_that_leaves(text_model: TextModel, n: int, leaves_after: int) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, lambda _: [Delta(1, [70])] * 9), Client(leaves_after)
        metrics = Metrics(mesh)
        await asyncio.wait_for(stream(call_of(mesh, text_model, metrics, n=n), client), 5)
        assert (mesh.num_open, metrics.in_flight) == (0, 0)
        assert metrics.success == {("0", "abort"): n}

    run(work)


def test_a_client_that_does_not_read(text_model: TextModel, words: Script) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, words), Client(blocks_after=2)
        cut_off = asyncio.Event()
        answer = EventStream(*call_of(mesh, text_model), send_timeout=0.05)
        scope = {"extensions": {CUT_OFF: cut_off.set}}
        await asyncio.wait_for(answer(scope, client.receive, client.send), 5)
        assert (mesh.num_open, len(client.messages)) == (0, 2)
        assert cut_off.is_set()

    run(work)


def test_an_error_before_the_first_token_has_its_own_status(text_model: TextModel) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, failing("out of luck")), Client()
        with pytest.raises(ApiError, match="out of luck"):
            await stream(call_of(mesh, text_model), client)
        assert (mesh.num_open, client.messages) == (0, [])

    run(work)


def test_an_error_after_the_first_token_ends_the_stream(text_model: TextModel) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, failing("out of luck", after=[70])), Client()
        metrics = Metrics(mesh)
        await stream(call_of(mesh, text_model, metrics), client)
        *_, error, done, end = client.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert msgspec.json.decode(error.removeprefix("data: "))["error"] == {
            "message": "out of luck",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
        assert client.is_complete
        assert (mesh.num_open, metrics.success) == (0, {("0", "error"): 1})

    run(work)


def test_a_refusal_in_the_middle_closes_the_others(text_model: TextModel, words: Script) -> None:
    async def work() -> None:
        mesh = FakeMesh(None, words)
        mesh.refusal, mesh.refuse_after = MeshError(503, "ServiceUnavailableError", "full"), 2
        metrics = Metrics(mesh)
        with pytest.raises(MeshError, match="full"):
            await stream(call_of(mesh, text_model, metrics, n=3), Client())
        assert (len(mesh.generations), mesh.num_open, metrics.in_flight) == (2, 0, 0)

    run(work)


@pytest.mark.parametrize("streams", [True, False])
def test_a_cancelled_request_leaves_nothing(text_model: TextModel, streams: bool) -> None:
    """As when the server shuts down."""

    async def work() -> None:
        mesh, client = FakeMesh(None, lambda _: [Delta(1, [70])]), Client()
        call = call_of(mesh, text_model, n=2)
        task = asyncio.ensure_future(stream(call, client) if streams else whole(call, client))
        await asyncio.wait((task,), timeout=0.02)
        assert len(mesh.generations) == 2
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert mesh.num_open == 0

    run(work)


def test_a_whole_answer_is_given_up_when_the_client_leaves(text_model: TextModel) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, lambda _: [Delta(1, [70])]), Client()
        call = call_of(mesh, text_model, n=2)
        asyncio.get_running_loop().call_later(0.02, client.left.set)
        with pytest.raises(ClientGone):
            await whole(call, client)
        assert mesh.num_open == 0

    run(work)


def test_a_generation_that_ends_too_early_is_an_error(text_model: TextModel) -> None:
    class Silent:
        rank = 0

        async def __aiter__(self) -> Any:
            return
            yield

        def hand_over(self, sink: TokenSink) -> None: ...

        def close(self) -> None: ...

    class SilentMesh(FakeMesh):
        def generate(self, prompt: Prompt) -> Any:
            return Silent()

    async def work() -> None:
        for n in (1, 2):
            with pytest.raises(ApiError, match="without a last token"):
                await whole(call_of(SilentMesh(None, saying([])), text_model, n=n), Client())

    run(work)


def test_a_stop_string_closes_its_generation_at_once(text_model: TextModel, tokenizer: Tokenizer) -> None:
    """The instance would go on, since only the router knows stop strings."""

    async def work() -> None:
        ids = tokenizer.encode(" one two", add_special_tokens=False)
        mesh = FakeMesh(None, lambda _: [Delta(1, [id]) for id in ids])
        body = await whole(call_of(mesh, text_model, n=2, stop=[" tw"]), Client())
        assert [choice["text"] for choice in msgspec.json.decode(body)["choices"]] == [" one", " one"]

    run(work)


def test_an_echo_alone_does_not_ask_the_mesh(text_model: TextModel, words: Script) -> None:
    async def work() -> None:
        for streams in (False, True):
            mesh, client = FakeMesh(None, words), Client()
            metrics, trace = Metrics(mesh), Ends()
            call = call_of(mesh, text_model, metrics, trace, echo=True, max_tokens=0)
            if streams:
                await stream(call, client)
                body = client.text.removeprefix("data: ").partition("\n")[0].encode()
            else:
                body = await whole(call, client)
            choice = msgspec.json.decode(body)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
            assert mesh.generations == []
            assert (metrics.success, metrics.in_flight) == ({("", "length"): 1}, 0)
            assert metrics.requests.computed.of("").total == 0
            assert trace.reasons == ["length"]

    run(work)


def test_unless_gone_prefers_the_result() -> None:
    async def work() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def result() -> int:
            return 1

        assert await unless_gone(receive, result()) == 1

    run(work)


def test_logprobs_of_the_fake_are_consistent() -> None:
    entry = logprobs_of(5, 3)
    assert (entry.top_ids[entry.rank - 1], entry.top_logprobs[entry.rank - 1]) == (5, entry.logprob)


@pytest.mark.parametrize("text", ["a", '"\\\n\0', "🙂", "\u2028"])
@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_framed_chunks_are_the_same(text_model: TextModel, text: str, stream_options: Any) -> None:
    call = call_of(FakeMesh(None, saying([])), text_model, n=2, stream=True, stream_options=stream_options)
    for sample in call.run.samples:
        assert isinstance(call.answer, ChunkedAnswer)
        assert call.answer.framed(sample, text) == call.answer.text_chunk(sample, text)
        assert call.answer.framed(sample, text).startswith(b'data: {"object":"text_completion","id":"id",')


# ---- comments for proxies


def test_a_silent_stream_says_that_it_is_alive(text_model: TextModel, words: Script) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, words), Client()
        mesh.delay = 0.12
        call = call_of(mesh, text_model, stream=True)
        await EventStream(*call, keep_alive=0.05)({}, client.receive, client.send)
        assert client.text.startswith(": keep-alive\n\n"), "before the first token"
        assert [message["type"] for message in client.messages].count("http.response.start") == 1
        events = [each for each in client.text.split("\n\n") if each and each != ": keep-alive"]
        assert all(each.startswith("data: ") for each in events)
        assert events[-1] == "data: [DONE]"
        assert client.is_complete

    run(work)


def test_a_failure_after_a_comment_is_an_event(text_model: TextModel) -> None:
    async def work() -> None:
        mesh, client = FakeMesh(None, failing("out of luck", after=[])), Client()
        mesh.delay = 0.12
        call = call_of(mesh, text_model, stream=True)
        await EventStream(*call, keep_alive=0.05)({}, client.receive, client.send)
        assert client.messages[0]["status"] == 200
        assert "out of luck" in client.text
        assert client.is_complete

    run(work)
