"""Quotas of a key: requests per minute, tokens per minute, concurrent requests.

Pure, but for the lock. Each key has two buckets that fill up steadily and hold a minute's worth. A request
takes one from the first and its prompt's tokens from the second when it comes. It takes the tokens that it
generated when it ends, which may leave a debt to wait for. A request that only counts or converts tokens
takes them when it ends. Routers of one endpoint share the accounts through a small piece of memory, so a key
has its quota once however many routers there are.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from coordinator.process.runtime import open_reserved
from router.errors import ApiError
from router.key_limits import KeyLimits

LOCK_TRIES = 50
"""Attempts at a lock held by another router, a tenth of a millisecond apart.

One that is stopped while it holds the lock costs accuracy, not service.
"""
MINUTE = 60.0
NUMBER_BYTES = 8
RUNNING_RETRY = 1
"""Seconds that a client with too many requests at once is asked to wait."""


class Account(msgspec.Struct):
    """Remaining quota of a key. Times are seconds of one clock."""

    requests: float
    tokens: float
    at: float
    """When the buckets were filled up last."""


class QuotaRefusal(msgspec.Struct, frozen=True):
    limit: str
    """Name of the exceeded limit, in words."""
    retry_after: float
    """Seconds after which another try may succeed."""


def admit(
    limits: KeyLimits, account: Account, prompt_tokens: int, running: int, now: float
) -> QuotaRefusal | None:
    """Book a request that comes now, unless it exceeds a limit.

    A prompt longer than a minute's worth of tokens is let in when the bucket is full: it would never be
    otherwise.
    """
    _fill_up(limits, account, now)
    if limits.concurrent_requests is not None and running >= limits.concurrent_requests:
        return QuotaRefusal(f"{limits.concurrent_requests} requests at once", RUNNING_RETRY)
    per_minute = limits.requests_per_minute
    if per_minute is not None and account.requests < 1:
        return QuotaRefusal(f"{per_minute} requests per minute", (1 - account.requests) * MINUTE / per_minute)
    per_minute = limits.tokens_per_minute
    if per_minute is not None and (missing := min(prompt_tokens, per_minute) - account.tokens) > 0:
        return QuotaRefusal(f"{per_minute} tokens per minute", missing * MINUTE / per_minute)
    account.requests -= 1
    account.tokens -= prompt_tokens
    return None


def _fill_up(limits: KeyLimits, account: Account, now: float) -> None:
    passed = max(0.0, now - account.at) / MINUTE
    account.at = now
    most_requests, most_tokens = limits.requests_per_minute or 0, limits.tokens_per_minute or 0
    account.requests = min(most_requests, account.requests + passed * most_requests)
    account.tokens = min(most_tokens, account.tokens + passed * most_tokens)


class Booked(msgspec.Struct):
    """Tokens to book for a request that only counts or converts them."""

    tokens: int = 0


class Lease:
    """Request that was admitted; call :meth:`end` when it has ended, however."""

    def __init__(self, quotas: Quotas, key: int, prompt_tokens: int) -> None:
        self._quotas = quotas
        self._key: int | None = key
        self._prompt_tokens = prompt_tokens

    def __repr__(self) -> str:
        return f"<Lease of key {self._key}>"

    def end(self, generated_tokens: int, *, refused: bool = False) -> None:
        """End the lease; may be repeated. A request that was ``refused`` costs nothing."""
        key, self._key = self._key, None
        if key is None:
            return
        if refused:
            self._quotas.give_back(key, -self._prompt_tokens, requests=1)
        else:
            self._quotas.give_back(key, generated_tokens)


class Quotas:
    """Quota accounts of all API keys, shared by the routers of an endpoint.

    Keys are known by their number; without keys, all clients are number 0.
    """

    def __init__(
        self,
        limits: Sequence[KeyLimits],
        *,
        file: Path | None = None,
        front_end: int = 0,
        front_ends: int = 1,
    ) -> None:
        """``file``: shared with the other routers; None if there are none.

        Raises:
            OSError: there is no space for the file.
        """
        self._limits = limits
        self._is_limited = [each.limits_anything for each in limits]
        """By key."""
        self._front_end = front_end
        self._front_ends = front_ends
        self._width = _width(front_ends)
        size = self.num_bytes(len(limits), front_ends)
        self._lock = None if file is None else open_reserved(file, size)
        memory = mmap.mmap(-1 if self._lock is None else self._lock, size)
        self._numbers = memoryview(memory).cast("d")
        with self._locked():
            for key in range(len(limits)):  # those of who had this place before ended
                self._numbers[key * self._width + 3 + front_end] = 0

    def __repr__(self) -> str:
        return f"<Quotas of {len(self._limits)} keys>"

    @staticmethod
    def num_bytes(num_keys: int, front_ends: int) -> int:
        """Size of the file for so many keys and routers."""
        return max(1, num_keys) * _width(front_ends) * NUMBER_BYTES

    def admit(self, key: int, prompt_tokens: int, now: float | None = None) -> Lease | None:
        """Admit a request of a key; None if the key has no limits.

        Raises:
            ApiError: it has used up its quota (429).
        """
        if not self._is_limited[key]:
            return None
        limits = self._limits[key]
        now = time.monotonic() if now is None else now
        with self._locked():
            account = self._read(key)
            refusal = admit(limits, account, prompt_tokens, self.num_running(key), now)
            self._write(key, account)
            if refusal is None:
                self._numbers[key * self._width + 3 + self._front_end] += 1
                return Lease(self, key, prompt_tokens)
        raise _too_many(refusal)

    @contextlib.contextmanager
    def counting(self, key: int) -> Iterator[Booked]:
        """Context of a request that only counts or converts tokens, booked at its end.

        Raises:
            ApiError: the key has used up its quota (429).
        """
        lease, booked = self.admit(key, 0), Booked()
        is_refused = True
        try:
            yield booked
            is_refused = False
        finally:
            if lease is not None:
                lease.end(booked.tokens, refused=is_refused)

    def check(self, key: int) -> None:
        """Whether a request with an empty prompt would be let in; books nothing.

        Raises:
            ApiError: the key has used up its quota (429).
        """
        if not self._is_limited[key]:
            return
        limits = self._limits[key]
        with self._locked():
            account, running = self._read(key), self.num_running(key)
        refusal = admit(limits, account, 0, running, time.monotonic())
        if refusal is not None:
            raise _too_many(refusal)

    def give_back(self, key: int, generated_tokens: int, *, requests: int = 0) -> None:
        """Settle a request that has ended: book its tokens, and count it as over.

        One that nobody took gives back itself, and its prompt as tokens below 0.
        """
        with self._locked():
            self._numbers[key * self._width + 3 + self._front_end] -= 1
            self._numbers[key * self._width] += requests
            self._numbers[key * self._width + 1] -= generated_tokens

    def num_running(self, key: int) -> int:
        """Requests of a key that were let in and have not ended."""
        return int(sum(self._running(key)))

    def _running(self, key: int) -> Sequence[float]:
        start = key * self._width + 3
        return self._numbers[start : start + self._front_ends].tolist()

    def _read(self, key: int) -> Account:
        requests, tokens, at = self._numbers[key * self._width : key * self._width + 3].tolist()
        if at == 0.0:  # never used: full
            limits = self._limits[key]
            return Account(limits.requests_per_minute or 0, limits.tokens_per_minute or 0, 0.0)
        return Account(requests, tokens, at)

    def _write(self, key: int, account: Account) -> None:
        start = key * self._width
        for place, value in enumerate((account.requests, account.tokens, account.at)):
            self._numbers[start + place] = value

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.0001)
            else:
                break
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _width(front_ends: int) -> int:
    """Numbers stored per key: its account, and running requests of each router."""
    return 3 + front_ends


def _too_many(refusal: QuotaRefusal) -> ApiError:
    seconds = max(1, math.ceil(refusal.retry_after))
    message = f"The limit of {refusal.limit} is reached; try again in {seconds} s."
    return ApiError(429, message, headers={"retry-after": str(seconds)})
