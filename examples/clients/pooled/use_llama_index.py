"""``llama-index`` with a pooling model: embeddings by its class for servers like OpenAI's."""

from __future__ import annotations

import importlib.metadata

import checks
from checks import check
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = ["w10 w11 w12", "w13", "w14 w15"]
model = OpenAILikeEmbedding(
    model_name=checks.model(), api_base=f"{checks.URL}/v1", api_key=checks.KEY, embed_batch_size=2
)


@check
def batches_and_queries() -> None:
    found = model.get_text_embedding_batch(TEXTS)
    assert len(found) == 3 and model.get_query_embedding(TEXTS[2]) == found[2]


PACKAGE = "llama-index-embeddings-openai-like"
checks.run(f"{PACKAGE} {importlib.metadata.version(PACKAGE)}")
