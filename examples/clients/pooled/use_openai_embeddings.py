"""The ``openai`` package with a pooling model: embeddings as floats and base64, dimensions, ids, errors."""

from __future__ import annotations

import importlib.metadata

import checks
import openai
from checks import check

MODEL = checks.model()
client = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)
TEXTS = ["w10 w11 w12", "w13", "w14 w15"]


@check
def floats_and_base64_are_the_same() -> None:
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=TEXTS)  # the package asks for base64
    assert [each.index for each in plain.data] == [0, 1, 2] and plain.usage.prompt_tokens == 12
    for one, other in zip(plain.data, packed.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6


@check
def a_text_alone_has_the_same_embedding() -> None:
    together = client.embeddings.create(model=MODEL, input=TEXTS).data[1].embedding
    assert client.embeddings.create(model=MODEL, input=TEXTS[1]).data[0].embedding == together
    ids = client.embeddings.create(model=MODEL, input=[[2, 13, 3]]).data[0].embedding
    assert ids == together


@check
def errors() -> None:
    for fields in ({"input": []}, {"input": "w10", "dimensions": 7}, {"input": "w10 " * 9000}):
        try:
            client.embeddings.create(model=MODEL, **fields)
        except openai.BadRequestError:
            continue
        raise AssertionError(fields)


checks.run(f"openai {importlib.metadata.version('openai')}")
