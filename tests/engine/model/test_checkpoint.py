from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig

from engine.config import SHIPPED_MODEL, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.model.checkpoint import (
    CheckpointError,
    check_servable,
    default_sampling,
    fingerprint,
    read_model_info,
    why_experts_stay_whole,
)
from engine.model.finding import MODELS_DIRECTORY, find_model
from engine.model.model_sources import STATE_LAYER_TYPES, has_states, why_not_served
from engine.model.weight_set import weight_files
from engine.settings import adopt, resolve


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "model"))


def change(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_model_is_a_directory_or_the_shipped_one(copy: Path) -> None:
    assert find_model(str(copy)) == copy
    assert find_model(None) == find_model(SHIPPED_MODEL) == MODELS_DIRECTORY / SHIPPED_MODEL


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "nowhere", "a/b/c", "../engine/models"])
def test_a_model_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist: give a directory"):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name of the model is empty"),
        ("x" * 300, "cannot be looked at: File name too long"),
        ("~nobody-of-this-name/model", "cannot be looked at: Could not determine home directory"),
    ],
)
def test_names_that_can_be_none(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(name)


def test_the_hub_is_asked_for_repository_ids_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"neither a local directory nor in the Hugging Face cache"):
        find_model("owner/name")
    with pytest.raises(CheckpointError, match="no valid repository id"):
        find_model("owner/na me?")


def test_what_breaks_on_the_way_to_the_hub_is_said(tmp_path: Path) -> None:
    """As most of it does, with an exception of the library that sends requests."""

    class Refuses(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_error(407)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept.pop("HF_HUB_OFFLINE", None)
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        hub = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": address}
        code = "from engine.model.finding import find_model; find_model('owner/name')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=kept | hub,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        proxy.shutdown()
    *_, said = done.stderr.splitlines()
    assert said.startswith(
        "engine.model.errors.CheckpointError: model 'owner/name' could not be fetched from the hub"
    )
    assert "ProxyError: 407" in said


def test_facts_of_the_shipped_model() -> None:
    info = read_model_info(find_model(None))
    assert info.architecture == "Qwen3MoeForCausalLM"
    assert (info.context_length, info.num_experts, info.dtype) == (2048, 8, "bfloat16")
    assert len(info.eos_token_ids) == 2
    assert set(default_sampling(find_model(None))) <= {"temperature", "top_p", "top_k"}


ADDED = {"0": {"content": "<|endoftext|>"}, "2": {"content": "<|im_end|>"}}


@pytest.mark.parametrize(
    "tokenizer_config",
    [
        {"eos_token": "<|im_end|>", "added_tokens_decoder": ADDED},
        {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "added_tokens_decoder": ADDED},
        {"eos_token": "<|im_end|>"},
    ],
    ids=["plain", "object", "without its number"],
)
def test_what_ends_a_sequence_by_the_tokenizer_ends_it(copy: Path, tokenizer_config: object) -> None:
    """The tokenizer's end token ends a sequence, too.

    A model tuned for chats may keep the other files of the model that it was made of.
    """
    (copy / "generation_config.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert read_model_info(copy).eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("tokenizer", "found"),
    [
        ({"model": {"vocab": {"a": 0, "</s>": 7}}}, (0, 7)),
        ({"model": {"vocab": [["a", 0.0], ["</s>", -1.0]]}}, (0, 1)),
        ({"model": {"vocab": {"</s>": 4096}}}, (0,)),
        ({"added_tokens": "x", "model": {"vocab": [1, "</s>", []]}}, (0,)),
        ({}, (0,)),
        (None, (0,)),
    ],
    ids=["in a vocabulary", "in one of pieces", "beyond the model's", "of other types", "nowhere", "no file"],
)
def test_where_the_tokenizer_has_it(copy: Path, tokenizer: object, found: tuple[int, ...]) -> None:
    (copy / "generation_config.json").unlink()
    (copy / "tokenizer_config.json").write_text('{"eos_token": "</s>", "added_tokens_decoder": [1]}')
    (copy / "tokenizer.json").unlink()
    if tokenizer is not None:
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_model_info(copy).eos_token_ids == found


def test_a_null_is_no_answer_to_what_ends_a_sequence(copy: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        (copy / name).unlink()
    config = json.loads((copy / "config.json").read_text())
    change(copy, eos_token_id=None, text_config={**config, "eos_token_id": [3, 5]})
    assert read_model_info(copy).eos_token_ids == (3, 5)


def test_a_family_has_an_end_of_its_own_where_nothing_else_says_one(copy: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        (copy / name).unlink()
    (copy / "config.json").write_text(json.dumps({"architectures": ["Some"], "model_type": "mixtral"}))
    assert read_model_info(copy).eos_token_ids == (AutoConfig.for_model("mixtral").eos_token_id,)
    change(copy, eos_token_id=5)
    assert read_model_info(copy).eos_token_ids == (5,)


def test_broken_directories_are_told_apart(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        read_model_info(copy)
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json: is it a model directory\?"):
        read_model_info(copy)
    for name in ("m-Q8_0.gguf", "m-Q4_0.gguf"):
        (copy / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"one of its GGUF files .*m-Q4_0.gguf, m-Q8_0.gguf.*, like /"):
        read_model_info(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file"):
        weight_files(copy)
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks 1 of the weight files .* first part-1.safetensors"):
        weight_files(copy)


def test_a_whole_file_is_what_is_read_whatever_lies_beside_it(copy: Path) -> None:
    """A whole file is preferred to one in parts, as transformers does.

    A model may have been saved anew over one in parts, or the other way round.
    """
    for left in ("part-1.safetensors", "consolidated.safetensors"):
        (copy / left).write_bytes(b"old")
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-9.safetensors"}}')
    assert weight_files(copy) == [copy / "model.safetensors"]
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    assert weight_files(copy) == [copy / "part-1.safetensors"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "Qwen3MoeForCausalLM"}, "names no architecture"),
        ({"architectures": {"a": 1}}, "names no architecture"),
        ({"text_config": "x"}, "has a text_config that is no object"),
        ({"vocab_size": -5}, "gives no vocab_size above 0"),
    ],
)
def test_a_config_of_other_types(copy: Path, changes: dict[str, object], message: str) -> None:
    change(copy, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model_info(copy)


@pytest.mark.parametrize("weight_map", ['"x"', '{"a": 5}', '{"a": ["b"]}', "[]"])
def test_an_index_of_other_types(copy: Path, weight_map: str) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(CheckpointError, match="has a weight_map that maps no names to files"):
        read_model_info(copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_files_that_cannot_be_read(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user; root reads all, so the file system is not asked."""
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: Permission denied"):
        resolve(engine(model=str(copy)))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (slice(0, 1_000_000), "has 1000000 bytes where its header promises .*: download it again"),
        (slice(0, 0), "is no safetensors file, or a broken one: download it again"),
        (slice(100, None), "is no safetensors file, or a broken one: download it again"),
    ],
    ids=["cut short", "empty", "junk"],
)
def test_weights_that_were_not_copied_whole(copy: Path, keep: slice, message: str) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[keep])
    with pytest.raises(CheckpointError, match=message):
        read_model_info(copy)


def test_the_fingerprint_tells_models_apart_and_copies_not(copy: Path) -> None:
    def found() -> str:
        return fingerprint(read_model_info(copy))

    original = fingerprint(read_model_info(find_model(None)))
    assert found() == original
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert found() != original
    shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / "model.safetensors", copy)
    assert found() == original
    change(copy, rms_norm_eps=1e-3)
    assert found() != original


def test_another_end_of_sequence_is_another_model(copy: Path) -> None:
    """Instances end answers by it."""
    before = fingerprint(read_model_info(copy))
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.5}))
    assert fingerprint(read_model_info(copy)) == before, "routers' defaults are written out in requests"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 17}))
    assert fingerprint(read_model_info(copy)) != before


@pytest.mark.parametrize("kind", ["q_proj", "k_proj"])
def test_an_update_of_some_matrices_is_refused_before_weights_are_loaded(copy: Path, kind: str) -> None:
    """A merged adapter changes all rows of a few matrices."""
    before = fingerprint(read_model_info(copy))
    tensors = load_file(copy / "model.safetensors")
    for name in [name for name in tensors if name.endswith(f"{kind}.weight")]:
        rows, columns = tensors[name].shape
        up, down = torch.ones(rows, 4), torch.ones(4, columns)
        tensors[name] = (tensors[name] + 1e-2 * (up @ down)).to(tensors[name].dtype)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(read_model_info(copy)) != before


def engine(**model: object) -> EngineConfig:
    return EngineConfig(model=ModelConfig(**model))  # type: ignore[arg-type]


def test_settings_are_settled_once() -> None:
    info, settings = resolve(engine(dtype="half", max_model_len=100, served_model_name=("a", "b")))
    assert (settings.dtype, settings.max_model_len, settings.served_model_name) == (
        "float16",
        100,
        ("a", "b"),
    )
    assert not settings.enable_expert_parallel
    joined = adopt(EngineConfig(), settings)
    assert (joined.model.dtype, joined.model.max_model_len) == ("float16", 100)
    assert resolve(joined)[1] == settings
    assert info.vocab_size == settings.vocab_size


def test_experts_are_spread_when_asked_and_possible(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device=DeviceConfig(enable_expert_parallel=True))
    assert resolve(config, 2)[1].data_parallel_size == 2
    assert not resolve(config, 1)[1].enable_expert_parallel
    assert "-ep ignored: one instance" in caplog.text
    with pytest.raises(CheckpointError, match="8 experts cannot be spread over 9 ranks"):
        resolve(config, 9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "llama4"},
            "-ep: the experts of llama4 do not go through transformers' experts interface",
        ),
        (
            {
                "model_type": "llama4",
                "text_config": {
                    "model_type": "llama4_text",
                    "vocab_size": 9,
                    "num_local_experts": 8,
                    "layer_types": ["full_attention"],
                },
            },
            "-ep: the experts of llama4_text do not go through transformers' experts interface",
        ),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_before_any_is_read(
    copy: Path, changes: dict[str, object], reason: str
) -> None:
    change(copy, **changes)
    config = msgspec.structs.replace(
        engine(model=str(copy)), device=DeviceConfig(enable_expert_parallel=True)
    )
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        resolve(config, 2)
    assert not resolve(engine(model=str(copy)), 2)[1].enable_expert_parallel


def test_experts_are_spread_by_default_where_they_can_be(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    settings = resolve(EngineConfig(), 2)[1]
    assert (settings.enable_expert_parallel, settings.num_experts) == (True, 8)
    told = EngineConfig(device=DeviceConfig(enable_expert_parallel=False))
    assert not resolve(told, 2)[1].enable_expert_parallel
    assert not resolve(EngineConfig(), 1)[1].enable_expert_parallel
    assert not caplog.text
    assert not resolve(EngineConfig(), 9)[1].enable_expert_parallel
    assert "each instance holds all experts: there are 8 experts for 9 instances" in caplog.text
    assert not resolve(engine(load_format="dummy"), 2)[1].enable_expert_parallel
    info = read_model_info(shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "copy"))
    assert why_experts_stay_whole(info) == ""
    change(tmp_path / "copy", model_type="llama4")
    reason = "the experts of llama4 do not go through transformers' experts interface"
    assert why_experts_stay_whole(msgspec.structs.replace(info, model_type="llama4")) == reason


def test_random_weights_need_none_in_the_directory(copy: Path) -> None:
    with_weights = resolve(engine(model=str(copy)))[1]
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file"):
        resolve(engine(model=str(copy)))
    info, settings = resolve(engine(model=str(copy), load_format="dummy"))
    assert info.directory == str(copy)
    assert (
        settings.fingerprint
        == resolve(engine(load_format="dummy"))[1].fingerprint
        != with_weights.fingerprint
    )


SCALED: list[tuple[dict[str, Any], int]] = [
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
    ({"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 32}, 2048),
    ({"rope_type": "yarn", "factor": 4.0}, 8192),
    ({"type": "linear", "factor": 2.0}, 4096),
    ({"rope_type": "linear", "factor": 1.5}, 3072),
    ({"rope_type": "dynamic", "factor": 2}, 4096),
    ({"rope_type": "dynamic", "alpha": 1000.0}, 2048),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 2048),
    ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512}, 2048),
    ({"type": "su", "factor": 8.0}, 2048),
    ({"rope_type": "default", "rope_theta": 1e6}, 2048),
    ({"rope_type": "linear", "factor": "8"}, 2048),
    ({"rope_type": "linear", "factor": float("inf")}, 2048),
    ({"rope_type": "linear", "factor": float("nan")}, 2048),
    (
        {
            "full_attention": {"rope_type": "linear", "factor": 4},
            "sliding_attention": {"rope_type": "default"},
        },
        8192,
    ),
    ({}, 2048),
]
"""Parameters of rotary embeddings, and the context of a model that states 2048."""


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "length"), SCALED, ids=str)
def test_the_context_is_what_the_rotary_embedding_is_stretched_to(
    copy: Path, key: str, scaling: dict[str, Any], length: int
) -> None:
    change(copy, rope_scaling=None, rope_parameters=None)
    change(copy, **{key: scaling})
    assert read_model_info(copy).context_length == length


def test_gemma_3_as_it_was_published(tmp_path: Path) -> None:
    """google/gemma-3-4b-it: what its config.json leaves out is what transformers' class has."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
    }
    for given in (text, {key: value for key, value in text.items() if key != "model_type"}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": given}))
        info = read_model_info(tmp_path, weights=False)
        assert (info.vocab_size, info.context_length) == (262_208, 131_072)
        assert (info.num_layers, info.num_heads, info.num_kv_heads, info.num_experts) == (34, 8, 4, 0)


def test_what_a_config_leaves_out_is_as_transformers_has_it(copy: Path) -> None:
    """The same as that of the class itself.

    Of a type that it does not have, nothing is known.
    """
    for model_type in ("mistral", "qwen3_moe", "gpt2", "mixtral"):
        (copy / "config.json").write_text(json.dumps({"architectures": ["Some"], "model_type": model_type}))
        info, config = read_model_info(copy), AutoConfig.for_model(model_type)
        assert (info.vocab_size, info.context_length) == (config.vocab_size, config.max_position_embeddings)
        assert (info.num_layers, info.num_heads) == (config.num_hidden_layers, config.num_attention_heads)
        assert info.num_experts == getattr(config, "num_experts", 0)
    change(copy, model_type="no_such_type")
    with pytest.raises(CheckpointError, match="gives no vocab_size above 0"):
        read_model_info(copy)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (engine(max_model_len=4096), "is more than the model's context of 2048 tokens"),
        (engine(max_model_len=0), "--max-model-len must be positive"),
        (engine(max_model_len=-2), "--max-model-len must be positive, or -1 for what fits, not -2"),
        (
            EngineConfig(
                scheduler=SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=1024)
            ),
            "raise --max-num-batched-tokens to 2048",
        ),
    ],
)
def test_settings_that_clash_with_the_model(config: EngineConfig, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(config)


def write_config(directory: Path, model_type: str, **fields: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    common = {"architectures": ["SomeForCausalLM"], "vocab_size": 384, "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps({**common, "model_type": model_type, **fields}))
    return directory


RULED_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": (
        {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}},
        "SomeForCausalLM has weights quantised by bitsandbytes, which are not built",
    ),
    "quantised as a part": (
        {
            "model_type": "mistral3",
            "text_config": {"model_type": "mistral", "quantization_config": {"quant_method": "torchao"}},
        },
        "weights quantised by torchao",
    ),
    "a quantised whole": (
        {
            "model_type": "mistral3",
            "text_config": {"model_type": "mistral"},
            "quantization_config": {"quant_method": "torchao"},
        },
        "weights quantised by torchao",
    ),
    "quantised by MLX": (
        {"model_type": "llama", "quantization": {"bits": 4, "group_size": 64}},
        "weights quantised by mlx",
    ),
    "a state on the module": (
        {"model_type": "recurrent_gemma"},
        "keeps a recurrent state in a way of its own, which is not built",
    ),
    "a cache of its own": (
        {"model_type": "minimax"},
        "keeps a recurrent state in a way of its own, which is not built",
    ),
    "an indexer of another kind": (
        {"model_type": "qwen4_exp_text"},
        "chooses keys by an indexer of a kind that is not built",
    ),
    "a pattern with an unknown letter": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*Q"},
        "layers of type Q: only full, sliding-window",
    ),
    "no type": ({"model_type": None}, "has no 'model_type'"),
    "a type that is no word": ({"model_type": 5}, "has no 'model_type'"),
    "an encoder": ({"model_type": "t5"}, "is an encoder-decoder model"),
    "an encoder alone": ({"model_type": "data2vec-text"}, "is an encoder by its config.json"),
    "attention of its own": (
        {"model_type": "xlnet"},
        "does not go through transformers' attention interface",
    ),
    "a table of attention modules": ({"model_type": "git"}, "transformers' attention interface"),
    "a table of attention functions": ({"model_type": "doge"}, "transformers' attention interface"),
    "no language model": (
        {"model_type": "clip_text_model"},
        "transformers has no causal language model for model type 'clip_text_model'",
    ),
    "another head": (
        {"model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]},
        "LlamaForQuestionAnswering is not a causal language model",
    ),
    "an unknown type": ({"model_type": "llama9"}, "this version of transformers has no model type 'llama9'"),
    "a context that is too short": (
        {"model_type": "llama", "max_position_embeddings": 8},
        "--max-model-len 9",
    ),
    "a chunk without tokens": (
        {"model_type": "granitemoehybrid", "mamba_chunk_size": 0},
        "SomeForCausalLM has mamba_chunk_size 0 in its config.json, which must be above 0",
    ),
    "value heads that key heads do not divide": (
        {"model_type": "qwen3_next", "linear_num_value_heads": 32, "linear_num_key_heads": 12},
        "has linear_num_value_heads 32 and linear_num_key_heads 12 in its config.json, which do not divide",
    ),
    "heads of states that groups do not divide": (
        {"model_type": "nemotron_h", "mamba_num_heads": 100},  # 8 groups, where the file is silent
        "has mamba_num_heads 100 and n_groups 8 in its config.json, which do not divide",
    ),
    "an indexer that chooses no key": (
        {"model_type": "deepseek_v32", "index_topk": 0},
        "has index_topk 0 in its config.json, which must be above 0",
    ),
    "linear biases of heads that share one key": (
        {"model_type": "falcon", "alibi": True},
        "has linear biases (ALiBi) and 71 attention heads that share 1 KV heads",
    ),
    "linear biases of heads that share keys": (
        {"model_type": "falcon", "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 8},
        "has linear biases (ALiBi) and 71 attention heads that share 8 KV heads",
    ),
    "heads that do not divide": (
        {"model_type": "llama", "num_attention_heads": 3},
        "--tensor-parallel-size 2",
    ),
}
"""Values of a config.json, and the message that refuses each."""


@pytest.mark.parametrize("case", RULED_OUT)
def test_what_config_json_rules_out_is_refused_before_weights_are_fetched(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, reason = RULED_OUT[case]
    snapshot = write_config(tmp_path / "snapshots" / "0123abc", **fields)
    fetched: list[list[str]] = []

    def snapshot_download(_repository: str, *, allow_patterns: list[str], **_options: Any) -> str:
        fetched.append(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    device = DeviceConfig(tensor_parallel_size=2) if case.startswith("heads") else DeviceConfig()
    config = EngineConfig(model=ModelConfig(model="owner/name", max_model_len=9), device=device)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        resolve(config)
    assert len(fetched) == 1
    assert not any("safetensors" in pattern for pattern in fetched[0])


def test_weights_are_fetched_of_the_commit_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = shutil.copytree(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "snapshots" / "0123abc")
    fetched: list[tuple[str | None, bool]] = []

    def snapshot_download(
        _repository: str, *, revision: str | None, allow_patterns: list[str], **_options: Any
    ) -> str:
        fetched.append((revision, "*.safetensors" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    info, settings = resolve(EngineConfig(model=ModelConfig(model="owner/name", revision="main")))
    assert fetched == [("main", False), ("0123abc", True)]
    assert (info.directory, settings.revision) == (str(snapshot), "main")


SERVED: dict[str, dict[str, Any]] = {
    "all layers of a hybrid attend": {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2},
    "mxfp4": {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
    "linear biases with a key for each head": {"model_type": "falcon", "alibi": True, "multi_query": False},
    "a chunk that is no multiple of the grid": {"model_type": "granitemoehybrid", "mamba_chunk_size": 24},
    "sliding windows": {"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"]},
    "a language part": {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}},
    "a legacy key that makes no layer sparse": {
        "model_type": "minimax_m3_vl",
        "text_config": {"sparse_attention_config": {"sparse_attention_freq": [0, 0]}},
    },
    "an encoder's form as a decoder": {"model_type": "bert", "is_decoder": True},
    "attention that is brought to the interface": {"model_type": "bloom"},
    "a legacy key that makes layers sparse": {
        "model_type": "minimax_m3_vl",
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {"sparse_attention_config": {"sparse_attention_freq": [0, 1]}},
    },
    "chunked attention of a language part": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {"model_type": "llama4_text"},
    },
    "indexed attention": {"model_type": "deepseek_v32"},
    "a shared index": {"model_type": "glm_moe_dsa", "index_topk_freq": 4},
    "no legacy key": {"model_type": "minimax_m3_vl_text"},
    "a language part by its old name": {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}},
}


@pytest.mark.parametrize("case", SERVED)
def test_what_config_json_does_not_rule_out(case: str, tmp_path: Path) -> None:
    check_servable(write_config(tmp_path, **SERVED[case]), trust_remote_code=False)


ORIGINAL_KEYS: dict[str, list[dict[str, Any]]] = {
    "nemotron_h": [
        {"hybrid_override_pattern": "M-M*E"},
        {"hybrid_override_pattern": "*-*E"},
        {"hybrid_override_pattern": "MM"},
    ],
    "kimi_linear": [
        {"linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]}},
        {"linear_attn_config": {"kda_layers": [], "full_attn_layers": [1, 2, 3]}},
    ],
    "minimax_m3_vl_text": [
        {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1]}},
        {"sparse_attention_config": {"sparse_attention_freq": [0, 0, 0]}},
    ],
    "glm_moe_dsa": [{"index_topk_freq": 2}, {"index_topk_freq": 1, "index_skip_topk_offset": 1}],
}
"""Model type -> keys that original checkpoints have in place of layer types."""


@pytest.mark.parametrize("model_type", ORIGINAL_KEYS)
def test_keys_of_original_checkpoints_are_read_as_transformers_reads_them(model_type: str) -> None:
    for keys in ORIGINAL_KEYS[model_type]:
        layers = len(keys.get("hybrid_override_pattern", "123"))
        config = CONFIG_MAPPING[model_type](num_hidden_layers=layers, **deepcopy(keys))
        with_list = {"model_type": model_type, "layer_types": config.layer_types}
        original = {"model_type": model_type, "num_hidden_layers": layers, **keys}
        assert why_not_served(original) == why_not_served(with_list) == "", keys
        has_any = not STATE_LAYER_TYPES.isdisjoint(config.layer_types)
        assert has_states(original) == has_states(with_list) == has_any, keys


def test_a_config_without_a_type_is_served_only_by_code_of_its_own(tmp_path: Path) -> None:
    fields = {
        "architectures": ["OwnForCausalLM"],
        "vocab_size": 384,
        "auto_map": {"AutoConfig": "own.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_servable(tmp_path, trust_remote_code=True)
    with pytest.raises(CheckpointError, match="OwnForCausalLM has no 'model_type'"):
        check_servable(tmp_path, trust_remote_code=False)


def test_a_type_that_brings_its_own_code_is_not_ruled_out(tmp_path: Path) -> None:
    write_config(tmp_path, "llama9", auto_map={"AutoConfig": "own.Config"})
    check_servable(tmp_path, trust_remote_code=True)
    with pytest.raises(CheckpointError, match="pass --trust-remote-code if the checkpoint brings"):
        check_servable(tmp_path, trust_remote_code=False)


EXPERTS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "ERNIE 4.5": ({"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6}, 64, True),
    "ERNIE 4.5, as its class has it": ({"model_type": "ernie4_5_moe"}, 64, True),
    "DBRX": ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, 16, False),
    "Gemma 4": (
        {
            "model_type": "gemma4",
            "text_config": {"model_type": "gemma4_text", "num_experts": 128, "enable_moe_block": True},
        },
        128,
        True,
    ),
    "Gemma 4 without experts": (
        {
            "model_type": "gemma4",
            "text_config": {"model_type": "gemma4_text", "num_experts": 128, "enable_moe_block": False},
        },
        0,
        True,
    ),
    "Kimi K2.5": (
        {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "n_routed_experts": 384}},
        384,
        True,
    ),
    "Qwen3-VL": (
        {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", "num_experts": 9}},
        9,
        True,
    ),
    "Granite 4.0 micro": ({"model_type": "granitemoehybrid", "num_local_experts": 0}, 0, True),
}
"""A config.json, how many experts it has, and whether they can be spread."""


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_counted_and_spread_whatever_they_are_called(case: str, tmp_path: Path) -> None:
    fields, count, can_be_spread = EXPERTS[case]
    info = read_model_info(write_config(tmp_path, **fields), weights=False)
    assert info.num_experts == count
    assert (why_experts_stay_whole(info) == "") == can_be_spread


def test_files_of_weights_without_an_index(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 weight files .*, first number 1"):
        weight_files(copy)
    shutil.copy(copy / "model-00002-of-00002.safetensors", copy / "model-00001-of-00002.safetensors")
    shutil.copy(copy / "model-00002-of-00002.safetensors", copy / "consolidated.safetensors")
    shutil.copy(copy / "model-00002-of-00002.safetensors", copy / "other.safetensors")
    names = [path.name for path in weight_files(copy)]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shutil.copy(copy / "model-00002-of-00002.safetensors", copy / "fp16-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"several sets of weights and no model.safetensors.index.json"):
        weight_files(copy)


def test_an_index_of_another_name(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    (copy / "consolidated.safetensors").write_bytes(b"")
    index = {"weight_map": {"some.weight": "weights.safetensors"}}
    (copy / "weights.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(copy)] == ["weights.safetensors"]


def test_weights_in_another_layout_only(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"It has consolidated.safetensors, which is in another layout"):
        weight_files(copy)
