"""Bodies of pooled requests and answers, as six APIs have them.

TEI is text-embeddings-inference. Fields that are not known are ignored. Those that would change an answer
and are not built are here to be refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.openai_api import MOST, Int

Dimensions = Annotated[int, Meta(ge=1, le=MOST)]
TeiSide = Literal["Left", "Right", "left", "right"]
"""Side that ``truncate`` of TEI cuts."""


class PooledRequest(msgspec.Struct, kw_only=True):
    """What most bodies may have."""

    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    """Tokens to which inputs are cut; -1: to what the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """The side on which they are cut."""
    use_activation: bool | None = None
    """Whether labels and scores are probabilities, and embeddings have the length 1."""
    activation: bool | None = None
    """Older name of ``use_activation``, as the next."""
    softmax: bool | None = None
    padding: Literal["do_not_pad"] | None = None
    """Other values are refused."""


class InputsRequest(PooledRequest, kw_only=True):
    """What bodies with ``input`` may have."""

    input: Any
    """A text, token ids, or a list of either."""
    add_special_tokens: bool | None = None
    """False is refused for texts."""
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of numbers; all but float32 is refused in base64, as is ``big``."""
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None


class EmbeddingRequest(InputsRequest, kw_only=True):
    """Body of ``/v1/embeddings``."""

    prompt_name: str | None = None


class PoolingRequest(InputsRequest, kw_only=True):
    """Body of ``/pooling`` and ``/classify``; the latter has no ``encoding_format``."""

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None


class ScoringRequest(PooledRequest, kw_only=True):
    """What bodies of ``/score`` and ``/rerank`` may have."""

    max_tokens_per_query: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    """Tokens to which queries are cut, and so documents by the next; 0: not cut."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    instruction: str | None = None
    chat_template_kwargs: Any = None
    """Refused, as a template's arguments would change the text of a pair."""


class ScoreRequest(ScoringRequest, kw_only=True):
    """Body of ``/score``: one text and many, or as many of both."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Another name of ``text_1``, and the next two of ``text_2``."""
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Document(msgspec.Struct):
    text: str


class RerankRequest(ScoringRequest, kw_only=True):
    """Body of ``/rerank``: with ``documents`` in Cohere's and Jina's words, with ``texts`` in TEI's."""

    query: str
    documents: list[str | Document] | None = None
    top_n: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    """Documents that are answered; 0: all."""
    return_documents: bool | None = None
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: TeiSide | None = None


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of ``/v2/embed``."""

    model: str | None = None
    texts: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    """Tokens to which texts are cut; where ``truncate`` is NONE longer ones are refused."""
    images: Any = None
    """Not supported, as the next."""
    inputs: Any = None


class TeiRequest(msgspec.Struct, kw_only=True):
    """Body of ``/embed``, ``/predict``."""

    inputs: Any
    truncate: bool | None = None
    truncation_direction: TeiSide | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Dimensions | None = None
    raw_scores: bool | None = None


class SentencePairs(msgspec.Struct):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct):
    truncate: bool | None = None
    truncation_direction: TeiSide | None = None
    prompt_name: str | None = None


class SimilarityRequest(msgspec.Struct, kw_only=True):
    """Body of ``/similarity``."""

    inputs: SentencePairs
    parameters: SimilarityParameters | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of ``/api/embed``, and of the older ``/api/embeddings`` with ``prompt``."""

    model: str | None = None
    input: Any = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: Any = None
    keep_alive: Any = None


# ---- answers


class PooledUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class PooledItem(msgspec.Struct, kw_only=True):
    """One answer: which field it has depends on the endpoint."""

    index: int
    object: str
    embedding: list[float] | str | UnsetType = UNSET
    data: Any = UNSET
    score: float | UnsetType = UNSET
    label: str | UnsetType = UNSET
    probs: list[float] | UnsetType = UNSET
    num_classes: int | UnsetType = UNSET


class PooledList(msgspec.Struct, kw_only=True, tag_field="object", tag="list"):
    """Answers of the endpoints of OpenAI and vLLM."""

    id: str
    created: int
    model: str
    data: list[PooledItem]
    usage: PooledUsage


class Billed(msgspec.Struct):
    input_tokens: int


class CohereVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class CohereMeta(msgspec.Struct):
    billed_units: Billed
    api_version: CohereVersion = CohereVersion()


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RankedList(msgspec.Struct, kw_only=True):
    """Answer of ``/rerank`` in Cohere's and Jina's words, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
    meta: CohereMeta


class CohereEmbeddings(msgspec.Struct, kw_only=True, rename={"floats": "float"}):
    floats: list[list[float]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereEmbedded(msgspec.Struct, kw_only=True, tag_field="response_type", tag="embeddings_by_type"):
    """Answer of ``/v2/embed``."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta


class TeiRank(msgspec.Struct):
    index: int
    score: float
    text: str | UnsetType = UNSET


class TeiLabel(msgspec.Struct):
    score: float
    label: str


class OllamaEmbedded(msgspec.Struct):
    """Answer of ``/api/embed``."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    """Answer of ``/api/embeddings``."""

    embedding: list[float]
