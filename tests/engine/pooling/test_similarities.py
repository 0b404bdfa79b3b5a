"""Similarities by sentence-transformers' own call, of its embeddings and of ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from coordinator.pooled_model import PoolingTask
from engine.config.pooling import PoolingConfig
from engine.model.checkpoint import read_model_info
from engine.pooling.detection import as_pooling, find_pooling
from engine.pooling.pooling_model import PooledInput, PoolingModel
from engine.pooling_params import PoolingParams
from examples.benchmarks.pooled.bench_pooled import make_model, texts_of

pytestmark = pytest.mark.nightly

NEAR_TIE = 1e-6
"""Difference of two similarities whose order rounding decides."""


@pytest.mark.parametrize("shape", ["bge-small", "qwen3-embedding-0.6b"])
def test_similarities_have_the_order_of_sentence_transformers(tmp_path: Path, shape: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    make_model(tmp_path, shape, 2)
    texts = texts_of(40, 32)
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu")
    wanted = theirs.encode(texts, show_progress_bar=False)
    info = as_pooling(read_model_info(tmp_path), find_pooling(tmp_path, PoolingConfig()))
    model, tokenizer = (
        PoolingModel(info, torch.float32),
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    params = PoolingParams(PoolingTask.EMBED)
    found = np.stack(model.answers([PooledInput(each.ids, params) for each in tokenizer.encode_batch(texts)]))
    order = theirs.similarity(found, found).argsort(dim=1, descending=True)
    ranked = theirs.similarity(wanted, wanted).gather(1, order)
    assert (ranked.diff(dim=1) < NEAR_TIE).all()
