"""``haystack-ai`` with a pooling model: its embedders for texts and documents."""

from __future__ import annotations

import importlib.metadata

import checks
from checks import check
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret

TEXTS = ["w10 w11 w12", "w13", "w14 w15"]
PLACE = {
    "model": checks.model(),
    "api_base_url": f"{checks.URL}/v1",
    "api_key": Secret.from_token(checks.KEY),
}


@check
def documents_and_a_text() -> None:
    documents = OpenAIDocumentEmbedder(**PLACE, progress_bar=False).run([Document(content=x) for x in TEXTS])
    query = OpenAITextEmbedder(**PLACE).run(TEXTS[1])
    assert query["embedding"] == documents["documents"][1].embedding


checks.run(f"haystack-ai {importlib.metadata.version('haystack-ai')}")
