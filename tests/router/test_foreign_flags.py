"""Flags of other systems: on the command line, in a file and as arguments of ``LLM``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from coordinator import flags
from coordinator.foreign import ForeignFlags
from router.config import ServeConfig
from router.foreign_flags import FOREIGN
from router.llm_config import llm_config

NO_SWAP = "requests that lose their KV blocks are computed again, nothing is swapped"


def parse(*argv: str) -> tuple[ServeConfig, list[str]]:
    foreign = ForeignFlags(FOREIGN)
    config = flags.parse(ServeConfig, argv, prog="serve", description="", foreign=foreign)
    return config, foreign.said


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_none_of_them_is_a_flag_here() -> None:
    ours = {name for field in flags.fields_of(ServeConfig) for name in (field.long_name, *field.names)}
    theirs = [name for each in FOREIGN for name in (f"--{each.name}", *each.shorts)]
    assert not ours.intersection(theirs)
    assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize("flag", FOREIGN, ids=lambda flag: flag.name)
def test_each_says_why_and_what_instead(flag: Any) -> None:
    assert bool(flag.here) != bool(flag.why)
    assert flag.here or flag.harmless is None or flag.instead
    if flag.here.startswith("--"):
        name = flag.here.split()[0]
        assert name in flags.make_parser(ServeConfig, prog="", description="")._option_string_actions


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--swap-space", "4"], f"--swap-space 4 ignored: {NO_SWAP}"),
        (["--swap_space=4"], f"--swap-space 4 ignored: {NO_SWAP}"),
        (
            ["--disable-log-requests"],
            "--disable-log-requests ignored: neither prompts nor answers are logged",
        ),
        (["--no-enable-log-requests"], "--no-enable-log-requests ignored: neither prompts nor answers"),
        (["-O3"], "--optimization-level 3 ignored"),
        (["-O", "0"], "--optimization-level 0 ignored"),
        (["--compilation-config.mode", "3"], '--compilation-config {"mode": 3} ignored'),
        (["-cc.cudagraph_mode=NONE"], '--compilation-config {"cudagraph_mode": "NONE"} ignored'),
        (["-dcp", "1"], "--decode-context-parallel-size 1 ignored: it is always so"),
        (["--cpu-offload-gb", "0.0"], "--cpu-offload-gb 0 ignored"),
        (["--kv-cache-dtype", "auto"], "--kv-cache-dtype auto ignored: it is always so"),
        (["--no-enable-lora"], "--no-enable-lora ignored: it is always so"),
        (["--async-scheduling"], "--async-scheduling ignored: the scheduler plans its steps by itself"),
    ],
)
def test_what_changes_nothing_is_ignored_and_takes_no_other_word(argv: list[str], said: str) -> None:
    config, (line,) = parse(*argv, "/m", "--port", "81")
    assert line.startswith(said)
    assert (config.engine.model.model, config.http.port) == ("/m", 81)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 is not possible: KV blocks have the data type"),
        (["-q", "fp8"], "--quantization fp8 is not possible: weights are served as the checkpoint has them"),
        (["--enable-lora"], "--enable-lora is not possible: there is no LoRA: merge the adapter"),
        (["--lora-modules", "a=b", "c=d"], "--lora-modules a=b c=d is not possible: there is no LoRA"),
        (["-dph"], "--data-parallel-hybrid-lb is not possible: one endpoint serves all instances"),
        (
            ["--cpu-offload-gb", "2"],
            "--cpu-offload-gb 2 is not possible: weights stay in the memory of their",
        ),
        (["--tp", "2"], "--tp is --tensor-parallel-size (-tp) here"),
        (["--model-path", "x"], "--model-path is MODEL (the first argument) here"),
        (["--context_length=5"], "--context-length is --max-model-len here"),
        (["--disable-radix-cache"], "--disable-radix-cache is --no-enable-prefix-caching here"),
        (["--swap-space"], "argument --swap-space: expected one argument"),
        (["--max-model-length", "4"], "unrecognized arguments: --max-model-length 4; did you mean --max-mod"),
        (["--max_model_length=4"], "--max_model_length=4; did you mean --max-model-len?"),
        (["--enable-lor"], "unrecognized arguments: --enable-lor (see"),
    ],
)
def test_what_means_something_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, "/m", *argv)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("swap-space: 4", f"--swap-space 4 ignored: {NO_SWAP}"),
        ("enable_lora: false", "--no-enable-lora ignored: it is always so"),
        (
            "limit-mm-per-prompt: {image: 2}",
            '--limit-mm-per-prompt {"image": 2} ignored: only text is served',
        ),
        ("quantization:", None),
    ],
)
def test_in_a_file_they_are_ignored_likewise(text: str, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "mesh.yaml").write_text(f"model: /m\n{text}\n")
    config, lines = parse("--config", str(tmp_path / "mesh.yaml"))
    assert lines == ([] if said is None else [said])
    assert config.engine.model.model == "/m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv-cache-dtype: fp8", "--kv-cache-dtype fp8 is not possible: KV blocks have the data type"),
        ("enable-lora: true", "--enable-lora is not possible: there is no LoRA"),
        ("lora-modules: [a=b, c=d]", "--lora-modules a=b c=d is not possible: there is no LoRA"),
        ("context_length: 4096", "--context-length is --max-model-len here"),
        ("data-paralel-size: 2", "mesh.yaml; did you mean data-parallel-size?"),
    ],
)
def test_in_a_file_they_are_refused_likewise(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mesh.yaml").write_text(text)
    assert said in refusal(capsys, "--config", str(tmp_path / "mesh.yaml"))


def test_as_arguments_of_a_program(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = llm_config({"model": "/m", "swap_space": 4, "kv_cache_dtype": "auto", "quantization": None})
    assert config.engine.model.model == "/m"
    assert caplog.messages == [
        f"swap_space 4 ignored: {NO_SWAP}",
        "kv_cache_dtype auto ignored: it is always so",
    ]
    with pytest.raises(ValueError, match=r"cpu_offload_gb 4 is not possible: .* spread them with -tp"):
        llm_config({"cpu_offload_gb": 4})
    with pytest.raises(TypeError, match=r"argument 'context_length'; it is max_model_len$"):
        llm_config({"context_length": 4096})


def test_objects_of_a_file_are_shown_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {"rope_theta": 1}
    (tmp_path / "mesh.yaml").write_text(json.dumps({"hf-overrides": overrides}))
    said = refusal(capsys, "--config", str(tmp_path / "mesh.yaml"))
    assert f"--hf-overrides {json.dumps(overrides)} is not possible: config.json is taken as it is" in said
