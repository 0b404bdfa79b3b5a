"""What goes along with each try of a request."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.pooled_model import PoolingTask
from engine.messages import Delta, FinishReason, Submit
from engine.pooling_params import Pooled, PoolingParams
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from router.dispatch.ledger import Entry, Ledger
from router.mesh import Prompt

PROMPT = Prompt(
    request_id="r",
    prompt_ids=[1, 2, 3],
    params=SamplingParams(temperature=0.5),
    seed=9,
    sample_index=2,
    priority=-4,
    cache_salt="tenant",
    adapter="5c",
    traceparent="00-1-2-01",
    scored_from=1,
    routed_experts=True,
    background=True,
    images=(PromptImage(1, 2, b"p" * 16),),
    pooling=PoolingParams(PoolingTask.EMBED, dimensions=8),
)
SHARED = [each.name for each in msgspec.structs.fields(Submit) if each.name in Prompt.__struct_fields__]


@pytest.mark.parametrize("name", SHARED)
def test_each_try_has_what_the_request_came_with(name: str) -> None:
    ledger, entry = Ledger(), Entry(PROMPT)
    ledger.place(entry, "a", 1)
    assert getattr(entry.submit(1), name) == getattr(PROMPT, name)
    ledger.book(entry, Delta(1, [10]))
    ledger.place(entry, "b", 7)
    assert getattr(entry.submit(7), name) == getattr(PROMPT, name)


def test_what_is_compared_is_given() -> None:
    assert len(SHARED) >= 9
    defaults = {each.name: each.default for each in msgspec.structs.fields(Prompt)}
    assert all(getattr(PROMPT, name) != defaults[name] for name in SHARED)


def test_a_pooled_request_is_asked_again_and_answered_once() -> None:
    ledger, entry = Ledger(), Entry(PROMPT)
    ledger.place(entry, "a", 1)
    first = entry.submit(1)
    ledger.place(entry, "b", 7)  # a died
    assert entry.submit(7) == msgspec.structs.replace(first, request=7)
    assert ledger.find("a", 1) is None  # what it may still send is dropped
    answer = Delta(7, [], FinishReason.STOP, pooled=Pooled(bytes(8), (2,)))
    found = ledger.find("b", 7)
    assert found is entry
    assert ledger.book(found, answer).pooled == answer.pooled
    assert ledger.find("b", 7) is None
    assert len(ledger) == 0
