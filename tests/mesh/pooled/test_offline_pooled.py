"""``LLM``, ``lockstep embed`` and ``lockstep batch`` with a pooling model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep import LLM, PoolingParams
from router.tools import embed
from router.tools.batch import command as batch
from tests.engine.pooling.shapes import make_checkpoint
from tests.router import tiny_tokenizer

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(240)]


def test_embeddings_scores_and_files_have_the_same_bits(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "bert", vocab_size=512)
    (tmp_path / "text").mkdir()
    written = tiny_tokenizer.write_model(tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((written / name).read_bytes())
    texts = ["one dog", "Hello fox", "x"]
    with LLM(str(directory), data_parallel_size=2) as llm:
        found = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]
        (alone,) = llm.embed(texts[1], use_tqdm=False)
        assert alone.outputs.embedding == found[1]
        assert len(found[1]) == 64
        tokens = llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
        assert [len(each.outputs.data) for each in tokens] == [len(each.prompt_token_ids) for each in tokens]
        scores = [each.outputs.score for each in llm.score(texts[0], texts, use_tqdm=False)]
        assert scores == pytest.approx(np.array(found) @ found[0], abs=1e-6)
        with pytest.raises(ValueError, match="dimensions"):
            llm.embed(texts, pooling_params=PoolingParams(dimensions=7))
        with pytest.raises(ValueError, match="does embed"):
            llm.classify(texts)
        with pytest.raises(ValueError, match="context"):
            llm.embed(["x " * 2000])
        with pytest.raises(ValueError, match="no text"):
            llm.generate(texts)
    source, out = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text("\n".join(texts))
    assert embed.main([str(source), "-o", str(out), "--model", str(directory)]) == 0
    assert np.array_equal(np.load(out), np.array(found, dtype=np.float32))
    lines = [
        {"custom_id": each, "url": "/v1/embeddings", "method": "POST", "body": {"input": each}}
        for each in texts
    ]
    asked, answers = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("\n".join(map(json.dumps, lines)))
    assert batch.main([str(asked), "-o", str(answers), "--model", str(directory)]) == 0
    bodies = [json.loads(each)["response"]["body"] for each in answers.read_text().splitlines()]
    assert np.array_equal(
        np.array([each["data"][0]["embedding"] for each in bodies], np.float32), np.load(out)
    )
