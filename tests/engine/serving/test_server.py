"""In what order an instance computes and hands out, over a real socket."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import pytest
import zmq

from coordinator.rpc import rpc
from coordinator.rpc.codec import Decoder, encode
from engine import messages
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore, admission
from engine.executor_contract import WorkerLost
from engine.messages import (
    Abort,
    Attach,
    Attached,
    Counters,
    Delta,
    EndRequests,
    FinishReason,
    InstanceReport,
    Leaving,
    Prefetch,
    Prefetched,
    Recall,
    Recalled,
    RequestRefused,
    RequestsEnded,
    Submit,
    TokenLogprobs,
    Tokens,
    ToRouter,
)  # fmt: skip
from engine.model.checkpoint import ModelInfo
from engine.sampling import SamplingParams
from engine.scheduling.outgoing_tokens import halves
from engine.serving.server import IDLE_WAIT, QUIET_LOOK, Server
from engine.step import Step, StepResult
from parallel.links.errors import CollectiveError
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingClient, MeetingHost
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, expected_output
from tests.engine.transfers.test_exchange import FakeMover

INFO = ModelInfo(
    directory="", architecture="", model_type="", vocab_size=VOCAB, context_length=64, dtype="float32",
    eos_token_ids=(VOCAB - 1,), num_experts=0,
)  # fmt: skip
PROMPT = [1, 2, 3]
QUIET_TURNS = 12
"""Turns of an idle loop."""


class Watched(SimulatedExecutor):
    """Writes down when each step begins and ends; its workers may end."""

    def __init__(self, events: list[str], *, in_flight: int = 1, computes_apart: bool, lost_at: int = 0):
        super().__init__(
            block_size=4, budget=32, max_rows=4, in_flight=in_flight, computes_apart=computes_apart
        )
        self._events, self._lost_at, self._begun, self._done = events, lost_at, 0, 0

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        if self._begun + 1 == self._lost_at:
            raise WorkerLost("a worker was killed")
        self._begun += 1
        self._events.append(f"compute {self._begun}")
        super().begin(step, sizes)

    def finish(self) -> StepResult:
        if self.computes_apart:
            self._done += 1
            self._events.append(f"done {self._done}")
        return super().finish()


class Router:
    """The other end, and a server that is run until it has answered.

    ``events`` has a line for each message with tokens.
    """

    def __init__(self, executor: Watched, events: list[str]) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_size=4),
            scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
        )
        self.core = EngineCore(config, INFO, executor, num_blocks=30, max_model_len=64)  # type: ignore[arg-type]
        self.server = Server("it", "tcp://127.0.0.1:0", self.core)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.server.endpoint)
        self._decoder: Decoder[ToRouter] = Decoder(ToRouter)
        self._tokens: dict[int, list[int]] = {}
        self._finished: set[int] = set()
        self.errors: dict[int, str] = {}
        self.ends: dict[int, FinishReason] = {}
        self.answered: list[RequestsEnded] = []
        self.attached: list[Attached] = []
        self.prefetched: list[Prefetched] = []
        self.leaving = 0
        listener = self.server._routers.listener
        send = listener.send

        def sent(peer: bytes, message: ToRouter) -> bool:
            if isinstance(message, Tokens) and (message.singles or message.deltas):
                events.append(f"send {len(message.singles) // 2 + len(message.deltas)}")
            return send(peer, message)

        listener.send = sent  # type: ignore[method-assign]

    def say(self, *messages: object) -> None:
        for message in messages:
            self._socket.send(encode(message))

    def tokens(self, timeout: float = 10.0, requests: int = 1, answers: int = 0) -> dict[int, list[int]]:
        """All tokens that have come once so many requests and all others have ended.

        ``answers``: questions about ended requests whose answers have come by then.

        Collection also ends when none has come for a moment.
        """
        deadline = time.monotonic() + timeout
        while len(self._finished) < max(len(self._tokens), requests) or len(self.answered) < answers:
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                break
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, Attached):
                self.attached.append(message)
            if isinstance(message, Prefetched):
                self.prefetched.append(message)
            if isinstance(message, RequestsEnded):
                self.answered.append(message)
            self.leaving += isinstance(message, Leaving)
            if isinstance(message, Tokens):
                singles = iter(message.singles)
                for number, token in zip(singles, singles, strict=True):
                    self._tokens.setdefault(number, []).append(token)
                for delta in message.deltas:
                    self._tokens.setdefault(delta.request, []).extend(delta.token_ids)
                    if delta.finish_reason is not None:
                        self.ends[delta.request] = delta.finish_reason
                        self._finished.add(delta.request)
                    if delta.error:
                        self.errors[delta.request] = delta.error
        return self._tokens

    def close(self) -> None:
        self.server.close()
        self._socket.close()
        self._context.term()


def submit(number: int, length: int) -> Submit:
    return Submit(number, str(number), PROMPT, SamplingParams(max_tokens=length, ignore_eos=True), seed=0)


def run_until_idle(router: Router, stop_early: bool = False) -> None:
    """Until all that was submitted has been answered."""
    deadline, seen = time.monotonic() + 10.0, False

    def between() -> None:
        nonlocal seen
        seen = seen or router.core.has_work
        if (seen and (stop_early or not router.core.has_work)) or time.monotonic() > deadline:
            router.server.drain(0.0)

    router.server.run(between)


@pytest.mark.parametrize(
    ("in_flight", "apart", "order"),
    [
        # An instance that computes itself has nothing to hide the sending behind.
        (1, False, ["compute 1", "send 1", "compute 2", "send 1", "compute 3", "send 1"]),
        # Workers compute the next step while the tokens of the last one go out; those of the last go at once.
        (
            1,
            True,
            [
                "compute 1",
                "done 1",
                "compute 2",
                "send 1",
                "done 2",
                "compute 3",
                "send 1",
                "done 3",
                "send 1",
            ],
        ),
    ],
)
def test_tokens_go_out_once_the_next_step_is_under_way(in_flight: int, apart: bool, order: list[str]) -> None:
    events: list[str] = []
    router = Router(Watched(events, in_flight=in_flight, computes_apart=apart), events)
    router.say(Attach("r"), submit(1, 3))
    run_until_idle(router)
    assert events == order
    assert router.tokens() == {1: expected_output(PROMPT, 3)}
    router.close()


def test_a_pipeline_is_filled_before_tokens_go_out() -> None:
    events: list[str] = []
    router = Router(Watched(events, in_flight=2, computes_apart=True), events)
    router.say(Attach("r"), submit(1, 4), submit(2, 4))
    run_until_idle(router)
    sends = [place for place, event in enumerate(events) if event.startswith("send")]
    assert len(sends) >= 6
    for place in sends[:-2]:
        assert events[place - 1].startswith("compute"), events
    assert router.tokens() == {number: expected_output(PROMPT, 4) for number in (1, 2)}
    router.close()


def test_tokens_that_are_done_are_sent_though_workers_are_lost() -> None:
    events: list[str] = []
    router = Router(Watched(events, computes_apart=True, lost_at=3), events)
    router.say(Attach("r"), submit(1, 9))
    with pytest.raises(WorkerLost):
        run_until_idle(router)
    assert router.tokens(timeout=1.0) == {1: expected_output(PROMPT, 2)}
    router.close()


@pytest.mark.parametrize("apart", [False, True])
def test_an_instance_that_stops_has_sent_all_that_is_done(apart: bool) -> None:
    """At the end of a drain that took too long, with a step behind it."""
    events: list[str] = []
    router = Router(Watched(events, computes_apart=apart), events)
    router.say(Attach("r"), submit(1, 20))
    run_until_idle(router, stop_early=True)
    steps = sum(event.startswith("compute") for event in events)
    assert router.tokens(timeout=1.0) == ({1: expected_output(PROMPT, steps)} if steps else {})
    router.close()


def test_whose_request_is_aborted_gets_no_more_than_what_was_done() -> None:
    """A second request goes on."""
    events: list[str] = []
    router = Router(Watched(events, computes_apart=True), events)
    router.say(Attach("r"), submit(1, 9), submit(2, 9))
    aborted = False
    deadline = time.monotonic() + 10.0

    def between() -> None:
        nonlocal aborted
        if len(events) > 6 and not aborted:
            aborted = True
            router.say(Abort([1]))
        if (aborted and not router.core.has_work) or time.monotonic() > deadline:
            router.server.drain(0.0)

    router.server.run(between)
    tokens = router.tokens(timeout=1.0)
    assert tokens[2] == expected_output(PROMPT, 9)
    assert tokens[1] == expected_output(PROMPT, 9)[: len(tokens[1])]
    assert router.core.reports.report(0, 0).blocks_used == 0
    router.close()


def test_requests_that_are_to_end_end_with_their_tokens_and_the_question_is_answered() -> None:
    """A request of another id goes on."""
    events: list[str] = []
    router = Router(Watched(events, computes_apart=True), events)
    router.say(Attach("r"), submit(1, 50), submit(2, 9))
    ended = False
    deadline = time.monotonic() + 10.0

    def between() -> None:
        nonlocal ended
        if len(events) > 6 and not ended:
            ended = True
            router.say(EndRequests(7, ("1",)))
        if (ended and not router.core.has_work) or time.monotonic() > deadline:
            router.server.drain(0.0)

    router.server.run(between)
    tokens = router.tokens(timeout=1.0, requests=2, answers=1)
    assert router.ends == {1: FinishReason.ABORT, 2: FinishReason.LENGTH}
    assert router.answered == [RequestsEnded(7)]
    assert tokens[2] == expected_output(PROMPT, 9)
    assert tokens[1] == expected_output(PROMPT, 50)[: len(tokens[1])]
    assert router.core.reports.report(0, 0).blocks_used == 0
    router.close()


def test_answers_too_large_for_one_message_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too large by itself fails, and the others do not."""
    monkeypatch.setattr(rpc, "MAX_MESSAGE_BYTES", 450)
    router = Router(Watched([], computes_apart=False), [])
    told = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    router.say(Attach("r"))
    for number, length in enumerate((58, 10, 10, 10)):
        prompt = [1 + token % 9 for token in range(length)]
        router.say(Submit(number, str(number), prompt, told, seed=0, cache_salt=str(number)))
    run_until_idle(router)
    tokens = router.tokens(requests=4)
    assert {number: len(found) for number, found in tokens.items()} == {0: 0, 1: 3, 2: 3, 3: 3}
    assert "too large" in router.errors[0]
    assert router.core.is_empty
    router.close()


def test_log_probabilities_that_no_message_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        admission, "MAX_MESSAGE_BYTES", admission.BESIDE_LOGPROBS + 4 * messages.logprobs_bytes(20)
    )
    router = Router(Watched([], computes_apart=False), [])
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    assert router.core.submit(b"r", Submit(1, "1", [1] * 4, params, seed=0)) is None
    refused = router.core.submit(b"r", Submit(2, "2", [1] * 5, params, seed=0))
    assert refused is not None
    assert "ask for fewer" in refused.reason
    assert not refused.retry
    router.close()


def test_halves_of_a_message_have_all_of_it_once_and_in_order() -> None:
    deltas = [Delta(number, [number]) for number in range(5)]
    report = InstanceReport(0, 1, 0, 0, 0, 10, Counters())
    first, second = halves(Tokens(deltas, report, None, [7, 8]))
    assert first.deltas + second.deltas == deltas
    assert (len(first.deltas), first.singles, second.singles) == (2, [7, 8], [])
    assert (first.report, second.report) == (None, report)


@pytest.mark.parametrize("most", [0, 1, 15, 16, 20, 100])
def test_how_large_log_probabilities_get_in_a_message(most: int) -> None:
    entry = TokenLogprobs(2**32 - 1, -1e-9, 2**32 - 1, [2**32 - 1] * most, [-1e-9] * most)
    assert len(msgspec.msgpack.encode(entry)) <= messages.logprobs_bytes(most)


def test_a_router_that_asks_again_is_told_again_that_nothing_is_lost() -> None:
    router = Router(Watched([], computes_apart=False), [])
    router.say(Attach("r", unanswered=True), Attach("r", unanswered=True), Attach("r"), submit(1, 2))
    run_until_idle(router)
    router.tokens()
    assert [message.repeated for message in router.attached] == [False, True]
    router.close()


def test_what_nobody_told_is_looked_for_seldom_at_rest_and_at_once_after_a_message() -> None:
    router = Router(Watched([], computes_apart=False), [])
    looks, turns = list[int](), 0
    report = router.core.reports.report

    def counted(last_dispatch: int, bad_messages: int) -> InstanceReport:
        looks.append(turns)
        return report(last_dispatch, bad_messages)

    router.core.reports.report = counted  # type: ignore[method-assign]
    router.say(Attach("r"))

    def between() -> None:
        nonlocal turns
        turns += 1
        if turns == QUIET_TURNS:
            router.say(Attach("r"))
        if turns == QUIET_TURNS + 2:
            router.server.drain(0.0)

    router.server.run(between)
    router.close()
    most_at_rest = 1 + QUIET_TURNS * IDLE_WAIT / QUIET_LOOK
    assert 2 <= len(looks) <= 3 + most_at_rest
    assert len(looks) < QUIET_TURNS / 2
    assert looks[-1] >= QUIET_TURNS, "a message may have changed something"


TOO_LONG = msgspec.structs.replace(submit(2, 2), prompt_ids=[1] * 100)


@pytest.mark.parametrize("ask", [Recall([1]), TOO_LONG], ids=["recalled", "refused"])
def test_a_router_that_an_answer_does_not_reach_is_forgotten_and_told_so(
    ask: Recall | Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read what was sent before.

    It would wait for this one for ever.
    """
    router = Router(Watched([], computes_apart=False), [])
    server, listener = router.server, router.server._routers.listener
    send, lost = listener.send, list[object]()

    def lose(peer: bytes, message: ToRouter) -> bool:
        if isinstance(message, Recalled | RequestRefused):
            lost.append(message)
            return False
        return send(peer, message)

    monkeypatch.setattr(listener, "send", lose)
    router.say(Attach("r"), submit(1, 2), ask)
    deadline, has_asked = time.monotonic() + 10.0, False

    def between() -> None:
        nonlocal has_asked
        if lost and not has_asked:
            assert not server._routers
            assert not router.core.has_work
            router.say(Attach("r"))
            has_asked = True
        if (has_asked and server._routers) or time.monotonic() > deadline:
            server.drain(0.0)

    server.run(between)
    router.tokens(0.5)
    assert [message.repeated for message in router.attached] == [False, False]
    router.close()


def test_nothing_is_taken_from_a_router_that_cannot_be_told_that_it_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(Watched([], computes_apart=False), [])
    listener = router.server._routers.listener
    send, lost = listener.send, list[object]()

    def lose_first(peer: bytes, message: ToRouter) -> bool:
        if not lost:
            lost.append(message)
            return False
        return send(peer, message)

    monkeypatch.setattr(listener, "send", lose_first)
    router.say(submit(1, 2), Attach("r"), submit(2, 2))
    run_until_idle(router)
    assert list(router.tokens()) == [2]
    assert [message.repeated for message in router.attached] == [False]
    router.close()


def test_whose_last_request_was_aborted_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers send nothing to an instance that has work and takes no steps."""
    events: list[str] = []
    router = Router(Watched(events, computes_apart=False), events)
    router.say(Attach("r"), submit(1, 50))
    deadline = time.monotonic() + 10.0
    aborted, rests = False, 0

    def between() -> None:
        nonlocal aborted, rests
        if len(events) > 4 and not aborted:
            assert router.server.load_meter.load().running == 1
            router.say(Abort([1]))
            aborted = True
        rests += aborted and not router.core.has_work
        if rests > 1 or time.monotonic() > deadline:
            router.server.drain(0.0)

    router.server.run(between)
    router.close()
    later = time.monotonic() + 20.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    load = router.server.load_meter.load()
    assert (load.running, load.waiting, load.stalled_for) == (0, 0, 0.0)


@pytest.mark.parametrize("hangs_up", [True, False])
def test_who_leaves_waits_until_its_routers_have_read_all(
    hangs_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hang up when the coordinator has told them, but not for ever."""
    events: list[str] = []
    router = Router(Watched(events, computes_apart=False), events)
    router.say(Attach("r"), submit(1, 3))
    run_until_idle(router)
    assert not router.server.leaves_requests
    looks = 0

    def sleep(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3 and hangs_up:
            assert router.tokens() == {1: expected_output(PROMPT, 3)}
            router._socket.close()

    with monkeypatch.context() as patch:
        patch.setattr("engine.serving.router_connections.time.sleep", sleep)
        began = time.monotonic()
        router.server.await_readers(patience=30.0 if hangs_up else 0.2)
    assert looks >= 3  # of one that hangs up the end may be seen at once
    assert time.monotonic() - began < 20.0
    router.close()


def test_who_has_no_time_left_says_so_and_waits_for_nobody() -> None:
    router = Router(Watched([], computes_apart=False), [])
    router.say(Attach("r"), submit(1, 40))
    run_until_idle(router, stop_early=True)
    assert router.server.leaves_requests
    router.close()


def lending() -> Router:
    """One that can lend its KV blocks, with a running request."""
    router = Router(Watched([], computes_apart=False), [])
    router.core.sharing.exchange_blocks(FakeMover(), address="a", identity="i", token_bytes=1.0)
    router.say(Attach("r"), submit(1, 2000))
    return router


@pytest.mark.parametrize("moves", [True, False])
def test_who_has_no_time_left_has_its_requests_moved_if_they_are_in_time(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serving.drain.MOVE_TIMEOUT", 20.0 if moves else 0.05)
    router, turns_after = lending(), 0

    def between() -> None:
        nonlocal turns_after
        time.sleep(0.005)
        if router.core.has_work and not turns_after:
            router.server.drain(0.0)
            turns_after = 1
        elif turns_after:
            turns_after += 1
            if moves and turns_after == 5:
                router.say(Abort([1]))

    router.server.run(between)
    router.tokens(timeout=1.0)
    assert router.leaving == 1
    assert router.server.leaves_requests == (not moves)
    router.close()


def test_who_is_told_to_go_at_once_does_not_wait_for_moves() -> None:
    router = lending()
    router.server.run(lambda: router.server.leave() if router.core.has_work else None)
    router.tokens(timeout=0.2)
    assert (router.leaving, router.server.leaves_requests) == (0, True)
    router.close()


def test_a_router_is_told_how_much_of_a_copy_is_there() -> None:
    router = lending()
    router.say(Prefetch(7, PROMPT + list(range(9)), "b"), Prefetch(8, [-1] * 60, "b"), submit(2, 20))

    def between() -> None:
        if router.core.reports.snapshot.generation_tokens >= 20:
            router.server.leave()

    router.server.run(between)
    router.tokens(timeout=0.2)
    assert router.prefetched == [Prefetched(8, 0)], "the first one's blocks are on their way"
    router.close()


def test_connections_refused_at_the_ports_of_groups_count_too() -> None:
    meeting = MeetingHost("127.0.0.1", key=LinkKey.generate())
    router = Router(Watched([], computes_apart=False), [])
    before = router.server.refused_peers
    for _ in range(2):
        with pytest.raises(CollectiveError, match="another mesh key"):
            MeetingClient("127.0.0.1", meeting.port, LinkKey.generate())
    assert router.server.refused_peers == before + 2
    router.close()
    meeting.close()
