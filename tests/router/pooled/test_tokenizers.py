"""WordPiece and Unigram tokenizers with their templates, before a real model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from engine.config.pooling import PoolingConfig
from engine.messages import Delta, FinishReason
from engine.model.checkpoint import read_model_info
from engine.pooling.detection import as_pooling, find_pooling
from engine.pooling.pooling_model import PooledInput, PoolingModel
from engine.pooling_params import Pooled
from router.config import HttpConfig
from router.mesh import Prompt, ServedModel
from tests.engine.pooling.shapes import make_checkpoint
from tests.router.conftest import Server, serving
from tests.router.fake_mesh import FakeMesh
from tests.router.pooled.test_pooled_endpoints import good

CORPUS = [
    "Lockstep serves one language model from many instances behind one endpoint.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Überraschend schöne Größen: naïve cafés cost 12.50 euros — don't they?",
]
TEXTS = ["The dog sleeps.", "  ÜBER  cafés, naïve?", "xyzzy \u2603 fox", "one endpoint " * 40]
QUERY = "Which dog jumps?"


def word_piece() -> Any:
    """Tokenizer as BERT's: lower case, no accents, [CLS] and [SEP], type ids of a pair."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = [(each, tokenizer.token_to_id(each)) for each in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def unigram() -> Any:
    """Tokenizer as XLM-R's: pieces of SentencePiece, a pair with two ends between, no type ids."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


CASES = {"bert": word_piece, "xlm-roberta": unigram}


@contextlib.contextmanager
def served(directory: Path) -> Iterator[Server]:
    """A router over the real model of a checkpoint, without processes."""
    pooled = find_pooling(directory, PoolingConfig())
    assert pooled is not None
    info = as_pooling(read_model_info(directory), pooled)
    model = PoolingModel(info, torch.float32)

    def script(prompt: Prompt) -> list[Delta]:
        assert prompt.pooling is not None
        assert not prompt.pooling.problem(pooled, len(prompt.prompt_ids))
        (found,) = model.answers([PooledInput(prompt.prompt_ids, prompt.pooling)])
        return [Delta(1, [], FinishReason.STOP, pooled=Pooled(found.tobytes(), found.shape))]

    facts = ServedModel(("tiny",), str(directory), info.vocab_size, info.context_length, pooling=pooled)
    with serving(FakeMesh(facts, script), HttpConfig()) as server:
        yield server


def reference(directory: Path, kind: str, *texts: str) -> Any:
    """transformers' own output for a text or a pair, with its own tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    module = getattr(transformers, kind).from_pretrained(directory, attn_implementation="eager").eval()
    given = tokenizer(*texts, return_tensors="pt", return_token_type_ids="Bert" in type(module).__name__)
    with torch.no_grad():
        return module(**given)


@pytest.mark.parametrize("shape", CASES)
def test_embeddings_of_texts_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    CASES[shape]().save_pretrained(make_checkpoint(tmp_path, shape))
    with served(tmp_path) as server:
        answer = good(server.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "float"}))
        short = good(server.post("/v1/embeddings", {"input": TEXTS[-1:], "truncate_prompt_tokens": 9}))
        cut = server.mesh.prompts[-1].prompt_ids
    for text, found in zip(TEXTS, answer["data"], strict=True):
        state = reference(tmp_path, "AutoModel", text).last_hidden_state[0, 0].double()
        vector = np.array(found["embedding"])
        assert vector @ (state / state.norm()).numpy() > 1 - 1e-6
    whole = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXTS[-1]).input_ids
    assert cut == [*whole[:8], whole[-1]], "special tokens stay around what is cut"
    assert short["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize("shape", CASES)
def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    make_checkpoint(tmp_path, shape, "ForSequenceClassification", num_labels=1)
    CASES[shape]().save_pretrained(tmp_path)
    with served(tmp_path) as server:
        ranks = good(server.post("/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": True}))
        type_ids = [each.pooling.token_type_ids for each in server.mesh.prompts if each.pooling is not None]
    wanted = [
        float(reference(tmp_path, "AutoModelForSequenceClassification", QUERY, text).logits[0, 0])
        for text in TEXTS
    ]
    assert [each["score"] for each in ranks] == pytest.approx(sorted(wanted, reverse=True), abs=2e-5)
    assert {each["index"]: pytest.approx(each["score"], abs=2e-5) for each in ranks} == dict(
        enumerate(wanted)
    )
    assert all(map(any, type_ids)) == (shape == "bert"), "type ids tell the texts of a pair apart"
