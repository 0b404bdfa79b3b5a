"""Compiled grammars are kept for other requests, within bounds: no client's grammar stays for good."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from coordinator.own_memory import private_memory
from engine.host import deep_thread
from engine.host.memory import return_freed_memory
from engine.model.checkpoint import ModelInfo, read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from engine.scheduling import grammar_compiler
from engine.scheduling.grammar import Grammar
from engine.scheduling.grammar_compiler import GrammarCompiler
from engine.scheduling.request import Request
from router.turns.structured import ANSWER, text_of
from tests.nightly import NIGHTLY
from tests.waiting import until

MOST_BYTES = 300 << 20
NUM_REQUESTS = 300 if NIGHTLY else 100
EOS = 2


def hungry(index: int) -> str:
    """A short grammar whose number of states grows as an answer goes on."""
    return text_of({ANSWER: {"lark_grammar": f"start: /(.*a.{{0,300}}b.{{0,200}}c){{40}}{index}/"}})


class Instance:
    """The part of an instance that handles grammars."""

    def __init__(self, info: ModelInfo) -> None:
        gc.collect()  # memory that earlier tests left would hide what this one adds
        return_freed_memory()
        self.compiler = GrammarCompiler(info)
        self.num_begun = 0

    def begin(self, text: str) -> Grammar:
        self.num_begun += 1
        request = Request(
            key=(b"router", self.num_begun),
            request_id=str(self.num_begun),
            params=SamplingParams(max_tokens=1000),
            seed=0,
            token_ids=[5],
            num_prompt=1,
            stop_ids=frozenset(),
            barred_ids=frozenset(),
            max_output=1000,
            num_emitted=0,
            arrival=self.num_begun,
        )
        self.compiler.begin(request, text)
        ready = []
        until(lambda: ready.extend(self.compiler.take()) or ready)
        assert ready[0].problem is None
        assert request.grammar is not None
        return request.grammar


def answer(grammar: Grammar, num_tokens: int) -> int:
    """Number of random tokens that follow a grammar before it fails."""
    rng = np.random.default_rng(0)
    for index in range(num_tokens):
        mask = grammar.mask(index)
        if mask is None:
            return index
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if grammar.take(int(rng.choice(allowed[allowed != EOS]))) is not None:
            return index
    return num_tokens


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return read_model_info(find_model(None))


def test_hungry_grammars_leave_little_behind(info: ModelInfo) -> None:
    """Each takes megabytes as its answer goes on; 100 of them would take 700."""
    instance = Instance(info)
    answer(instance.begin(hungry(-1)), 10)
    return_freed_memory()
    before = most = private_memory()
    for index in range(NUM_REQUESTS):
        answer(instance.begin(hungry(index)), 50)
        most = max(most, private_memory())
    assert most - before < MOST_BYTES


def test_what_grows_is_dropped_and_given_back(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance(info)
    answer(instance.begin(hungry(0)), 10)
    return_freed_memory()
    before = private_memory()
    for index in range(8):
        answer(instance.begin(hungry(index)), 50)
    grown = private_memory()
    assert grown - before > 16 << 20, "nothing grew here"
    monkeypatch.setattr(grammar_compiler, "MAX_GROWTH", 1 << 20)
    instance.begin(hungry(8))
    assert len(instance.compiler._cache) == 1
    assert private_memory() < (before + grown) / 2, "the larger part has come back, whatever else runs here"


def test_a_grammar_that_failed_is_compiled_anew(info: ModelInfo) -> None:
    """Copies share the library's lexer, and with it the failure."""
    instance = Instance(info)
    failed_at = answer(instance.begin(hungry(0)), 1000)
    assert 0 < failed_at < 1000
    assert answer(instance.begin(hungry(0)), 1000) == failed_at
    instance.begin(hungry(1))
    assert list(instance.compiler._cache._kept) == [hungry(1)], "what failed is not kept"


def test_a_grammar_is_compiled_anew_after_many_uses(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_USES", 3)
    instance = Instance(info)
    templates = set()
    kept = []
    for _ in range(6):
        instance.begin(hungry(0))
        (cached,) = instance.compiler._cache._kept.values()
        kept.append(cached.template)
        templates.add(id(cached.template))
    assert len(templates) == 2


def test_an_idle_instance_looks_at_its_memory(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_thread, "IDLE", 0.2)
    instance = Instance(info)
    answer(instance.begin(hungry(0)), 50)
    monkeypatch.setattr(grammar_compiler, "MAX_GROWTH", 1 << 20)
    until(lambda: not len(instance.compiler._cache))
    assert answer(instance.begin(hungry(0)), 10) == 10


def test_memory_of_this_process_is_read() -> None:
    status = Path("/proc/self/status").read_text()
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) << 10
    assert abs(private_memory() - anonymous) < 16 << 20
