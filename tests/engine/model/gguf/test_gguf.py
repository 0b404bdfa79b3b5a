"""GGUF files against the checkpoints that the gguf package's own numbers make."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

pytest.importorskip("gguf")

from gguf import GGUFWriter

from engine.attention.base import PackedRows
from engine.config import SHIPPED_MODEL, EngineConfig, ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.make import make_program
from engine.model.checkpoint import CheckpointError, fingerprint, read_model_info
from engine.model.expert_weights import ExpertShare, only_experts_of
from engine.model.finding import MODELS_DIRECTORY, find_model
from engine.model.gguf import conversion, directory
from engine.model.gguf.reading import TYPES, read_header
from engine.model.sharding.shard import Shard, sharded_class
from engine.model.sharding.shard_weights import read_shard
from engine.model.weight_files import open_weights
from engine.model.weight_set import check_weights
from engine.model.weights import load_model
from engine.settings import resolve
from parallel.placement import assign_experts
from tests.engine.model.gguf.writer import HALVES, letters, write_gguf
from tests.engine.model.test_weights import CPU, greedy_ids, load
from tests.engine.tiny_models import make_tiny_model
from tests.nightly import NIGHTLY

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {},
    "gpt_oss": {},
}
"""Families, with changes to what a file cannot say, or has no whole blocks."""
LARGE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
"""Rows of whole blocks of 256."""
KINDS = [kind.name for kind in TYPES.values()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are made below the test's own, in this process, which has loaded transformers."""
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(directory, "own_directory", lambda _name: tmp_path / "made")
    monkeypatch.setattr(directory, "_convert", conversion.convert)


def both(tmp_path: Path, family: str, kind: str = "Q8_0", **changes: Any) -> tuple[Path, Path]:
    """The directory made from a file, and that of the checkpoint that it stands for."""
    plain = make_tiny_model(tmp_path / "plain", family, **CHANGES[family] | changes)
    path = write_gguf(plain, tmp_path / "model.gguf", kind, tmp_path / "wide")
    return find_model(str(path)), tmp_path / "wide"


@pytest.mark.parametrize("family", CHANGES)
def test_a_file_answers_as_the_checkpoint_that_it_stands_for(family: str, tmp_path: Path) -> None:
    made, wide = both(tmp_path, family)
    found, expected = load(made), load(wide)
    for name, weight in expected.module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], weight), name
    assert found.layers == expected.layers
    assert greedy_ids(found) == greedy_ids(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_types_are_widened_as_the_package_does(kind: str, tmp_path: Path) -> None:
    """Whole, and in ranges that cut blocks."""
    made, wide = both(tmp_path, "llama", kind, **LARGE, layers=1)
    expected = load_file(wide / "model.safetensors")
    assert read_model_info(made).dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    with open_weights(made, torch.float32) as (files,):
        assert sorted(files.keys()) == sorted(expected)
        for name, weight in expected.items():
            stored = files.get_slice(name)
            assert list(stored.get_shape()) == list(weight.shape)
            assert torch.equal(files.get_tensor(name), weight), name
            if weight.dim() == 2:
                assert torch.equal(stored[3:21], weight[3:21])
                assert torch.equal(stored[:, 5:143], weight[:, 5:143])
                assert torch.equal(stored[7:9, 100:101], weight[7:9, 100:101])
    with open_weights(made, torch.bfloat16) as (files,):
        assert torch.equal(files.get_tensor(name), expected[name].bfloat16())


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q8_0"), ("llama", "Q4_0"), ("llama", "Q4_1"), ("gpt_oss", "MXFP4"), ("gpt_oss", "Q8_0")],
)
def test_codes_are_kept_where_a_number_is_a_code_times_a_scale(
    family: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, wide = both(tmp_path, family, kind, layers=1)
    with open_weights(made, torch.bfloat16) as (files,):
        assert len(files.stacks) == (2 if family == "gpt_oss" else 0)
        experts = {name: stack.matrices[2] for name, stack in files.stacks.items()}
        for name, matrix in (files.matrices | experts).items():
            if name.endswith("bias"):
                continue
            codes = matrix.read_codes(slice(0, 32), slice(32, 64))
            assert (codes is not None) == (kind != "Q4_1"), name
            if codes is not None:
                assert torch.equal(codes.widened(torch.bfloat16), matrix[0:32, 32:64])
    if kind == "Q4_1" or library.load() is None:
        return
    caplog.set_level(logging.INFO)
    logits, settings, count = [], ModelConfig(model=str(made)), 20
    table = np.zeros((1, 2), dtype=np.int32) + np.arange(2, dtype=np.int32)
    rows = PackedRows(np.array([0]), np.array([count]), table, np.arange(count), 0)
    for each in (made, wide):
        model = load_model(read_model_info(each), settings, dtype=torch.bfloat16, device=CPU)
        program = make_program(model, 16)
        assert program is not None
        assert (program.quantized_bytes > 0) == (each == made)
        program.use(NativeCache(model.layers, num_blocks=2, block_size=16, dtype=model.dtype))
        logits.append(program.forward(rows, np.arange(count) + 5, np.arange(count)).clone())
    assert torch.equal(*logits)
    assert "of the weights' bytes are packed" in caplog.text


def test_an_embedding_that_is_the_output_too_is_one_tensor(tmp_path: Path) -> None:
    made, wide = both(tmp_path, "qwen3", tie_word_embeddings=True)
    assert json.loads((made / "config.json").read_text())["tie_word_embeddings"]
    assert greedy_ids(load(made)) == greedy_ids(load(wide))


def test_factors_of_rotary_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = make_tiny_model(tmp_path / "plain", "llama", rope_parameters=scaling)
    expected = load(plain)
    rotary = expected.module.model.rotary_emb
    plainly = 10000.0 ** -(torch.arange(0, 16, 2).float() / 16)

    def vocabulary(writer: GGUFWriter) -> None:
        letters(writer)
        writer.add_tensor("rope_freqs.weight", (plainly / rotary.inv_freq).numpy())

    path = write_gguf(plain, tmp_path / "model.gguf", "F32", vocabulary=vocabulary)
    found = load(find_model(str(path)))
    torch.testing.assert_close(found.module.model.rotary_emb.inv_freq, rotary.inv_freq)
    assert greedy_ids(found) == greedy_ids(expected)


@pytest.mark.parametrize("family", CHANGES if NIGHTLY else ["llama", "gpt_oss"])
def test_ranks_and_stages_read_their_part(family: str, tmp_path: Path) -> None:
    made, wide = both(tmp_path, family)
    config = transformers.AutoConfig.from_pretrained(wide)
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    shards = [Shard(rank=rank, size=2) for rank in range(2)]
    shards += [Shard(stage=stage, num_stages=2) for stage in range(2)]
    for shard in shards:
        sharded = sharded_class(model_class, config, shard)
        with open_weights(made, torch.float32) as files:
            found = read_shard(sharded, files, None)
        with open_weights(wide, torch.float32) as files:
            expected = read_shard(sharded, files, None)
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert torch.equal(found[name], part), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_instances_read_their_share_of_the_experts(family: str, tmp_path: Path) -> None:
    made, wide = both(tmp_path, family)
    config = transformers.AutoConfig.from_pretrained(wide)
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    share = ExpertShare(assign_experts(read_model_info(made).num_experts, 2), 1)
    with (
        open_weights(made, torch.float32) as files,
        open_weights(wide, torch.float32) as others,
        only_experts_of(model_class, config, share, files) as found,
        only_experts_of(model_class, config, share, others) as expected,
    ):
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert torch.equal(found[name], part), name


# ---- the tokenizer


def shipped(writer: GGUFWriter) -> None:
    """The vocabulary of the shipped model."""
    stored = json.loads((MODELS_DIRECTORY / SHIPPED_MODEL / "tokenizer.json").read_text())
    model, added = stored["model"], {each["id"] for each in stored["added_tokens"]}
    names = {each["id"]: each["content"] for each in stored["added_tokens"]}
    tokens = names | {number: token for token, number in model["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[number] for number in range(len(tokens))])
    writer.add_token_types([3 if number in added else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    writer.add_eos_token_id(min(added))
    writer.add_chat_template("{{ messages[0].content }}")


def test_the_vocabulary_and_the_chat_template_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in a process of its own, as it is outside of tests."""
    monkeypatch.undo()
    monkeypatch.setattr(directory, "own_directory", lambda _name: tmp_path / "made")
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1, vocab_size=4096)
    path = write_gguf(plain, tmp_path / "model.gguf", vocabulary=shipped)
    made = find_model(str(path))
    found = Tokenizer.from_file(str(made / "tokenizer.json"))
    expected = Tokenizer.from_file(str(MODELS_DIRECTORY / SHIPPED_MODEL / "tokenizer.json"))
    text = "It is a truth universally acknowledged, that 1813 had  its own –\n\n<|im_end|> Elizabeth's."
    assert found.encode(text).ids == expected.encode(text).ids
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((made / "tokenizer_config.json").read_text())
    template = config.get("chat_template") or (made / "chat_template.jinja").read_text()
    assert template == "{{ messages[0].content }}"
    assert config["eos_token"] in expected.get_vocab()


# ---- what it is called


def test_a_file_is_found_by_its_path_and_in_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1)
    snapshot = tmp_path / "snapshots" / "0123abc"
    for kind in ("Q8_0", "Q4_0"):
        write_gguf(plain, snapshot / "files" / f"tiny-{kind}.gguf", kind)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    made = find_model(str(snapshot / "files" / "tiny-Q8_0.gguf"))
    assert find_model("owner/name/files/tiny-Q8_0.gguf") == made
    assert (
        find_model("owner/name:Q8_0")
        == made
        != find_model("owner/name:q4_0".upper().replace("OWNER/NAME", "owner/name"))
    )
    with pytest.raises(CheckpointError, match="has 0 GGUF files of this name"):
        find_model("owner/name:Q6_K")
    info, settings = resolve(
        EngineConfig(model=ModelConfig(model=str(snapshot / "files" / "tiny-Q8_0.gguf")))
    )
    assert (info.directory, settings.dtype) == (str(made), "bfloat16")
    assert settings.model == str(snapshot / "files" / "tiny-Q8_0.gguf")


def test_copies_have_one_fingerprint_and_other_files_another(tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1)
    paths = [
        write_gguf(plain, tmp_path / f"{n}" / "m.gguf", kind)
        for n, kind in enumerate(["Q8_0", "Q8_0", "Q4_0"])
    ]
    found = [fingerprint(read_model_info(find_model(str(path)))) for path in paths]
    assert found[0] == found[1] != found[2]


# ---- bad input


def with_values(**values: Any) -> Callable[[GGUFWriter], None]:
    def vocabulary(writer: GGUFWriter) -> None:
        letters(writer)
        for name, value in values.items():
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(
                name.replace("__", "."), value
            )

    return vocabulary


def cut(path: Path, keep: Callable[[int], int]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: keep(len(content))])


def of_another_type(path: Path) -> None:
    """The table says IQ2_XXS of a tensor."""
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_k.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = struct.pack("<I", 16)
    path.write_bytes(content)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off in the middle": (
        lambda path: cut(path, lambda size: size * 2 // 3),
        r"ends before \S+ does, at byte \d+ of at least \d+: it was cut short",
    ),
    "cut off by a byte": (lambda path: cut(path, lambda size: size - 32), "it was cut short"),
    "cut off in its header": (lambda path: cut(path, lambda size: 3000), "it ends within its header"),
    "empty": (lambda path: path.write_bytes(b""), "no GGUF file, or a broken one"),
    "something else": (
        lambda path: path.write_bytes(b"not a model" * 9),
        "does not begin as a GGUF file does",
    ),
    "of an old version": (
        lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)),
        "version 1 of GGUF",
    ),
    "of an unknown type": (
        of_another_type,
        r"blk\.0\.attn_k\.weight is of the type IQ2_XXS, which is not read",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_broken_file_is_refused(case: str, tmp_path: Path) -> None:
    change, says = SPOILT[case]
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1)
    path = write_gguf(plain, tmp_path / "model.gguf")
    change(path)
    with pytest.raises(CheckpointError, match=says):
        find_model(str(path))


def test_a_file_that_was_cut_short_since_is_refused(tmp_path: Path) -> None:
    made, _ = both(tmp_path, "llama", layers=1)
    cut(tmp_path / "model.gguf", lambda size: size - 64)
    with pytest.raises(CheckpointError, match="was cut short"):
        check_weights(made)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"llama__expert_count": 8}, "mixtures in the architecture llama"),
        ({"llama__rope__scaling__type": "su"}, "scaled by su"),
        ({"split__count": 3}, "one of 3 files of a model: join them"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1)
    path = write_gguf(plain, tmp_path / "model.gguf", vocabulary=with_values(**values))
    with pytest.raises(CheckpointError, match=says):
        find_model(str(path))


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "falcon.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"the architecture falcon is not read from GGUF files: .* qwen3moe"
    ):
        find_model(str(tmp_path / "falcon.gguf"))
    plain = make_tiny_model(tmp_path / "plain", "llama", layers=1)

    def more(writer: GGUFWriter) -> None:
        letters(writer)
        writer.add_tensor("blk.0.ffn_extra.weight", torch.zeros(2, 32).numpy())

    path = write_gguf(plain, tmp_path / "model.gguf", vocabulary=more)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_extra\.weight is not known"):
        find_model(str(path))


def test_scales_that_are_no_numbers_are_refused_by_tensor(tmp_path: Path) -> None:
    made, _ = both(tmp_path, "llama", "Q8_0", layers=1)
    entry = read_header(made / "model.gguf").tensors["blk.0.ffn_up.weight"]
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    content[entry.begin : entry.begin + 2] = struct.pack("<e", float("nan"))
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_up\.weight has numbers that are infinite or none"
    ):
        load(made)


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PACKAGE", "gguf_that_is_not_there")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="needs the package gguf: pip install gguf"):
        find_model(str(tmp_path / "model.gguf"))


def test_types_that_the_package_does_not_write_have_scales_where_the_test_puts_them() -> None:
    assert {kind for kind in KINDS if kind.endswith("_K")} == set(HALVES)
