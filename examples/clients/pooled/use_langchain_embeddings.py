"""``langchain-openai`` and ``langchain-cohere`` with a pooling model: embeddings and ranks."""

from __future__ import annotations

import importlib.metadata

import checks
from checks import check
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

MODEL = checks.model()
TEXTS = ["w10 w11 w12", "w13", "w14 w15"]
embeddings = OpenAIEmbeddings(
    model=MODEL, base_url=f"{checks.URL}/v1", api_key=checks.KEY, check_embedding_ctx_length=False
)


@check
def documents_and_queries() -> None:
    found = embeddings.embed_documents(TEXTS)
    assert embeddings.embed_query(TEXTS[1]) == found[1]


@check
def a_store_finds_the_text_itself() -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    assert store.similarity_search(TEXTS[2], k=1)[0].page_content == TEXTS[2]


@check
def ranks() -> None:
    ranker = CohereRerank(model=MODEL, cohere_api_key=checks.KEY, base_url=checks.URL, top_n=1)
    (best,) = ranker.rerank([Document(each) for each in TEXTS], TEXTS[0])
    assert best["index"] == 0


checks.run(f"langchain-openai {importlib.metadata.version('langchain-openai')}")
