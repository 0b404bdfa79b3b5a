"""Sending the requests of a run and timing their chunks."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from router.launcher.environment import key_of_client
from router.tools.bench.arrivals import ArrivalProcess, pauses
from router.tools.bench.datasets import BenchRequest, Conversation, Prompt
from router.tools.bench.report import RequestResult

READ_TIMEOUT = 600.0
"""Seconds without a byte after which a request has failed."""
MAX_LINE = 4 << 20
"""Bytes of a line of a stream."""
RETRY_INTERVAL = 0.5
FOR_GOOD = (
    aiohttp.ClientSSLError,
    aiohttp.InvalidURL,
    aiohttp.NonHttpUrlClientError,
    aiohttp.ContentTypeError,
)
"""Errors that another try would meet again: certificates, addresses, a page."""


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Server under test, with the fields that all requests share."""

    base_url: str
    endpoint: str
    model: str
    is_chat: bool = False
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = {}


class ChunkDelta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct):
    delta: ChunkDelta | None = None
    text: str | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamChunk(msgspec.Struct):
    """Part of a streamed chunk that the measurement decodes.

    A load generator shares the machine with what it measures, so it must cost little: decoding only this
    takes a microsecond.
    """

    choices: list[Choice] | None = None
    usage: ChunkUsage | None = None
    error: Any = None

    @property
    def says_something(self) -> bool:
        """Whether the chunk carries a token.

        The chunk with the role and the one with usage alone do not.
        """
        deltas = [choice.delta or ChunkDelta() for choice in self.choices or ()]
        return any(delta.content or not delta.role for delta in deltas)

    @property
    def text(self) -> str:
        """Text of the first choice; call it only for chunks with a token."""
        choice = (self.choices or [Choice()])[0]
        return (choice.delta.content if choice.delta else None) or choice.text or ""


_EVENTS = msgspec.json.Decoder(StreamChunk)


class Unmeasurable(Exception):
    """Failure after which nothing can be measured: the server's answers are wrong."""


class ServerWait:
    """Wait for a server with a deadline; prints once that it waits."""

    def __init__(self, base_url: str, seconds: float) -> None:
        self._base_url = base_url
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._said = False

    async def wait(self, problem: str, *, for_good: bool) -> None:
        """Sleep before the next try, or raise once the deadline has passed.

        Raises:
            Unmeasurable: there is no use in one, or no time is left.
        """
        if for_good or time.monotonic() > self._deadline:
            raise Unmeasurable(f"{self._base_url} cannot be measured: {problem}")
        if not self._said:
            self._said = True
            print(
                f"waiting for {self._base_url}, at most {self._seconds:g} s (--ready-check-timeout-sec): "
                f"{problem}",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.sleep(RETRY_INTERVAL)


@asynccontextmanager
async def session(
    headers: Mapping[str, str] | None = None,
    *,
    key: str | None = None,
    trust: ssl.SSLContext | None = None,
    path: str | None = None,
) -> AsyncIterator[aiohttp.ClientSession]:
    """HTTP client session without a limit on connections.

    With ``key``, else the environment's, and ``headers`` besides or instead. ``trust``: for HTTPS, what is
    not the system's; ``path``: of the server's Unix socket, if it has one.
    """
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, ssl=trust or True)
    if path is not None:
        connector = aiohttp.UnixConnector(path, limit=0)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=READ_TIMEOUT),
        headers={"Authorization": f"Bearer {key or key_of_client(os.environ) or 'none'}", **(headers or {})},
    ) as found:
        yield found


async def send(
    http: aiohttp.ClientSession,
    target: BenchTarget,
    ask: BenchRequest,
    said: Sequence[str] = (),
    *,
    on_token: Callable[[float], None] = lambda _now: None,
) -> RequestResult:
    """Stream one answer and time its chunks.

    ``said``: what a conversation held before it, in turns. ``on_token`` is called with the time of each chunk
    with a token (``time.perf_counter``).
    """
    outcome = RequestResult(input_len=len(ask.prompt))
    began = latest = time.perf_counter()
    num_chunks, is_done = 0, False
    text: list[str] = []
    try:
        body = _body(target, ask, said)
        async with http.post(target.base_url + target.endpoint, json=body) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {await response.text()}"
                return outcome
            async for data in _events(response.content):
                is_done |= data == b"[DONE]"
                if is_done:
                    continue
                now, event = time.perf_counter(), _EVENTS.decode(data)
                outcome.error = str(event.error or outcome.error)
                if event.usage:
                    outcome.input_len = event.usage.prompt_tokens
                    outcome.output_len = event.usage.completion_tokens
                if event.says_something:
                    text.append(event.text)
                    if num_chunks:
                        outcome.itl.append(now - latest)
                    else:
                        outcome.ttft = now - began
                    num_chunks, latest = num_chunks + 1, now
                    on_token(now)
    except (aiohttp.ClientError, msgspec.MsgspecError, TimeoutError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = latest - began
    outcome.output_len = outcome.output_len or num_chunks
    outcome.text = "".join(text)
    if not outcome.error and not (is_done and num_chunks):
        outcome.error = f"the stream ended after {num_chunks} chunks{'' if is_done else ' without [DONE]'}"
    if not outcome.error and target.ignore_eos and outcome.output_len != ask.output_len:
        outcome.error = f"{outcome.output_len} tokens came instead of {ask.output_len}"
    return outcome


def _body(target: BenchTarget, ask: BenchRequest, said: Sequence[str]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": target.model, "temperature": target.temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if target.is_chat:
        turns = [*said, ask.prompt]
        roles = ("user", "assistant")
        messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
        body |= {"messages": messages, "max_completion_tokens": ask.output_len}
    else:
        prompt: Prompt = "\n".join([*said, ask.prompt]) if isinstance(ask.prompt, str) else ask.prompt
        body |= {"prompt": prompt, "max_tokens": ask.output_len}
    return body | ({"ignore_eos": True} if target.ignore_eos else {}) | target.extra_body


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event of a stream whose events have one line each.

    Raises:
        ValueError: a line is too long.
    """
    rest = b""
    async for received in stream.iter_any():
        *lines, rest = (rest + received).split(b"\n")
        if len(rest) > MAX_LINE:
            raise ValueError(f"a line of the stream has more than {MAX_LINE} bytes")
        for line in lines:
            if data := _data(line):
                yield data
    if data := _data(rest):
        yield data


def _data(line: bytes) -> bytes:
    return line[5:].strip() if line.startswith(b"data:") else b""


async def run(
    http: aiohttp.ClientSession,
    target: BenchTarget,
    conversations: Sequence[Conversation],
    *,
    concurrency: int | None = None,
    arrivals: ArrivalProcess = ArrivalProcess(),  # noqa: B008 - a frozen value
    rng: random.Random | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[list[RequestResult], float]:
    """Send all conversations, at most ``concurrency`` at once; returns results and seconds.
    ``on_end`` is called after each request."""
    limit = asyncio.Semaphore(concurrency or max(1, len(conversations)))

    async def converse(conversation: Conversation) -> list[RequestResult]:
        said: list[str] = []
        outcomes: list[RequestResult] = []
        async with limit:
            for ask in conversation:
                outcomes.append(await send(http, target, ask, said))
                on_end()
                if outcomes[-1].error:
                    break  # there is nothing to go on from
                said += [str(ask.prompt), outcomes[-1].text]
        return outcomes

    tasks = []
    began = time.perf_counter()
    pause = 0.0
    for conversation, next_pause in zip(
        conversations, pauses(arrivals, rng or random.Random(), len(conversations)), strict=True
    ):
        if pause:
            await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(converse(conversation)))
        pause = next_pause  # that after the last one is no part of the run
    found = await asyncio.gather(*tasks)
    return [outcome for outcomes in found for outcome in outcomes], time.perf_counter() - began


async def model_name(http: aiohttp.ClientSession, base_url: str, timeout: float) -> str:
    """The first model that the server lists.

    Raises:
        Unmeasurable: it lists none within ``timeout`` seconds.
    """
    patience = ServerWait(base_url, timeout)
    while True:
        try:
            async with http.get(f"{base_url}/v1/models", raise_for_status=True) as response:
                return str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as problem:
            status = problem.status if isinstance(problem, aiohttp.ClientResponseError) else 0
            hint = " (LOCKSTEP_API_KEY, OPENAI_API_KEY)" if status == 401 else ""
            await patience.wait(
                f"{type(problem).__name__}: {problem}{hint}",
                for_good=400 <= status < 500 or isinstance(problem, FOR_GOOD),
            )


async def until_ready(
    http: aiohttp.ClientSession, target: BenchTarget, ask: BenchRequest, timeout: float
) -> None:
    """Send one request until it succeeds.

    Raises:
        Unmeasurable: it never does, or is refused as wrong.
    """
    patience = ServerWait(target.base_url, timeout)
    while error := (await send(http, target, ask)).error:
        await patience.wait(error, for_good=error.startswith(("HTTP 4", "ClientConnectorCertificateError")))
