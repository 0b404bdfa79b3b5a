"""Many clients at once, whose answers are compared to those of an undisturbed mesh.

Requests are greedy or seeded samples, some with penalties, with prompts of 10 to 1,500 tokens; the same number
always makes the same request. A request that comes again must give the same token ids and the same text.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import heapq
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from engine.config import SHIPPED_MODEL

SHORTEST, LONGEST = 10, 1500
"""Tokens of a prompt."""
PATIENCE = 90.0
"""Seconds within which any request ends, whatever happens."""
VOCABULARY = range(5, 4000)
NUM_GAPS = 10


class Verdict(enum.StrEnum):
    """A request against the truth."""

    RIGHT = "right"
    ERROR = "errors"
    """Refused, broken off, or too late."""
    LOST = "lost"
    """Tokens of the truth are missing."""
    DOUBLED = "doubled"
    """All tokens of the truth, and some of them again."""
    DIFFERENT = "different"
    """Other tokens, or the same tokens with another text or other log-probabilities."""
    LEFT = "left"
    """The client went away; there is no verdict."""


@dataclass
class Answer:
    """What one request got. Times are those of ``time.monotonic``."""

    number: int
    asked_at: float
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Those of the tokens, where the body asks for them."""
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    left: bool = False
    times: list[float] = field(default_factory=list)
    """When each chunk came."""
    counts: list[int] = field(default_factory=list)
    """Tokens that had come by then."""
    streams: bool = True

    def verdict(self, truth: Answer) -> Verdict:
        """This answer, which has ended, against what it should have been."""
        if self.left:
            return Verdict.LEFT
        if self.error is not None:
            return Verdict.ERROR
        if self.ids == truth.ids:
            same = self._rest() == truth._rest()
            return Verdict.RIGHT if same else Verdict.DIFFERENT
        if _is_within(self.ids, truth.ids):
            return Verdict.LOST
        return Verdict.DOUBLED if _is_within(truth.ids, self.ids) else Verdict.DIFFERENT

    def _rest(self) -> tuple[list[float], str, str | None]:
        """What must be the same where the tokens are, to the bit."""
        return self.logprobs, self.text, self.finish_reason

    def waits(self) -> Iterator[tuple[float, float]]:
        """(begin, end) of each wait from chunk to chunk."""
        return itertools.pairwise(self.times)


def _is_within(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether leaving some out of ``whole`` gives ``part``."""
    rest = iter(whole)
    return len(part) < len(whole) and all(each in rest for each in part)


def body_of(
    number: int,
    *,
    model: str = SHIPPED_MODEL,
    longest: int = LONGEST,
    most_tokens: int = 160,
    logprobs: bool = False,
) -> dict[str, Any]:
    """The body of a request.

    Half are greedy; lengths of prompts are even on a scale of magnitudes. ``logprobs``: those of the tokens
    are asked for, too.
    """
    rng = random.Random(number)
    length = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(longest))))
    return {
        "model": model,
        "prompt": rng.choices(VOCABULARY, k=length),
        "max_tokens": rng.randint(most_tokens // 4, most_tokens),
        "temperature": 0.0 if number % 2 else 0.8,
        "top_p": 1.0 if number % 5 else 0.9,
        "seed": number,
        "presence_penalty": 0.5 if number % 3 == 0 else 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"logprobs": 0} if logprobs else {}),
    }  # fmt: skip


class Load:
    """Clients that ask one request after another until they are stopped."""

    def __init__(
        self,
        url: str,
        truth: Sequence[Answer],
        bodies: Sequence[dict[str, Any]],
        *,
        streams: int,
        whole: int = 0,
        leaves: float = 0.0,
        seed: int = 0,
        keeps: bool = True,
        shares: int = 1,
    ) -> None:
        """``streams`` clients read streams, ``whole`` more ask for answers in one piece. ``leaves``: share of
        the streams whose client goes away in the middle. Without ``keeps``, answers are forgotten once they are
        judged, so that a run may last for hours. ``shares``: requests in a row that may share what is cached of a
        prompt."""
        self._url, self._truth, self._bodies = url, truth, bodies
        self._streams, self._whole, self._leaves = streams, whole, leaves
        self._rng = random.Random(seed)
        self._keeps = keeps
        self._shares = shares
        self._num_asked = 0
        self._began_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.answers: list[Answer] = []
        """All that were asked, those under way included; without ``keeps``, only these."""
        self.tokens = 0
        """Number of tokens of the answers that have ended."""
        self.gaps: list[tuple[float, float]] = []
        """Longest waits between chunks of streams that have ended: seconds, and when each ended.

        A heap of ``NUM_GAPS``.
        """
        self.verdicts: collections.Counter[Verdict] = collections.Counter()
        self.problems: list[str] = []

    def __enter__(self) -> Load:
        self._began_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._stopped.set()  # somebody wants to end: what was asked is not waited for

    def stop(self) -> None:
        """Ask nothing more, and wait until what was asked has ended."""
        self._stopped.set()
        self._thread.join(2 * PATIENCE)
        if self._thread.is_alive():
            self.problems.append("requests did not end")

    def tokens_between(self, begin: float, end: float) -> int:
        """Number of tokens that came over streams between two times."""
        total = 0
        for answer in self.answers:
            before = 0
            for at, count in zip(answer.times, answer.counts, strict=False):
                total += (count - before) * (begin <= at < end)
                before = count
        return total

    def longest_wait(self, begin: float, end: float, *, begun: float = 0.0) -> float:
        """Seconds of the longest wait between chunks that overlaps ``begin`` to ``end``.

        Waits that began before ``begun`` do not count.
        """
        return max(
            (
                after - before
                for answer in self.answers
                if answer.streams
                for before, after in answer.waits()
                if after >= begin and begun <= before <= end
            ),
            default=0.0,
        )

    # ----

    async def _run(self) -> None:
        async with session() as client:
            clients = [self._client(client, streams=True) for _ in range(self._streams)]
            clients += [self._client(client, streams=False) for _ in range(self._whole)]
            await asyncio.gather(*clients)

    async def _client(self, client: aiohttp.ClientSession, *, streams: bool) -> None:
        while not self._stopped.is_set():
            number = self._rng.randrange(len(self._bodies))
            leaves = streams and self._rng.random() < self._leaves
            patience = self._rng.uniform(0.05, 1.5) if leaves else PATIENCE
            answer = Answer(number, time.monotonic(), streams=streams)
            self.answers.append(answer)
            # A salt of its own: what was computed for this prompt before does not spare a resumed request its prefill.
            self._num_asked += 1
            salt = f"{number}-{self._num_asked // self._shares}"
            body = self._bodies[number] | {"stream": streams, "cache_salt": salt}
            try:
                await asyncio.wait_for(ask(client, self._url, body, answer), patience)
            except TimeoutError:
                answer.left = leaves
                answer.error = None if leaves else f"took more than {PATIENCE:.0f} s"
            self._judge(answer)
            if not self._keeps:
                self.answers.remove(answer)

    def _judge(self, answer: Answer) -> None:
        truth = self._truth[answer.number]
        verdict = answer.verdict(truth)
        self.verdicts[verdict] += 1
        self.tokens += len(answer.ids)
        gap = max(((end - begin, end) for begin, end in answer.waits()), default=None)
        if gap is not None:
            heapq.heappush(self.gaps, gap)
            if len(self.gaps) > NUM_GAPS:
                heapq.heappop(self.gaps)
        if verdict not in (Verdict.RIGHT, Verdict.LEFT):
            what = answer.error or f"{answer.ids} {answer._rest()} instead of {truth.ids} {truth._rest()}"
            after = time.monotonic() - self._began_at
            self.problems.append(f"{after:6.1f} s  request {answer.number}: {verdict}: {what}")


def session() -> aiohttp.ClientSession:
    """HTTP session without a bound on requests at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
    )


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    answer: Answer,
    headers: dict[str, str] | None = None,
) -> None:
    """One request, its answer written as it comes; errors are part of it."""
    try:
        async with client.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {await response.text()}"
            elif not body["stream"]:
                _take(answer, await response.json())
            else:
                await _read_stream(response, answer)
    except (aiohttp.ClientError, OSError) as error:
        answer.error = repr(error)


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        now = time.monotonic()
        chunk = json.loads(line[6:])
        if "error" in chunk:
            answer.error = str(chunk["error"])
            return
        _take(answer, chunk)
        answer.times.append(now)
        answer.counts.append(len(answer.ids))
    if not done or answer.finish_reason is None:
        answer.error = "the stream ended before its last token"


def _take(answer: Answer, page: dict[str, Any]) -> None:
    for choice in page["choices"]:
        answer.ids += choice["token_ids"] or []
        if choice.get("logprobs"):
            answer.logprobs += choice["logprobs"]["token_logprobs"]
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def undisturbed(url: str, bodies: Sequence[dict[str, Any]], at_once: int = 32) -> list[Answer]:
    """Answers to all requests, asked while nothing disturbs the mesh.

    Raises:
        RuntimeError: a request failed all the same.
    """

    async def run() -> list[Answer]:
        answers = [Answer(number, time.monotonic()) for number in range(len(bodies))]
        doors = asyncio.Semaphore(at_once)
        async with session() as client:

            async def one(answer: Answer) -> None:
                async with doors:
                    await ask(client, url, bodies[answer.number], answer)

            await asyncio.wait_for(asyncio.gather(*map(one, answers)), 10 * PATIENCE)
        return answers

    answers = asyncio.run(run())
    failed = [f"request {answer.number}: {answer.error}" for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"the undisturbed run failed: {failed[:3]}")
    return answers
