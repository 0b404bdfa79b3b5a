"""Grammars in the engine: samples follow them, in any layout.

They hold over preemption, reruns and resumption.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from engine.compute.logits_backend import SampleRow
from engine.compute.sampler import Sampler
from engine.compute.token_rules import TokenRules
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.messages import FinishReason, Submit
from engine.model.checkpoint import ModelInfo, read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from engine.scheduling.grammar import Grammar, GrammarError, Vocabulary, compile_grammar, load_vocabulary
from engine.scheduling.grammar_compiler import Cached, GrammarCache
from engine.speculation.speculation import Speculation
from engine.step import StepResult
from parallel.communicators.base import CollectiveError
from router.structured_config import StructuredOutputsConfig
from router.turns.structured import ANSWER, json_body, text_of
from tests.engine.model.sharding.test_sharding import LAYERS, LAYOUTS, settings
from tests.engine.oracle import Oracle, knowing
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import make_tiny_model
from tests.router.tiny_tokenizer import byte_level

PEER = b"router"
VOCAB = 403
"""More than the tokenizer has, and no multiple of 8 or of the ranks."""
EOS = 1

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def lark(text: str) -> str:
    return text_of({ANSWER: {"lark_grammar": text}})


JSON = text_of({ANSWER: json_body(SCHEMA, StructuredOutputsConfig())})
LOOP = {"$ref": "#/$defs/a"}
PLATE = lark(r"start: /[A-Z]{3}-[0-9]{4}/")
COLOUR = lark('start: "red" | "green" | "dark blue"')
LETTERS = lark("start: /[a-z]+/")


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CHECKS: dict[str | None, Callable[[str], Any]] = {
    JSON: is_json,
    PLATE: re.compile(r"[A-Z]{3}-[0-9]{4}").fullmatch,
    COLOUR: {"red", "green", "dark blue"}.__contains__,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a byte-level tokenizer."""
    made = make_tiny_model(tmp_path_factory.mktemp("grammar"), "qwen3", layers=LAYERS, vocab_size=VOCAB)
    byte_level().save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def alone(directory: Path) -> UniExecutor:
    executor = UniExecutor(settings(directory), read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    return executor


@pytest.fixture(scope="module")
def vocabulary(directory: Path) -> Vocabulary:
    return load_vocabulary(directory, VOCAB, [EOS])


def requests() -> list[Submit]:
    """Grammars of every kind beside requests without.

    Requests are greedy, sampled, truncated, penalised, or with log-probabilities; some want more tokens than
    their grammar has.
    """
    kinds: list[dict[str, Any]] = [
        {"grammar": JSON},
        {"grammar": JSON, "top_k": 7, "logprobs": 2},
        {"grammar": PLATE, "temperature": 0.0},
        {"grammar": COLOUR, "min_tokens": 60},
        {"grammar": JSON, "repetition_penalty": 1.2, "top_p": 0.9},
        {"grammar": PLATE, "ignore_eos": True, "logit_bias": {EOS: 50.0}},
        {"max_tokens": 12, "ignore_eos": True},
    ]
    rng = random.Random(5)
    return [
        Submit(
            request=index,
            request_id=str(index),
            prompt_ids=[rng.randrange(4, 380) for _ in range(rng.randrange(1, 60))],
            params=SamplingParams(**({"max_tokens": 200} | kinds[index % len(kinds)])),
            seed=index,
        )
        for index in range(14)
    ]


def core_of(
    executor: Any,
    directory: Path,
    *,
    num_blocks: int = 400,
    budget: int = 512,
    speculation: Speculation | None = None,
) -> EngineCore:
    executor.allocate(num_blocks)
    return EngineCore(
        settings(directory, budget),
        read_model_info(directory),
        executor,
        num_blocks=num_blocks,
        max_model_len=512,
        speculation=speculation,
    )


def run(core: EngineCore, submits: Sequence[Submit]) -> dict[int, list[int]]:
    """Output ids of all requests, each of which must end by itself."""
    outputs: dict[int, list[int]] = {submit.request: list(submit.output_ids) for submit in submits}
    reasons = {}
    for submit in submits:
        assert core.submit(PEER, submit) is None
    deadline = time.monotonic() + 120
    while not core.is_empty:
        assert time.monotonic() < deadline
        assert core.take_ready() == []
        if not core.has_work:
            time.sleep(0.001)
            continue
        try:
            deltas = core.step().get(PEER, [])
        except CollectiveError:
            continue
        for delta in deltas:
            outputs[delta.request] += delta.token_ids
            reasons[delta.request] = delta.finish_reason
    for submit in submits:
        wanted = FinishReason.STOP if submit.params.grammar else FinishReason.LENGTH
        assert reasons[submit.request] is wanted, submit
    assert core.reports.report(0, 0).blocks_used == 0
    return outputs


@pytest.fixture(scope="module")
def undisturbed(alone: UniExecutor, directory: Path) -> dict[int, list[int]]:
    return run(core_of(alone, directory), requests())


def test_outputs_follow_their_grammars(undisturbed: dict[int, list[int]], tokenizer: Tokenizer) -> None:
    for submit in requests():
        if submit.params.grammar is not None:
            *ids, last = undisturbed[submit.request]
            assert last == EOS
            assert CHECKS[submit.params.grammar](tokenizer.decode(ids)), tokenizer.decode(ids)
    assert len({tuple(ids) for ids in undisturbed.values()}) > 10, "nearly all the same proves nothing"


def oracle(submits: Sequence[Submit], outputs: dict[int, list[int]]) -> Oracle:
    """Drafts of these outputs, one token in five of which is wrong."""
    texts = [[*each.prompt_ids, *outputs[each.request]] for each in submits]
    return Oracle(knowing(texts), right=0.8)


@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2"])
def test_any_layout_gives_the_same(layout: str, directory: Path, undisturbed: dict[int, list[int]]) -> None:
    info, cut = read_model_info(directory), LAYOUTS[layout]
    executor = ThreadedShards(
        settings(directory), info, tp=cut.tp, pp=cut.pp, split=cut.split, depth=cut.depth
    )
    executor.load(lambda _phase: None)
    some = requests()[:7]
    expected = {submit.request: undisturbed[submit.request] for submit in some}
    assert run(core_of(executor, directory), some) == expected
    drafting = core_of(executor, directory, speculation=oracle(some, expected))
    assert run(drafting, some) == expected
    assert sum(drafting.scheduler.counters().taken_by_place) > 100
    executor.close()


def test_preemption_and_chunks_change_nothing(
    alone: UniExecutor, directory: Path, undisturbed: dict[int, list[int]]
) -> None:
    core = core_of(alone, directory, num_blocks=70, budget=24)
    assert run(core, requests()) == undisturbed
    assert core.reports.report(0, 0).counters.preemptions > 0, (
        "the cache was not small enough to prove anything"
    )


def test_resumed_anywhere_is_undisturbed(
    alone: UniExecutor, directory: Path, undisturbed: dict[int, list[int]]
) -> None:
    core = core_of(alone, directory)
    for share in (0.3, 0.99):
        resumed = []
        for submit in requests():
            ids = undisturbed[submit.request]
            resumed.append(msgspec.structs.replace(submit, output_ids=ids[: int(len(ids) * share)]))
        assert run(core, resumed) == undisturbed


class Troubled:
    """Stepping that now and then loses its peers when a step is all but done."""

    def __init__(self, executor: UniExecutor) -> None:
        self._executor = executor
        self._rng = random.Random(1)
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def finish(self) -> StepResult:
        result = self._executor.finish()
        if self._rng.random() < 0.4:
            self.failures += 1
            raise CollectiveError("a peer is lost")
        return result


def test_a_step_run_again_gives_the_same(
    alone: UniExecutor, directory: Path, undisturbed: dict[int, list[int]]
) -> None:
    troubled = Troubled(alone)
    assert run(core_of(troubled, directory), requests()) == undisturbed
    drafts = oracle(requests(), undisturbed)
    assert run(core_of(troubled, directory, speculation=drafts), requests()) == undisturbed
    assert troubled.failures > 20


# ---- compiling beside the steps


def test_others_run_while_a_grammar_is_compiled(alone: UniExecutor, directory: Path) -> None:
    core = core_of(alone, directory)
    go_on = threading.Event()
    core.grammars._thread.submit(lambda: go_on.wait(60))
    waits, leaves, runs = requests()[0], requests()[1], requests()[6]
    for submit in (waits, leaves, runs):
        assert core.submit(PEER, submit) is None
    assert core.submit(PEER, waits) is not None, "known though it waits"
    tokens = 0
    while core.has_work:
        assert core.take_ready() == []
        tokens += len(core.step().get(PEER, []))
    assert tokens == 12
    assert not core.is_empty
    assert core.reports.report(0, 0).waiting == 2
    core.abort(PEER, [leaves.request])
    assert core.reports.report(0, 0).waiting == 1
    go_on.set()
    run_to_end(core)
    assert core.abort_all(PEER) == 0
    assert core.reports.report(0, 0).waiting == core.reports.report(0, 0).running == 0


def run_to_end(core: EngineCore) -> None:
    deadline = time.monotonic() + 60
    while not core.is_empty:
        assert time.monotonic() < deadline
        core.take_ready()
        core.step()
        time.sleep(0.0005)


def refusal(core: EngineCore, grammar: str) -> str:
    params = SamplingParams(grammar=grammar)
    assert core.submit(PEER, Submit(1, "r", [5], params, 0)) is None
    deadline = time.monotonic() + 60
    while not (refused := core.take_ready()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    ((_, told),) = refused
    assert told.request == 1
    assert not told.retry
    assert core.is_empty
    return told.reason


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("{", "EOF while parsing"),
        (lark("start: /(/"), "invalid regex"),
        (lark('start: <nothing> "x"'), 'unknown special token: "<nothing>"'),
        (text_of({ANSWER: {"json_schema": {"type": "str"}}}), "Invalid type: str"),
        (
            text_of({ANSWER: {"json_schema": {"$defs": {"a": {"allOf": [LOOP]}}, **LOOP}}}),
            "no answer can follow",
        ),
    ],
)
def test_wrong_grammars_are_refused(alone: UniExecutor, directory: Path, grammar: str, reason: str) -> None:
    assert reason in refusal(core_of(alone, directory), grammar)


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        load_vocabulary(tmp_path, VOCAB, [EOS])
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        load_vocabulary(tmp_path, VOCAB, [])
    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))  # type: ignore[call-arg]
    words.decoder = decoders.WordPiece()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(GrammarError, match="the model's tokenizer cannot be used"):
        load_vocabulary(tmp_path, VOCAB, [EOS])


def test_without_a_tokenizer_the_rest_works(tmp_path: Path, alone: UniExecutor, directory: Path) -> None:
    core = core_of(alone, directory)
    info: ModelInfo = msgspec.structs.replace(read_model_info(directory), directory=str(tmp_path))
    core.grammars._info = info
    assert "no tokenizer.json" in refusal(core, JSON)
    run(core, [requests()[6]])


def test_the_cache_is_bounded(vocabulary: Vocabulary) -> None:
    cache = GrammarCache(most=3, most_bytes=10_000)
    texts = [lark(f'start: "{word}"') for word in ("a", "b", "c", "d")]
    for text in texts:
        cache.put(text, Cached(compile_grammar(text, vocabulary)))
        assert cache.get(texts[0]) is not None, "what is used stays"
    assert [text for text in texts if cache.get(text)] == [texts[0], *texts[2:]]
    long = lark('start: "' + "x" * 11_000 + '"')
    cache.put(long, Cached(compile_grammar(long, vocabulary)))
    assert len(cache) == 1


# ---- one grammar


def grammar_of(
    text: str,
    vocabulary: Vocabulary,
    *,
    stop_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    **params: Any,
) -> Grammar:
    return Grammar(
        compile_grammar(text, vocabulary),
        vocabulary,
        SamplingParams(**params),
        stop_ids=stop_ids,
        output_ids=output_ids,
    )


def tokens_of(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


def test_a_grammar_that_is_too_complex_is_said_to_be() -> None:
    """Its beginning compiles; what may come next is more than can be worked out."""
    directory = find_model(None)
    info = read_model_info(directory)
    vocabulary = load_vocabulary(directory, info.vocab_size, info.eos_token_ids)
    grammar = grammar_of(lark("start: /a{1000000}/"), vocabulary)
    (first,) = tokens_of(grammar.mask(0))
    assert "its grammar is too complex (too many" in (grammar.take(first) or "")


def test_looking_changes_nothing(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    grammar = grammar_of(PLATE, vocabulary)
    assert len({grammar.mask(0) for _ in range(3)}) == 1
    assert all(token < VOCAB for token in tokens_of(grammar.mask(0)))
    assert grammar.take(tokenizer.token_to_id("A")) is None
    assert grammar.mask(1) is not None
    assert "does not follow" in (grammar.take(tokenizer.token_to_id("0")) or "")
    assert grammar.mask(1) is None, "what has failed stays so"


def test_a_draft_is_followed_as_far_as_the_grammar_allows(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    grammar = grammar_of(PLATE, vocabulary)
    ids = [tokenizer.token_to_id(each) for each in "ABC-1234"]
    assert grammar.follow([*ids[:3], ids[1], *ids], 0) == 3
    masks = grammar.draft_masks
    assert masks[0] == grammar.mask(0), "the answer itself has not moved"
    for count, token_id in enumerate(ids[:3], 1):
        assert grammar.take(token_id) is None
        assert grammar.mask(count) == masks[count]
    assert grammar.follow([ids[0]], 3) == 0
    assert grammar.follow([*ids[3:], EOS, EOS], 3) == 5
    assert tokens_of(grammar.draft_masks[-1]) == [EOS]


def test_ends_that_are_not_wanted(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    stop = tokenizer.token_to_id("b")
    wishes: list[dict[str, Any]] = [{"min_tokens": 3, "stop_ids": [EOS, stop]}, {"ignore_eos": True}]
    for options in wishes:
        grammar = grammar_of(LETTERS, vocabulary, **options)
        assert grammar.take(tokenizer.token_to_id("a")) is None
        found = tokens_of(grammar.mask(1))
        assert EOS not in found
        assert (stop in found) == ("min_tokens" not in options)
        only = grammar_of(lark('start: "a"'), vocabulary, **options)
        assert only.take(tokenizer.token_to_id("a")) is None
        assert tokens_of(only.mask(1)) == [EOS], "nothing else can follow"
        assert not only.ended
        assert only.take(EOS) is None
        assert only.ended
    assert EOS in tokens_of(grammar_of(LETTERS, vocabulary, output_ids=[tokenizer.token_to_id("a")]).mask(1))


def test_allowed_tokens_narrow_a_grammar(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    a, digit = tokenizer.token_to_id("a"), tokenizer.token_to_id("7")
    assert tokens_of(grammar_of(LETTERS, vocabulary, allowed_token_ids=[a, digit]).mask(0)) == [a]
    nothing = grammar_of(LETTERS, vocabulary, allowed_token_ids=[digit])
    assert nothing.mask(0) is None
    assert "none of allowed_token_ids may follow" in (nothing.take(digit) or "")
    with pytest.raises(GrammarError, match="does not follow"):
        grammar_of(LETTERS, vocabulary, output_ids=[digit])


def test_bad_words_that_leave_nothing_are_named(
    alone: UniExecutor, directory: Path, tokenizer: Tokenizer
) -> None:
    core, errors = core_of(alone, directory), []
    words = tuple((tokenizer.token_to_id(each),) for each in "ab")
    params = SamplingParams(max_tokens=4, temperature=0.0, grammar=lark("start: /[ab]/"), bad_words=words)
    assert core.submit(PEER, Submit(1, "r", [5], params, 0)) is None
    deadline = time.monotonic() + 60
    while not core.is_empty:
        assert time.monotonic() < deadline
        assert core.take_ready() == []
        errors += [delta.error for delta in core.step().get(PEER, []) if delta.error] if core.has_work else []
    assert errors == ["the structured output cannot go on: bad_words exclude every token that may come next"]


@pytest.mark.parametrize("first", [0, 8, 101, 202])
def test_masks_of_a_part_of_the_vocabulary(first: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    vocabulary = Vocabulary.__new__(Vocabulary)
    vocabulary.num_bytes = -(-VOCAB // 8)
    kept = [[1, 7, 8, 100, 101, 402], None, list(range(0, VOCAB, 3))]
    rows = []
    for ids in kept:
        mask = None if ids is None else vocabulary.bits_of(ids)
        token_ids = torch.arange(4).numpy()
        rows.append(SampleRow(SamplingParams(), 0, 4, token_ids, 2, TokenRules(SamplingParams()), mask))
    shaped = Sampler(logits.device).shape(logits[:, first : first + 101], rows, first)
    for row, ids in enumerate(kept):
        wanted = [first + at for at in range(101) if ids is None or first + at in ids]
        assert (torch.isfinite(shaped[row]).nonzero()[:, 0] + first).tolist() == wanted
        assert shaped[row, [each - first for each in wanted]].equal(logits[row, wanted])
