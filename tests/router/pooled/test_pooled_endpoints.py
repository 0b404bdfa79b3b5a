"""Endpoints of pooling models: fields and shapes of each API, over a scripted mesh."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import msgspec
import openai
import pytest

from coordinator.pooled_model import PooledModel, PoolingTask
from engine.messages import Delta, FinishReason
from engine.pooling_params import Pooled
from router.config import HttpConfig
from router.launcher.serve import first_request
from router.mesh import MeshError, Prompt, ServedModel
from router.pooled import scoring
from router.pooled.scoring import shortened
from router.text.text_model import TextModel
from router.text.tokens import Tokenizer
from tests.router.conftest import JSON, Server, serving
from tests.router.fake_mesh import FakeMesh, failing, saying

EMBEDDER = PooledModel(
    tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
    dimensions=4,
    matryoshka=(2,),
    prompts={"query": "Q: ", "passage": "P: "},
    normalizes=True,
)
RERANKER = PooledModel(
    tasks=(PoolingTask.SCORE, PoolingTask.CLASSIFY), labels=("LABEL_0",), takes_pairs=True, has_segments=True
)
CLASSIFIER = PooledModel(tasks=(PoolingTask.CLASSIFY,), labels=("no", "yes"))


def pooled(*values: float, shape: tuple[int, ...] | None = None) -> list[Delta]:
    answer = Pooled(array("f", values).tobytes(), shape or (len(values),))
    return [Delta(1, [], FinishReason.STOP, pooled=answer)]


def vector(prompt: Prompt) -> list[float]:
    """An embedding by which its input is known."""
    assert prompt.pooling is not None
    length = prompt.pooling.dimensions or 4
    return [float(sum(prompt.prompt_ids)), float(len(prompt.prompt_ids)), 1.5, -1.0][:length]


def script(prompt: Prompt) -> list[Delta]:
    """Answers of each task, all made of the input's tokens."""
    assert prompt.pooling is not None
    match prompt.pooling.task:
        case PoolingTask.EMBED:
            return pooled(*vector(prompt))
        case PoolingTask.TOKEN_EMBED:
            count = len(prompt.prompt_ids)
            return pooled(*(float(i) for i in range(4 * count)), shape=(count, 4))
        case PoolingTask.SCORE:
            return pooled(len(prompt.prompt_ids) / 100)
        case _:
            return pooled(0.25, 0.75)


@contextlib.contextmanager
def pooling(served: ServedModel, model: PooledModel) -> Iterator[Server]:
    with serving(FakeMesh(msgspec.structs.replace(served, pooling=model), script), HttpConfig()) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def shared_embedder(served: ServedModel) -> Iterator[Server]:
    with pooling(served, EMBEDDER) as server:
        yield server


@pytest.fixture
def embedder(shared_embedder: Server) -> Iterator[Server]:
    shared_embedder.mesh.reset(script)
    yield shared_embedder
    shared_embedder.wait_until_idle()


@pytest.fixture(scope="module")
def reranker(served: ServedModel) -> Iterator[Server]:
    with pooling(served, RERANKER) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(served: ServedModel) -> Iterator[Server]:
    with pooling(served, CLASSIFIER) as server:
        yield server


def good(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(server: Server) -> list[list[float]]:
    """Embeddings of all inputs that the mesh was asked for, in order."""
    asked = server.mesh.prompts
    return [vector(each) for each in sorted(asked, key=lambda each: int(each.request_id.rpartition("-")[2]))]


def test_embeddings_with_the_openai_client(embedder: Server) -> None:
    """It asks for base64 unless told otherwise."""
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        for kind in ({}, {"encoding_format": "float"}):
            embedder.mesh.reset(script)
            inputs = ["Hello", "Hello world", "a"]
            found = client.embeddings.create(model="tiny", input=inputs, **kind)
            assert [each.embedding for each in found.data] == vectors(embedder)
            assert [each.index for each in found.data] == [0, 1, 2]
            num_tokens = sum(len(each.prompt_ids) for each in embedder.mesh.prompts)
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)
        short = client.embeddings.create(model="tiny", input="Hello", dimensions=2)
        assert len(short.data[0].embedding) == 2
        ids = client.embeddings.create(model="tiny", input=[[65, 66], [67]])
        assert [each.embedding[:2] for each in ids.data] == [[131, 2], [67, 1]]
        assert client.embeddings.create(model="tiny", input=[65, 66]).data[0].embedding[1] == 2
        with pytest.raises(openai.BadRequestError, match="4"):
            client.embeddings.create(model="tiny", input="Hello", dimensions=3)


@pytest.mark.parametrize("kind", ["embedder", "reranker", "classifier"])
def test_what_serve_prints_to_try_is_answered(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    path, body = first_request("tiny", {"embedder": EMBEDDER, "reranker": RERANKER}.get(kind, CLASSIFIER))
    assert good(server.post(path, json.loads(body)))["data"]


def test_a_large_batch_comes_together_in_order(embedder: Server) -> None:
    ids = [[1 + index % 400] * (1 + index % 3) for index in range(2048)]
    found = good(embedder.post("/v1/embeddings", {"input": ids}))
    assert [each["embedding"][:2] for each in found["data"]] == [[sum(each), len(each)] for each in ids]
    assert len(embedder.mesh.prompts) == 2048, "each was asked for once"
    assert len({each.request_id for each in embedder.mesh.prompts}) == 2048


def test_prompts_go_before_texts(embedder: Server, tokenizer: Tokenizer) -> None:
    good(embedder.post("/v1/embeddings", {"input": "Hello", "prompt_name": "query"}))
    assert tokenizer.decode(embedder.mesh.prompts[-1].prompt_ids).endswith("Q: Hello")
    good(embedder.post("/v2/embed", {"texts": ["Hello"], "input_type": "search_document"}))
    assert tokenizer.decode(embedder.mesh.prompts[-1].prompt_ids).endswith("P: Hello")


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_too_long_is_cut_where_that_is_asked_for(
    embedder: Server, tokenizer: Tokenizer, side: str
) -> None:
    long = " a b c d" * 100
    answer = embedder.post("/v1/embeddings", {"input": ["a", long]})
    assert answer.status_code == 400
    assert "input[1]" in answer.json()["error"]["message"]
    whole = tokenizer.encode(long, add_special_tokens=False)
    fields = {"truncate_prompt_tokens": 10, "truncation_side": side}
    good(embedder.post("/v1/embeddings", {"input": [long], **fields}))
    first, *ids = embedder.mesh.prompts[-1].prompt_ids
    assert tokenizer.decode([first]) == "<bos>", "special tokens stay"
    assert ids == (whole[-9:] if side == "left" else whole[:9])
    good(embedder.post("/v1/embeddings", {"input": [long], "truncate_prompt_tokens": -1}))
    good(embedder.post("/v2/embed", {"texts": [long], "max_tokens": 9}))
    assert len(embedder.mesh.prompts[-1].prompt_ids) == 9
    good(embedder.post("/v2/embed", {"texts": [long], "max_tokens": 9999}))
    assert len(embedder.mesh.prompts[-1].prompt_ids) == 256
    good(embedder.post("/v2/embed", {"texts": [long], "max_tokens": 9, "truncate": "START"}))
    assert embedder.mesh.prompts[-1].prompt_ids[1:] == whole[-8:]
    for path, body in {
        "/embed": {"inputs": long, "truncate": True},
        "/v2/embed": {"texts": [long], "truncate": "END"},
        "/api/embed": {"input": long},
    }.items():
        good(embedder.post(path, body))
        assert len(embedder.mesh.prompts[-1].prompt_ids) == 256
    assert embedder.post("/api/embed", {"input": long, "truncate": False}).status_code == 400


def test_with_coheres_none_nothing_is_cut(embedder: Server) -> None:
    """``max_tokens`` is a bound there; without it, the model's length is."""
    body = {"texts": ["a", " a b c d e f g h"], "truncate": "NONE"}
    good(embedder.post("/v2/embed", body | {"max_tokens": 256}))
    longest = max(len(each.prompt_ids) for each in embedder.mesh.prompts)
    good(embedder.post("/v2/embed", body | {"max_tokens": longest}))
    answer = embedder.post("/v2/embed", body | {"max_tokens": longest - 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert f"texts[1] has {longest} tokens" in answer.text
    assert embedder.post("/v2/embed", {"texts": ["a " * 300], "truncate": "NONE"}).status_code == 400


def test_fields_without_effect_are_not_refused(
    embedder: Server, reranker: Server, classifier: Server
) -> None:
    bare = {"add_special_tokens": False}
    other = {"embed_dtype": "float16", "endianness": "big"}
    for server, path, body in (
        (embedder, "/v1/embeddings", {"input": [[65, 66]], **bare}),
        (embedder, "/pooling", {"input": [65, 66], **bare}),
        (classifier, "/classify", {"input": [65, 66], **bare}),
        (reranker, "/score", {"text_1": "a", "text_2": "b", **bare}),
        (reranker, "/rerank", {"query": "a", "documents": ["b"], **bare}),
        (embedder, "/v1/embeddings", {"input": "a", **other}),
        (embedder, "/pooling", {"input": "a", "encoding_format": "float", **other}),
        (classifier, "/classify", {"input": "a", "encoding_format": "base64", **other}),
        (embedder, "/v1/embeddings", {"input": "a", "encoding_format": "base64", "embed_dtype": "float32"}),
    ):
        good(server.post(path, body))


def test_embeddings_in_other_words(embedder: Server) -> None:
    texts = ["Hello", "Hello world"]

    def ask(path: str, body: Any) -> tuple[Any, list[list[float]]]:
        embedder.mesh.reset(script)
        answer = good(embedder.post(path, body))
        return answer, vectors(embedder) if len(embedder.mesh.prompts) > 1 else [
            vector(embedder.mesh.prompts[0])
        ]

    cohere, expected = ask("/v2/embed", {"texts": texts, "embedding_types": ["float", "base64"]})
    assert cohere["embeddings"]["float"] == expected
    decoded = [array("f", base64.b64decode(each)).tolist() for each in cohere["embeddings"]["base64"]]
    assert (decoded, cohere["texts"], cohere["response_type"]) == (expected, texts, "embeddings_by_type")
    assert cohere["meta"]["billed_units"]["input_tokens"] > 2
    tei, expected = ask("/embed", {"inputs": texts, "normalize": False})
    assert tei == expected
    assert embedder.mesh.prompts[0].pooling is not None
    assert embedder.mesh.prompts[0].pooling.normalize is False
    ollama, expected = ask("/api/embed", {"model": "tiny:latest", "input": texts, "options": {"num_ctx": 1}})
    assert (ollama["embeddings"], ollama["model"]) == (expected, "tiny:latest")
    assert ollama["prompt_eval_count"] > 2
    older, expected = ask("/api/embeddings", {"model": "tiny", "prompt": "Hello"})
    assert older == {"embedding": expected[0]}


def test_pooling_has_the_numbers_of_any_task(embedder: Server) -> None:
    (whole,) = good(embedder.post("/pooling", {"input": "Hello"}))["data"]
    assert whole["data"] == vector(embedder.mesh.prompts[-1])
    (tokens,) = good(embedder.post("/pooling", {"input": [65, 66], "task": "token_embed"}))["data"]
    assert tokens["data"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_similarity_is_the_cosine(embedder: Server) -> None:
    body = {"inputs": {"source_sentence": "Hello", "sentences": ["Hello", "a b c d e"]}}
    same, other = good(embedder.post("/similarity", body))
    assert same == pytest.approx(1)
    first, second = vectors(embedder)
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    assert other == pytest.approx(dot / math.dist(first, [0] * 4) / math.dist(second, [0] * 4))
    scored = good(embedder.post("/v1/score", {"text_1": "Hello", "text_2": ["Hello", "a b c d e"]}))
    assert [each["score"] for each in scored["data"]] == [same, other]
    assert len(embedder.mesh.prompts) == 4, "each text once"


def test_rerank_in_each_api(reranker: Server) -> None:
    documents = ["a", "a b c d e f g h", "a b c"]
    fields = {"query": "Hello", "documents": documents}
    for path in ("/rerank", "/v1/rerank"):
        results = good(reranker.post(path, fields))["results"]
        assert [each["index"] for each in results] == [1, 2, 0]
        assert results[0]["document"] == {"text": documents[1]}
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True)
    answer = good(
        reranker.post(
            "/v2/rerank", {**fields, "top_n": 2, "documents": [{"text": each} for each in documents]}
        )
    )
    assert [each.keys() for each in answer["results"]] == [{"index", "relevance_score"}] * 2
    assert answer["meta"]["billed_units"]["input_tokens"] == answer["usage"]["total_tokens"] > 0
    tei = good(
        reranker.post(
            "/rerank", {"query": "Hello", "texts": documents, "return_text": True, "raw_scores": True}
        )
    )
    assert [(each["index"], each["text"]) for each in tei] == [(i, documents[i]) for i in (1, 2, 0)]
    asked = reranker.mesh.prompts[-1].pooling
    assert asked is not None
    assert (asked.task, asked.activation) == (PoolingTask.SCORE, False)


def test_scores_of_pairs(reranker: Server, tokenizer: Tokenizer) -> None:
    answer = good(reranker.post("/score", {"queries": "Hello", "documents": ["a", "a b c"]}))
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["data"][0]["score"] < answer["data"][1]["score"]
    text = tokenizer.decode(reranker.mesh.prompts[-1].prompt_ids)
    assert text.index("Hello") < text.index("a b c")
    paired = good(reranker.post("/score", {"data_1": ["a", "b"], "data_2": ["c", "d"]}))
    assert len(paired["data"]) == 2
    named = {"queries": "Hello", "text_1": "a", "documents": ["a"], "items": ["b"]}
    for unnamed, param in (("queries", "items"), ("items", "queries")):
        answer = reranker.post("/score", {key: value for key, value in named.items() if key != unnamed})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    long = reranker.post("/score", {"queries": "a", "items": ["a", " a b c d" * 100]})
    assert "items[1]" in long.text


def test_a_reranker_that_answers_with_a_token_gets_its_template(
    served: ServedModel, tokenizer: Tokenizer
) -> None:
    model = PooledModel(tasks=(PoolingTask.SCORE,), takes_pairs=True, answer_tokens=("no", "yes"))
    wide = msgspec.structs.replace(served, max_model_len=2048)
    with pooling(wide, model) as server:
        body = {"query": "{who}", "documents": ["a ball"], "instruction": "Find it"}
        good(server.post("/rerank", body))
        text = tokenizer.decode(server.mesh.prompts[-1].prompt_ids)
        assert "<Instruct>: Find it\n<Query>: {who}\n<Document>: a ball<|im_end|>" in text
        assert text.endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("fields", "is_left"),
    [
        ({"truncate": True}, False),
        ({"truncate": True, "truncation_direction": "Left"}, True),
        ({"truncate": True, "truncation_side": "left"}, True),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, True),
        ({"truncate_prompt_tokens": 300, "truncation_direction": "Left"}, True),
    ],
)
def test_its_document_is_cut_at_either_end_and_all_else_stays(
    served: ServedModel, tokenizer: Tokenizer, fields: dict[str, Any], *, is_left: bool
) -> None:
    model = PooledModel(tasks=(PoolingTask.SCORE,), takes_pairs=True, answer_tokens=("no", "yes"))
    length = 400
    with pooling(msgspec.structs.replace(served, max_model_len=length), model) as server:
        words = [f" {number}" for number in range(400)]
        body = {"query": "who is it", "texts": ["".join(words)], **fields}
        good(server.post("/rerank", body))
        ids = server.mesh.prompts[-1].prompt_ids
        assert len(ids) == fields.get("truncate_prompt_tokens", length) % (length + 1)
        text = tokenizer.decode(ids)
        assert "<Query>: who is it\n<Document>: " in text
        before, _, document = text.partition("<Document>: ")
        assert "Judge whether" in before
        assert text.endswith("</think>\n\n")
        document = document.partition("<|im_end|>")[0]
        assert document
        assert "".join(words).endswith(document) == is_left
        assert "".join(words).strip().startswith(document.strip()) != is_left


@pytest.mark.parametrize(
    ("path", "fields", "refused"),
    [
        ("/rerank", {"instruction": "Find it"}, "instruction"),
        ("/rerank", {"instruction": "", "raw_scores": False}, ""),
        ("/rerank", {"instruction": None, "raw_scores": True}, ""),
        ("/score", {"activation": True}, "activation"),
        ("/score", {"softmax": True}, "softmax"),
        ("/rerank", {"use_activation": True}, "use_activation"),
        ("/score", {"activation": False}, ""),
        ("/score", {"instruction": "Find it"}, "instruction"),
        ("/score", {"chat_template_kwargs": {"instruction": "Find it"}}, "chat_template_kwargs"),
    ],
)
def test_what_cosines_cannot_honour_is_refused(
    embedder: Server, path: str, fields: dict[str, Any], refused: str
) -> None:
    texts = {"query": "a", "documents": ["a"]} if path == "/rerank" else {"queries": "a", "documents": ["a"]}
    answer = embedder.post(path, texts | fields)
    assert answer.status_code == (400 if refused else 200), answer.text
    if refused:
        assert answer.json()["error"]["param"] == refused


def test_a_cross_encoder_takes_no_instruction(reranker: Server) -> None:
    answer = reranker.post("/rerank", {"query": "a", "documents": ["a"], "instruction": "Find it"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instruction")


def test_classes(classifier: Server) -> None:
    (found,) = good(classifier.post("/classify", {"input": "Hello"}))["data"]
    assert (found["label"], found["probs"], found["num_classes"]) == ("yes", [0.25, 0.75], 2)
    labels = [{"score": 0.75, "label": "yes"}, {"score": 0.25, "label": "no"}]
    assert good(classifier.post("/predict", {"inputs": "Hello"})) == labels
    assert good(classifier.post("/predict", {"inputs": [["Hello"], ["a"]]})) == [labels, labels]
    assert good(classifier.post("/predict", {"inputs": ["Hello", "a pair"]})) == labels
    assert len(good(classifier.post("/predict", {"inputs": [["a", "b"], ["c", "d"]]}))) == 2


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
@pytest.mark.parametrize("value", [True, False])
def test_vllms_names_of_the_activation_reach_the_model(
    embedder: Server, reranker: Server, classifier: Server, name: str, *, value: bool
) -> None:
    """Old and new; of an embedding it is the normalisation, as there."""
    for server, path, body, field in (
        (classifier, "/classify", {"input": "a"}, "activation"),
        (classifier, "/pooling", {"input": "a"}, "activation"),
        (reranker, "/score", {"text_1": "a", "text_2": "b"}, "activation"),
        (reranker, "/rerank", {"query": "a", "documents": ["b"]}, "activation"),
        (embedder, "/pooling", {"input": "a"}, "normalize"),
        (embedder, "/v1/embeddings", {"input": "a"}, "normalize"),
    ):
        for fields, expected in (({}, None), ({name: value}, value)):
            good(server.post(path, body | fields))
            assert getattr(server.mesh.prompts[-1].pooling, field) is expected, path


@pytest.mark.parametrize(
    "fields", [{"use_activation": True, "softmax": False}, {"softmax": True, "activation": False}]
)
def test_fields_that_contradict_each_other_are_refused(
    embedder: Server, reranker: Server, classifier: Server, fields: dict[str, Any]
) -> None:
    for server, path, body in (
        (classifier, "/classify", {"input": "a"}),
        (reranker, "/score", {"text_1": "a", "text_2": "b"}),
        (reranker, "/rerank", {"query": "a", "documents": ["b"]}),
        (embedder, "/v1/embeddings", {"input": "a"}),
    ):
        answer = server.post(path, body | fields)
        assert answer.status_code == 400
        assert "contradict" in answer.text
    raw = {"query": "a", "texts": ["b"], "raw_scores": True, "use_activation": True}
    assert "use_activation and raw_scores contradict each other" in reranker.post("/rerank", raw).text
    both = {"input": "a", "normalize": True, "use_activation": False}
    assert embedder.post("/v1/embeddings", both).json()["error"]["param"] == "normalize"


def test_classes_have_no_fields_of_embeddings(classifier: Server) -> None:
    for path in ("/classify", "/pooling"):
        for name, value in {"dimensions": 2, "normalize": False, "task": "embed"}.items():
            answer = classifier.post(path, {"input": "a", name: value})
            assert answer.status_code == 400, (path, name)
            if (path, name) != ("/pooling", "task"):
                assert answer.json()["error"]["param"] == name


def test_queries_and_documents_are_cut_where_that_is_asked_for(
    reranker: Server, tokenizer: Tokenizer
) -> None:
    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    long = " a b c d e f g h"
    bodies = {"/rerank": {"query": long, "documents": [long]}, "/score": {"queries": long, "items": [long]}}
    for path, body in bodies.items():
        good(reranker.post(path, body | dict.fromkeys(limits, 0)))
        whole = len(reranker.mesh.prompts[-1].prompt_ids)
        good(reranker.post(path, body | limits))
        count = len(tokenizer.encode(long, add_special_tokens=False))
        assert len(reranker.mesh.prompts[-1].prompt_ids) == whole - (count - 2) - (count - 3), path


def test_what_is_cut_fits_where_characters_have_several_tokens(
    reranker: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(tokenizer.encode("😀", add_special_tokens=False)) > 1

    def asked(query: str, documents: list[str], **fields: int) -> list[int]:
        good(reranker.post("/rerank", {"query": query, "documents": documents, **fields}))
        return reranker.mesh.prompts[-1].prompt_ids

    assert asked("a", ["a😀😀"], max_tokens_per_doc=2) == asked("a", ["a"])
    cut: list[str] = []

    def noted(text: str, most: int, model: TextModel) -> str:
        cut.append(text)
        return shortened(text, most, model)

    monkeypatch.setattr(scoring, "shortened", noted)
    asked("a b c d", ["a", "b", "c"], max_tokens_per_query=2)
    assert cut == ["a b c d"], "a query is cut once"


def test_top_n_of_0_is_all(reranker: Server) -> None:
    body = {"query": "a", "documents": ["a", "b", "c"]}
    for top_n, count in ((0, 3), (2, 2), (9, 3)):
        assert len(good(reranker.post("/rerank", body | {"top_n": top_n}))["results"]) == count


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": "a", "add_special_tokens": False}, "send token ids"),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "$.padding"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64", "embed_dtype": "float16"}, "embed_dtype"),
        ("/pooling", {"input": "a", "encoding_format": "base64", "endianness": "big"}, "endianness"),
        ("/pooling", {"input": "a", "endianness": "x"}, "$.endianness"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "$.top_n"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input[0] is empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1] is empty"),
        ("/v1/embeddings", {"input": ["a", 7]}, "input[1]"),
        ("/v1/embeddings", {"input": [[9999]]}, "9999"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "2048"),
        ("/v1/embeddings", {"input": ["a"] * 10_000}, "2048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions 5"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "$.dimensions"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "query, passage"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "$.encoding_format"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 3}, "output_dimension"),
        ("/v2/embed", {"images": ["x"]}, "images"),
        ("/api/embed", {"model": "tiny"}, "input"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/classify", {"input": "a"}, "/v1/embeddings"),
        ("/pooling", {"input": "a", "task": "classify"}, "/v1/embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "/v1/embeddings"),
        ("/v1/completions", {"prompt": "a"}, "/v1/embeddings"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}, "/v1/embeddings"),
    ],
)  # fmt: skip
def test_bad_input(embedder: Server, path: str, body: Any, words: str) -> None:
    answer = embedder.post(path, body)
    assert answer.status_code == 400, answer.text
    assert words in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": []}),
        ("/embed", {"inputs": "a b c d" * 200}),
        ("/predict", {"inputs": "a"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}),
        ("/similarity", {"inputs": "a"}),
        ("/rerank", {"query": "a", "texts": ["a", ""]}),
        ("/rerank", {"texts": ["a"]}),
        ("/rerank", {"query": "a", "texts": ["a"], "documents": ["a"]}),
    ],
)
def test_errors_have_the_shape_of_text_embeddings_inference(embedder: Server, path: str, body: Any) -> None:
    answer = embedder.post(path, body)
    assert answer.status_code == 400
    found = answer.json()
    assert found.keys() == {"error", "error_type"}
    assert found["error_type"] == "Validation"
    assert isinstance(found["error"], str)


def test_failures_have_the_shape_of_text_embeddings_inference(embedder: Server) -> None:
    embedder.mesh.reset(failing("the result has NaN"))
    answer = embedder.post("/embed", {"inputs": "a"})
    assert (answer.status_code, answer.json()["error_type"]) == (500, "Backend")
    assert "NaN" in answer.json()["error"]
    for status, kind in ((429, "Overloaded"), (503, "Unhealthy")):
        embedder.mesh.refusal = MeshError(status, "x", "no room")
        answer = embedder.post("/embed", {"inputs": "a"})
        assert (answer.status_code, answer.json()) == (status, {"error": "no room", "error_type": kind})
        answer = embedder.post("/rerank", {"query": "a", "texts": ["a"]})
        assert (answer.status_code, answer.json()) == (status, {"error": "no room", "error_type": kind})
    cohere = embedder.post("/rerank", {"query": "texts", "documents": ["a", '"texts": 1']}).json()
    assert cohere["error"]["message"] == "no room"


def test_a_rerank_that_never_gets_to_be_read_has_its_clients_shape(
    embedder: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = embedder.client.post("/rerank", content=b'{"query": "a", "texts" : ["a"', headers=JSON)
    assert (answer.status_code, answer.json()["error_type"]) == (400, "Validation")
    broken = embedder.client.post("/rerank", content=b'{"query": "a", "documents": ["a"', headers=JSON)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "BadRequestError")

    def full() -> NoReturn:
        raise MeshError(503, "ServiceUnavailableError", "no room")

    monkeypatch.setattr(embedder.mesh, "check_room", full)
    answer = embedder.post("/rerank", {"query": "a", "texts": ["a"]})
    assert (answer.status_code, answer.json()) == (503, {"error": "no room", "error_type": "Unhealthy"})


@pytest.mark.parametrize("side", ["Left", "Right"])
def test_text_embeddings_inference_cuts_at_either_side(
    embedder: Server, tokenizer: Tokenizer, side: str
) -> None:
    long = " a b c d" * 100
    whole = tokenizer.encode(long, add_special_tokens=False)
    fields = {"truncate": True, "truncation_direction": side}
    similar = {"inputs": {"source_sentence": long, "sentences": ["a"]}, "parameters": fields}
    for path, body in {
        "/embed": {"inputs": long, **fields},
        "/similarity": similar,
        "/rerank": {"query": "a", "texts": [long], **fields},
    }.items():
        embedder.mesh.reset(script)
        good(embedder.post(path, body))
        first, *ids = max((each.prompt_ids for each in embedder.mesh.prompts), key=len)
        assert tokenizer.decode([first]) == "<bos>"
        assert ids == (whole[-255:] if side == "Left" else whole[:255])


def test_pairs_beyond_the_length(reranker: Server) -> None:
    long = " a b c d" * 100
    answer = reranker.post("/rerank", {"query": "Hello", "documents": ["a", long]})
    assert answer.status_code == 400
    assert "documents[1]" in answer.text
    good(reranker.post("/rerank", {"query": "Hello", "documents": [long], "truncate_prompt_tokens": -1}))
    assert len(reranker.mesh.prompts[-1].prompt_ids) == 256


def test_a_model_that_generates_names_the_right_endpoints(server: Server) -> None:
    for path, body in {"/v1/embeddings": {"input": "a"}, "/embed": {"inputs": "a"}}.items():
        answer = server.post(path, body)
        assert answer.status_code == 400
        assert "--runner pooling" in answer.text


def test_a_result_that_is_no_number_is_an_error(embedder: Server) -> None:
    embedder.mesh.reset(failing("the result has NaN"))
    answer = embedder.post("/v1/embeddings", {"input": ["a", "b"]})
    assert answer.status_code == 500
    assert "NaN" in answer.text


def test_a_client_that_goes_leaves_nothing_behind(embedder: Server) -> None:
    hanging: Callable[[Prompt], list[Delta]] = saying([])
    embedder.mesh.reset(lambda prompt: [] if len(prompt.prompt_ids) > 2 else hanging(prompt))
    with pytest.raises(httpx2.ReadTimeout):
        embedder.client.post("/v1/embeddings", json={"input": ["a b c", "d e f"]}, timeout=0.3)
    embedder.wait_until_idle()


def test_the_model_is_shown_as_one_for_embeddings(embedder: Server) -> None:
    assert good(embedder.post("/api/show", {"model": "tiny"}))["capabilities"] == ["embedding"]


def test_all_of_ollamas_endpoints_answer_for_an_embedder(embedder: Server) -> None:
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert good(embedder.client.get(path))
    tagged = good(embedder.client.get("/api/tags"))["models"][0]
    assert good(embedder.post("/api/embed", {"model": tagged["name"], "input": "a"}))["embeddings"]
    bodies: dict[str, dict[str, Any]] = {
        "/api/chat": {"messages": [{"role": "user", "content": "a"}]},
        "/api/generate": {"prompt": "a"},
    }
    for path, body in bodies.items():
        answer = embedder.post(path, {"model": tagged["name"], **body})
        assert answer.status_code == 400
        assert "/v1/embeddings" in answer.json()["error"]


def test_a_deadline_ends_the_request(embedder: Server, tmp_path: Path) -> None:
    embedder.mesh.reset(lambda prompt: [])
    headers = {"x-request-timeout": "0.2"}
    answer = embedder.client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
    assert answer.status_code == 504


def test_a_judge_reads_the_text_of_its_model_card(served: ServedModel, tokenizer: Tokenizer) -> None:
    judge = PooledModel(tasks=(PoolingTask.SCORE,), takes_pairs=True, answer_tokens=("no", "yes"))
    with pooling(served, judge) as server:
        good(server.post("/score", {"text_1": "Which dog?", "text_2": "The dog."}))
        (prompt,) = server.mesh.prompts
    parts = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: Which dog?\n<Document>: The dog.",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
    assert prompt.prompt_ids == [
        id for part in parts for id in tokenizer.encode(part, add_special_tokens=False)
    ]
