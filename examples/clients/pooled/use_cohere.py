"""The ``cohere`` package: embeddings by version 2, ranks, errors."""

from __future__ import annotations

import importlib.metadata

import checks
import cohere
from checks import check

MODEL = checks.model()
client = cohere.ClientV2(api_key=checks.KEY, base_url=checks.URL)
TEXTS = ["w10 w11 w12", "w13", "w14 w15"]


@check
def embeddings() -> None:
    found = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"])
    assert found.embeddings.float_ is not None and len(found.embeddings.float_) == 3
    (alone,) = client.embed(
        model=MODEL, texts=TEXTS[:1], input_type="search_document", embedding_types=["float"]
    ).embeddings.float_
    assert alone == found.embeddings.float_[0]


@check
def ranks() -> None:
    found = client.rerank(model=MODEL, query=TEXTS[1], documents=TEXTS, top_n=2).results
    assert found[0].index == 1 and len(found) == 2
    assert found[0].relevance_score >= found[1].relevance_score


@check
def errors() -> None:
    try:
        client.embed(model="none", texts=TEXTS, input_type="clustering", embedding_types=["float"])
    except cohere.errors.NotFoundError:
        return
    raise AssertionError("a model that is not there")


checks.run(f"cohere {importlib.metadata.version('cohere')}")
