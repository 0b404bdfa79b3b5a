"""Which checkpoints are pooling models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.pooled_model import PoolingTask
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.config.lora import LoraConfig
from engine.config.pooling import PoolingConfig
from engine.model.checkpoint import read_model_info
from engine.model.errors import CheckpointError
from engine.pooling.detection import as_pooling, find_pooling
from engine.pooling.flags import check_flags, for_pooling
from engine.pooling.sentence_files import read_sentence_files

BERT = {"model_type": "bert", "hidden_size": 32, "vocab_size": 64, "max_position_embeddings": 128}
QWEN = BERT | {"model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 1}
EMBED, CLASSIFY, SCORE = PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.SCORE


def write(directory: Path, architecture: str, config: dict[str, Any], **files: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    for name, content in files.items():
        path = directory / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("architecture", "config", "tasks", "pooling"),
    [
        ("BertModel", BERT, (EMBED, PoolingTask.TOKEN_EMBED), "cls"),
        ("BertForMaskedLM", BERT, (EMBED, PoolingTask.TOKEN_EMBED), "cls"),
        ("Qwen3Model", QWEN, (EMBED, PoolingTask.TOKEN_EMBED), "last"),
        ("BertForSequenceClassification", BERT, (CLASSIFY,), "cls"),
        ("BertForSequenceClassification", BERT | {"id2label": {"0": "x"}}, (SCORE, CLASSIFY), "cls"),
        ("Qwen3ForSequenceClassification", QWEN | {"num_labels": 1}, (SCORE, CLASSIFY), "last"),
        ("BertForTokenClassification", BERT, (PoolingTask.TOKEN_CLASSIFY,), "all"),
    ],
)
def test_the_architecture_says_what_a_model_answers_with(
    tmp_path: Path, architecture: str, config: dict[str, Any], tasks: tuple[PoolingTask, ...], pooling: str
) -> None:
    found = find_pooling(write(tmp_path, architecture, config), PoolingConfig())
    assert found is not None
    assert (found.tasks, found.pooling) == (tasks, pooling)
    assert found.has_segments == (config["model_type"] == "bert")


def test_models_that_write_text_do_so_unless_flags_or_files_ask_otherwise(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM", QWEN)
    assert find_pooling(tmp_path, PoolingConfig()) is None
    for asked in (PoolingConfig(runner="pooling"), PoolingConfig(convert="embed")):
        found = find_pooling(tmp_path, asked)
        assert found is not None
        assert (found.tasks[0], found.pooling, found.dimensions, found.normalizes) == (
            EMBED,
            "last",
            32,
            True,
        )
    reranker = find_pooling(tmp_path, PoolingConfig(convert="classify"))
    assert reranker is not None
    assert (reranker.tasks, reranker.answer_tokens) == ((SCORE, CLASSIFY), ("no", "yes"))
    write(tmp_path, "Qwen3ForCausalLM", QWEN, modules=[{"type": "sentence_transformers.models.Transformer"}])
    assert find_pooling(tmp_path, PoolingConfig()) is not None
    assert find_pooling(tmp_path, PoolingConfig(runner="generate")) is None


def test_files_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    modules = [("models.Transformer", ""), ("base.modules.Pooling", "1_Pooling"), ("models.Normalize", "2")]
    write(
        tmp_path,
        "BertModel",
        BERT | {"matryoshka_dimensions": [16, 8]},
        modules=[{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in modules],
        config_sentence_transformers={"prompts": {"query": "Q: "}, "default_prompt_name": "query"},
        sentence_bert_config={"max_seq_length": 100},
        **{"1_Pooling__config": {"pooling_mode": "mean"}},
    )
    found = find_pooling(tmp_path, PoolingConfig())
    assert found is not None
    assert (found.pooling, found.normalizes, found.matryoshka) == ("mean", True, (8, 16))
    assert (found.prompts, found.default_prompt) == ({"query": "Q: "}, "query")
    assert as_pooling(read_model_info(tmp_path, weights=False), found).context_length == 100
    flags = PoolingConfig(pooler_config='{"pooling_type": "CLS", "normalize": false}')
    asked = find_pooling(tmp_path, flags)
    assert asked is not None
    assert (asked.pooling, asked.normalizes) == ("cls", False)


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    config = BERT | {"model_type": "roberta", "max_position_embeddings": 130, "pad_token_id": 1}
    write(tmp_path, "RobertaModel", config)
    info = as_pooling(read_model_info(tmp_path, weights=False), find_pooling(tmp_path, PoolingConfig()))
    assert info.context_length == 128


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        ([{"type": "models.WordWeights", "path": ""}], {}, "a module WordWeights"),
        ([{"type": "models.Pooling", "path": "../x"}], {}, "outside of the model"),
        ([{"type": "models.Pooling", "path": "p"}], {"pooling_mode": "max"}, "'max'"),
        (
            [{"type": "models.Pooling", "path": "p"}],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "not built",
        ),
    ],
)
def test_what_is_not_built_is_refused(
    tmp_path: Path, modules: list[dict[str, str]], pooling: dict[str, Any], problem: str
) -> None:
    write(tmp_path, "BertModel", BERT, modules=modules, p__config=pooling)
    with pytest.raises(CheckpointError, match=problem):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"pooling_type": "MAX"}', '{"unknown": 1}'])
def test_a_pooler_config_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--pooler-config"):
        PoolingConfig(pooler_config=text)


def test_flags_of_models_that_write_text_are_refused() -> None:
    check_flags(EngineConfig(device=DeviceConfig(device="cpu"), model=ModelConfig(quantization="int8")))
    for config, flag in (
        (EngineConfig(device=DeviceConfig(tensor_parallel_size=2)), "-tp"),
        (EngineConfig(lora=LoraConfig(enable_lora=True)), "--enable-lora"),
        (EngineConfig(model=ModelConfig(quantization="int4")), "--quantization int4"),
        (EngineConfig(model=ModelConfig(quantization="gptq")), "--quantization gptq"),
        (EngineConfig(model=ModelConfig(quantization="int8", load_format="dummy")), "--quantization int8"),
    ):
        with pytest.raises(CheckpointError, match=flag):
            check_flags(config)


def test_an_instance_that_joins_makes_the_same_model_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM", QWEN)
    for asked in (
        PoolingConfig(convert="classify", pooler_config='{"use_activation": false}'),
        PoolingConfig(convert="embed", pooler_config='{"pooling_type": "MEAN", "is_matryoshka": true}'),
    ):
        found = find_pooling(tmp_path, asked)
        config = EngineConfig(model=ModelConfig(max_model_len=4096), cache=CacheConfig())
        adopted = for_pooling(config, found)
        assert find_pooling(tmp_path, adopted.pooling) == found
        assert adopted.scheduler.token_budget() >= 4096
        assert not adopted.scheduler.enable_chunked_prefill
        assert not adopted.cache.enable_prefix_caching
        assert msgspec.json.decode(adopted.pooling.pooler_config or "")
