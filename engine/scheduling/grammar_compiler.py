"""Compilation of grammars in one thread beside the step loop, with a cache.

A request waits here, and nowhere else, until its grammar is ready, while others run. Until then only the
thread writes to that request.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.own_memory import private_memory
from engine.host.deep_thread import DeepThread
from engine.host.memory import return_freed_memory
from engine.model.checkpoint import ModelInfo
from engine.scheduling.grammar import Grammar, GrammarError, Vocabulary, compile_grammar, load_vocabulary
from engine.scheduling.request import Request, RequestKey

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

CACHED_GRAMMARS = 256
CACHED_BYTES = 8 << 20
"""Bytes of the texts of cached grammars.

Compiled, they are about a hundred times as large.
"""

MAX_USES = 256
"""Requests that share the result of one compilation.

The lexer's states add up over all of them, and are limited.
"""

MAX_GROWTH = 128 << 20
"""Bytes that the process may grow by before cached grammars are dropped.

The library does not tell what a grammar holds, which grows as answers follow it.
"""


@dataclass(frozen=True)
class Compiled:
    """A request whose grammar is ready, or the reason why it never will run."""

    request: Request
    problem: str | None


class GrammarCompiler:
    """Compiles grammars beside the step loop; its thread starts with the first request."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._done: deque[Compiled] = deque()
        self._waiting: dict[RequestKey, Request] = {}
        self._under_way = 0
        self._thread = DeepThread("grammars", on_idle=self._limit_growth)
        self._vocabulary: Vocabulary | None = None
        self._trouble: str | None = None
        """Why no grammar can be used on this instance."""
        self._cache = GrammarCache()
        self._level: int | None = None
        """Private memory of the process in bytes, or less, when no grammar was cached."""
        self.on_done: Callable[[], None] = lambda: None
        """Called by the thread when a request is ready."""

    def __repr__(self) -> str:
        return f"<GrammarCompiler {len(self._waiting)} waiting, {self._cache!r}>"

    def __len__(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    @property
    def num_under_way(self) -> int:
        """Requests in the thread's hands: waiting ones, and forgotten ones that it still holds."""
        return self._under_way

    @property
    def requests(self) -> list[Request]:
        return list(self._waiting.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    def prepare(self) -> None:
        """Read the tokenizer now, since running requests would wait for it later."""
        self._load()
        if self._trouble is not None:
            logger.info("requests with structured outputs will be refused: %s", self._trouble)

    def begin(self, request: Request, text: str) -> None:
        """Compile the grammar of a request in the thread."""
        self._waiting[request.key] = request
        self._under_way += 1
        output_ids = request.token_ids[request.num_prompt :]
        self._thread.submit(lambda: self._compile(request, text, output_ids))

    def forget(self, key: RequestKey) -> bool:
        """Stop waiting for a request's grammar; False if the request does not wait here."""
        return self._waiting.pop(key, None) is not None

    def take(self) -> list[Compiled]:
        """Requests that have become ready, in order of arrival, without forgotten ones."""
        ready = []
        while self._done:
            compiled = self._done.popleft()
            self._under_way -= 1
            if self._waiting.get(compiled.request.key) is compiled.request:
                del self._waiting[compiled.request.key]
                ready.append(compiled)
        return ready

    # ---- the thread

    def _compile(self, request: Request, text: str, output_ids: list[int]) -> None:
        problem = None
        if self._waiting.get(request.key) is request:  # nobody has forgotten it meanwhile
            try:
                request.grammar = self._grammar_of(request, text, output_ids)
            except GrammarError as error:
                problem = str(error)
            except BaseException:  # a panic of Rust is no Exception
                logger.exception("the grammar of request %s could not be compiled", request.request_id)
                problem = "the grammar could not be compiled"
        self._done.append(Compiled(request, problem))
        self.on_done()

    def _grammar_of(self, request: Request, text: str, output_ids: list[int]) -> Grammar:
        vocabulary = self._load()
        if vocabulary is None:
            raise GrammarError(self._trouble or "")
        params = request.params
        compiled = self._compiled(text, vocabulary)
        grammar = Grammar(
            compiled.template.deep_copy(),
            vocabulary,
            params,
            stop_ids=request.stop_ids,
            output_ids=output_ids,
            on_error=compiled.fail,
        )
        if params.allowed_token_ids is not None and grammar.mask(len(output_ids)) is None:
            raise GrammarError("none of allowed_token_ids may come next")
        return grammar

    def _compiled(self, text: str, vocabulary: Vocabulary) -> Cached:
        self._cache.discard_failed()
        self._limit_growth()
        compiled = self._cache.get(text)
        if compiled is None:
            began = time.perf_counter()
            compiled = Cached(compile_grammar(text, vocabulary))
            self._cache.put(text, compiled)
            milliseconds = (time.perf_counter() - began) * 1e3
            logger.debug("a grammar of %d characters took %.1f ms", len(text), milliseconds)
        return compiled

    def _limit_growth(self) -> None:
        """Drop all cached grammars if the process has grown too far since it had none."""
        size = private_memory()
        self._level = size if self._level is None else min(self._level, size)
        if size - self._level > MAX_GROWTH:
            self._cache.clear()
            return_freed_memory()
            self._level = private_memory()
            logger.debug("cached grammars dropped: %d MiB freed", (size - self._level) >> 20)

    def _load(self) -> Vocabulary | None:
        if self._vocabulary is None and self._trouble is None:
            try:
                self._vocabulary = load_vocabulary(
                    Path(self._info.directory), self._info.vocab_size, self._info.eos_token_ids
                )
            except GrammarError as error:
                self._trouble = str(error)
        return self._vocabulary


@dataclass
class Cached:
    """A compiled grammar, shared by all requests with the same text."""

    template: LLMatcher
    uses: int = 0
    has_failed: bool = False
    """Copies of the template share its lexer: a failure in one recurs in all."""

    def fail(self) -> None:
        """Mark the failure; may be called from any thread."""
        self.has_failed = True


class GrammarCache:
    """Cache of the grammars used last, bounded in number and size (pure)."""

    def __init__(self, most: int = CACHED_GRAMMARS, most_bytes: int = CACHED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Cached] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<GrammarCache of {len(self._kept)}, {self._bytes} bytes>"

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, text: str) -> Cached | None:
        """Cached grammar with this text that may be used once more, or None."""
        found = self._kept.get(text)
        if found is None:
            return None
        found.uses += 1
        if found.uses >= MAX_USES:
            self.discard(text)
            return None
        self._kept.move_to_end(text)
        return found

    def put(self, text: str, compiled: Cached) -> None:
        self.discard(text)
        self._kept[text] = compiled
        self._bytes += len(text)
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > 1):
            self.discard(next(iter(self._kept)))

    def discard(self, text: str) -> None:
        """Remove a grammar, if it is there."""
        if self._kept.pop(text, None) is not None:
            self._bytes -= len(text)

    def discard_failed(self) -> None:
        for text in [text for text, compiled in self._kept.items() if compiled.has_failed]:
            self.discard(text)

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0
