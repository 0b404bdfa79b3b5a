"""Admission of requests: refused, waiting for a grammar, blocks or rows of images, or queued."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from coordinator.messages import PauseMode
from coordinator.rpc.rpc import MAX_MESSAGE_BYTES
from engine.config import SchedulerConfig
from engine.core.cache_sharing import CacheSharing
from engine.core.image_encoding import ImageEncoding
from engine.core.pausing import Pausing
from engine.messages import BATCH_PRIORITY, Prefetch, RequestRefused, Submit, logprobs_bytes
from engine.model.checkpoint import ModelInfo
from engine.pooling_params import PoolingParams
from engine.prompt_images import problem_with, problem_with_grids, problem_with_marks
from engine.sampling import BadParameter
from engine.scheduling.grammar_compiler import GrammarCompiler
from engine.scheduling.request import Request, RequestKey, from_submit
from engine.scheduling.scheduler import Scheduler

BACKGROUND_PRIORITY = 2**63
"""Priority of requests that nobody waits for.

It is behind that of any client, which has 64 bits.
"""
BESIDE_LOGPROBS = 1 << 16
"""Bytes of a message beside the log-probabilities of a prompt."""


NO_ADAPTERS: Mapping[str, str] = {}


class Admission:
    """Checks new requests, and holds those that are not ready for the scheduler."""

    def __init__(
        self,
        limits: SchedulerConfig,
        info: ModelInfo,
        max_model_len: int,
        scheduler: Scheduler,
        sharing: CacheSharing,
        adapters: Mapping[str, str] = NO_ADAPTERS,
        *,
        keeps_experts: bool = False,
    ) -> None:
        """``adapters``: names of those in memory, by digest.

        ``keeps_experts``: whether the experts of a request's tokens can be returned.
        """
        self._keeps_experts = keeps_experts
        self.adapters = dict(adapters)
        """Names of the low-rank adapters in memory, by digest; always this dictionary."""
        self._limits = limits
        self._info = info
        self._max_model_len = max_model_len
        self._scheduler = scheduler
        self._sharing = sharing
        self._arrivals = 0
        self.weights = ""
        """Version of the weights that blocks of new requests are named by."""
        self.grammars = GrammarCompiler(info)
        self.images = ImageEncoding(info.image_token)
        self.pausing = Pausing()
        sharing.queue = self._encode

    def __repr__(self) -> str:
        return f"<Admission, {self._arrivals} requests so far, {self.grammars!r}>"

    @property
    def is_empty(self) -> bool:
        """Whether no request waits beside the scheduler."""
        return not len(self.pausing) and self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """The same without the requests that a pause holds back."""
        exchange = self._sharing.exchange
        return not (self.grammars or self.images) and (exchange is None or not exchange.waiting)

    @property
    def adapters_in_use(self) -> set[str]:
        """Digests of adapters that requests here have."""
        here = [*self._scheduler.queues.requests, *self.beside]
        return {request.adapter for request in here if request.adapter}

    def set_adapters(self, names: Mapping[str, str]) -> None:
        """Take over which adapters are in memory, between two steps: names by digest."""
        self.adapters.clear()
        self.adapters.update(names)

    def submit(self, peer: bytes, submit: Submit) -> RequestRefused | None:
        """Queue a request of a router, or return its refusal."""
        if self._is_full(submit) and not (submit.owed or submit.output_ids):
            return RequestRefused(submit.request, "the instance's queue is full", retry=True)
        problem = self._problem_with(submit)
        if problem is not None:
            return RequestRefused(submit.request, problem, retry=False)
        if self._knows((peer, submit.request)):
            return RequestRefused(submit.request, "a request of this number is here already", retry=False)
        request = self._request_of(peer, submit)
        problem = self._scheduler.problem_with(request)
        if problem is not None:
            return RequestRefused(submit.request, problem, retry=False)
        if not self.pausing.hold(request, submit.params.grammar):
            self._go_on(request, submit.params.grammar)
        return None

    def set_pause(self, mode: PauseMode | None) -> None:
        """Change the pause; queue the requests that it holds back no longer."""
        for request, grammar in self.pausing.change(mode):
            self._go_on(request, grammar)

    def _go_on(self, request: Request, grammar: str | None) -> None:
        if grammar is not None:
            self.grammars.begin(request, grammar)
        else:
            self._queue(request)

    def take_ready(self) -> list[tuple[bytes, RequestRefused]]:
        """Queue requests whose grammars or images are ready; returns refusals of failed ones."""
        refused = []
        for request, problem in self.images.take():
            peer, number = request.key
            if problem and not request.num_output:  # else a step finds it, and ends what was begun
                refused.append((peer, RequestRefused(number, problem, retry=False)))
            else:
                self._scheduler.add(request)
        for compiled in self.grammars.take():
            peer, number = compiled.request.key
            if compiled.problem is None:
                self._queue(compiled.request)
            else:
                reason = f"structured outputs: {compiled.problem}"
                refused.append((peer, RequestRefused(number, reason, retry=False)))
        return refused

    def forget(self, key: RequestKey) -> bool:
        """Forget a request that waits beside the scheduler; False if it does not."""
        exchange = self._sharing.exchange
        is_fetching = exchange is not None and exchange.forget(key)
        is_beside = is_fetching or self.grammars.forget(key) or self.images.forget(key)
        return is_beside or self.pausing.forget(key)

    def requests_of(self, peer: bytes) -> list[int]:
        """Numbers of all requests of a router, in the scheduler and beside it."""
        return list(self.ids_of(peer))

    def ids_of(self, peer: bytes) -> dict[int, str]:
        """Ids of all requests of a router by number, in the scheduler and beside it."""
        here = [*self._scheduler.queues.requests, *self.beside]
        return {request.key[1]: request.request_id for request in here if request.key[0] == peer}

    @property
    def beside(self) -> list[Request]:
        """Requests that wait beside the scheduler."""
        exchange = self._sharing.exchange
        fetching = [] if exchange is None else exchange.waiting.requests
        return [*self.grammars.requests, *self.pausing, *fetching, *self.images.requests]

    def can_compute(self, wish: Prefetch) -> bool:
        """Whether the tokens of a request that is to move here fit this model."""
        vocab_size, ids = self._info.vocab_size, wish.token_ids
        return 0 < len(ids) <= self._max_model_len and min(ids) >= 0 and max(ids) < vocab_size

    def _knows(self, key: RequestKey) -> bool:
        exchange = self._sharing.exchange
        is_fetching = exchange is not None and key in exchange.waiting
        is_beside = is_fetching or key in self.grammars or key in self.pausing or key in self.images
        return is_beside or self._scheduler.queues.knows(key)

    def _queue(self, request: Request) -> None:
        """Queue a request, at once or when blocks of it have been fetched."""
        exchange = self._sharing.exchange
        if exchange is None or not exchange.takes(request):
            self._encode(request)

    def _encode(self, request: Request) -> None:
        """Queue a request, at once or when its images have rows.

        Those in cached blocks need none.
        """
        num_cached = 0
        if request.images:
            self._scheduler.prefixes.find(request)
            num_cached, request.num_computed = request.num_computed, 0
        if not self.images.takes(request, num_cached):
            self._scheduler.add(request)

    def encode_again(self) -> None:
        """Let waiting requests wait for new rows of their images, beside the steps."""
        waiting = [each for each in self._scheduler.queues.waiting if each.images]
        for request in waiting:
            self._scheduler.queues.withdraw(request)
        beside = self.images.requests
        for request in beside:
            self.images.forget(request.key)
        for request in [*waiting, *beside]:
            self._encode(request)

    def _is_full(self, submit: Submit) -> bool:
        """Whether the queue is full for one more request.

        It would wait for longer than the next step, and too many do already. Tokens are counted before a
        request is added: a long one finds room in an empty queue.
        """
        limits = self._limits
        most_tokens = limits.max_num_queued_tokens
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids)
        queued = self._scheduler.queues.num_queued_with(num_tokens) + self.grammars.num_under_way
        queued += len(self.pausing) + self.images.num_under_way
        return queued > limits.max_num_queued_reqs or (
            most_tokens is not None and self._scheduler.queues.num_waiting_tokens >= most_tokens
        )

    def _problem_with(self, submit: Submit) -> str | None:
        num_prompt = len(submit.prompt_ids)
        if submit.adapter and submit.adapter not in self.adapters:
            return f"the adapter with the digest {submit.adapter} is not served any more"
        if num_prompt == 0:
            return "the prompt is empty"
        if (pooling := submit.pooling) is not None or self._info.pooling is not None:
            return self._problem_with_pooled(submit, pooling)
        if num_prompt >= self._max_model_len:
            return f"the prompt has {num_prompt} tokens; the context length is {self._max_model_len}"
        if num_prompt + len(submit.output_ids) >= self._max_model_len:
            return f"prompt and output fill the context length of {self._max_model_len} already"
        vocab_size = self._info.vocab_size
        ids = (submit.prompt_ids, submit.output_ids)
        if any(min(part) < 0 or max(part) >= vocab_size for part in ids if part):
            return f"a token id is outside the vocabulary of {vocab_size}"
        if submit.params.max_tokens is not None and len(submit.output_ids) >= submit.params.max_tokens:
            return "the request was complete already"
        most = submit.params.prompt_logprobs
        if most is not None and num_prompt * logprobs_bytes(most) > MAX_MESSAGE_BYTES - BESIDE_LOGPROBS:
            return f"{most} prompt_logprobs for each of {num_prompt} tokens are too much: ask for fewer"
        if problem := self._problem_with_images(submit):
            return problem
        if not 0 <= submit.scored_from <= num_prompt:
            return f"log-probabilities are wanted from token {submit.scored_from} of {num_prompt} on"
        if submit.routed_experts and not self._keeps_experts:
            return (
                "return_routed_experts needs a mixture of experts on native kernels without -pp, and this "
                "model is not computed so"
            )
        try:
            submit.params.check(vocab_size=vocab_size, max_logprobs=vocab_size)
        except BadParameter as error:
            return str(error)
        return None

    def _problem_with_pooled(self, submit: Submit, pooling: PoolingParams | None) -> str | None:
        """Why a request that is pooled, or is for a pooling model, cannot be answered."""
        model, num_tokens = self._info.pooling, len(submit.prompt_ids)
        if model is None:
            return "this model generates text (POST /v1/chat/completions): others need --runner pooling"
        if pooling is None:
            return f"this model generates no text: it does {model.offer}"
        if num_tokens > self._max_model_len:
            return f"the input has {num_tokens} tokens; this model takes up to {self._max_model_len}"
        if not 0 <= min(submit.prompt_ids) <= max(submit.prompt_ids) < self._info.vocab_size:
            return f"a token id is outside the vocabulary of {self._info.vocab_size}"
        return pooling.problem(model, num_tokens) or None

    def _problem_with_images(self, submit: Submit) -> str | None:
        if not submit.images:
            return None
        if self._info.image_token is None:
            return "this model takes no images here"
        return (
            problem_with(submit.images, submit.prompt_ids, self._info.image_token)
            or problem_with_grids(submit.images, self._info.image_merge)
            or (problem_with_marks(submit.images, submit.prompt_ids) if self._info.images_are_whole else None)
        )

    def _request_of(self, peer: bytes, submit: Submit) -> Request:
        self._arrivals += 1
        if submit.background:
            submit = msgspec.structs.replace(submit, priority=BACKGROUND_PRIORITY)
        elif self._limits.scheduling_policy == "fcfs" and submit.priority != BATCH_PRIORITY:
            submit = msgspec.structs.replace(submit, priority=0)
        request = from_submit(
            submit,
            peer,
            arrival=self._arrivals,
            eos_ids=self._info.eos_token_ids,
            max_model_len=self._max_model_len,
        )
        request.weights = self.weights
        request.arrived_at = request.began_at = time.perf_counter()
        return request
