"""Flags of other systems: on the command line, in files, as arguments of ``LLM``."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import flags
from coordinator.settings.foreign import Foreign, ForeignError, ForeignFlags
from router.config import ServeConfig
from router.launcher.foreign_flags import FOREIGN
from router.offline.config import llm_config

NO_SWAP = "requests that lose their KV blocks are computed again, nothing is swapped"


VLLM_0_32 = """
allow-deprecated-quantization anthropic-disabled-thinking-effort aux-output-config cohere-format
cohere-is-reasoning-model cp-kv-cache-interleave-size cpu-offload-params custom-histogram-buckets
data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate diffusion-config
disable-chunked-mm-input dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
dp-supervisor-probe-timeout-s dp-sync-interval ec-manager-config elastic-ep-max-dp-size
enable-batch-sharded-sampling enable-cumem-allocator enable-flash-late-interaction enable-hc-sp
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint
enable-mixed-moe-lora-format enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs
enable-return-routed-experts enable-scale-out enable-shm-tensor-arena enable-tower-connector-lora
enable-trace-replay engram-config fault-tolerance-config fingerprint-mode fingerprint-value
grpc-port jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend
kv-cache-dtype-skip-layers kv-cache-metrics-sample long-prefill-token-threshold-adaptive
mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds
mamba-config mamba-ssm-cache-dtype mamba-ssu-algorithm max-lora-cls-labels mm-device-do-normalize
mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
mm-encoder-fp8-scale-save-path mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-device
mm-shm-cache-max-object-size-mb mm-tensor-ipc model-weights offload-num-in-group offload-params
offload-prefetch-step prefill-schedule-interval prefix-cache-retention-interval prefix-match-unit
reasoning-config replayssm-buffer-len return-sampling-mask sleep-mode-offload-cudagraph
sleep-preserve-parameter-names sparse-indexer-topk-backend specialize-active-lora swa-bounded-replay
tokens-only tool-strict-level trust-request-mm-kwargs ubatch-size use-replayssm video-pruning-method
watermark watermark-config weight-transfer-config
"""
"""Flags of ``vllm serve`` 0.32 that came after those of the versions before."""
OTHERS = (
    "enable-hierarchical-cache", "disaggregation-transfer-backend", "enable-deterministic-inference",
    "migration-limit", "enable-memory-saver",
)  # fmt: skip
"""Flags of SGLang, and one of Dynamo."""


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
        name = flag.here.split()[0].partition(".")[0]  # such as --eplb-config.num_redundant_experts
        assert name in flags.make_parser(ServeConfig, prog="", description="")._option_string_actions


@pytest.mark.parametrize("name", [*VLLM_0_32.split(), *OTHERS])
def test_those_of_newer_versions_are_known(name: str) -> None:
    assert ForeignFlags(FOREIGN).find(name) is not None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dp-sync-interval", "16"], "--dp-sync-interval 16 ignored: instances agree before every step"),
        (["--watermark=0.01"], "--watermark 0.01 ignored: the scheduler plans its steps by itself"),
        (["--elastic-ep-max-dp-size", "8"], "--elastic-ep-max-dp-size 8 ignored: lockstep scale adds"),
        (["--fault-tolerance-config.x", "1"], '--fault-tolerance-config {"x": 1} ignored: a member that'),
        (["--no-enable-trace-replay"], "--no-enable-trace-replay ignored: it is always so"),
        (["--migration-limit", "3"], "--migration-limit 3 ignored: requests go on at another instance"),
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
        (["--no-fully-sharded-loras"], "--no-fully-sharded-loras ignored: it is always so"),
        (["--enable-sleep-mode"], "--enable-sleep-mode ignored: instances can always sleep, by POST /sleep"),
        (["--enable-memory-saver"], "--enable-memory-saver ignored: instances can always sleep"),
        (
            ["--weight-transfer-config.backend", "nccl"],
            '--weight-transfer-config {"backend": "nccl"} ignored: calls of the admin API',
        ),
        (["--enable-dbo"], "--enable-dbo ignored: the scheduler plans its steps by itself"),
    ],
)
def test_what_changes_nothing_is_ignored_and_takes_no_other_word(argv: list[str], said: str) -> None:
    config, (line,) = parse(*argv, "/m", "--port", "81")
    assert line.startswith(said)
    assert (config.engine.model.model, config.http.port) == ("/m", 81)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--quantization-config", "{}"],
            "--quantization-config {} is not possible: how a checkpoint is quantised is seen in it",
        ),
        (["--fully-sharded-loras"], "--fully-sharded-loras is not possible: adapters are given by"),
        (["--lora-paths", "a=b", "c=d"], "--lora-paths a=b c=d is not possible: adapters are given"),
        (["-dph"], "--data-parallel-hybrid-lb is not possible: one endpoint serves all instances"),
        (
            ["--cpu-offload-gb", "2"],
            "--cpu-offload-gb 2 is not possible: weights stay in the memory of their",
        ),
        (["--enable-return-routed-experts"], "is not possible: requests ask for it, each with return_routed"),
        (["--return-sampling-mask"], "--return-sampling-mask is not possible: answers have tokens"),
        (["--watermark-config.method", "x"], '--watermark-config {"method": "x"} is not possible: answers'),
        (
            ["--enable-hierarchical-cache"],
            "--enable-hierarchical-cache is not possible: --kv-cache-dir keeps KV blocks",
        ),
        (["--dp-sync-intervall", "4"], "unrecognized arguments: --dp-sync-intervall 4 (see"),
        (
            ["--weight-transfer", "4"],
            "unrecognized arguments: --weight-transfer 4; did you mean --weight-transfer-dir?",
        ),
        (["--dtyp", "float32"], "unrecognized arguments: --dtyp float32; did you mean --dtype?"),
        (["--model", "other"], "MODEL is given twice, as '/m' and as 'other': give one of them"),
        (["--tp", "2"], "--tp is --tensor-parallel-size (-tp) here"),
        (["--model-path", "x"], "--model-path is MODEL (the first argument) here"),
        (["--context_length=5"], "--context-length is --max-model-len here"),
        (["--enable-deterministic-inference"], "--enable-deterministic-inference is --batch-invariant here"),
        (["--disable-radix-cache"], "--disable-radix-cache is --no-enable-prefix-caching here"),
        (["--swap-space"], "argument --swap-space: expected one argument"),
        (["--max-model-length", "4"], "unrecognized arguments: --max-model-length 4; did you mean --max-mod"),
        (["--max_model_length=4"], "--max_model_length=4; did you mean --max-model-len?"),
        (["--enable-lor"], "unrecognized arguments: --enable-lor"),
    ],
)
def test_what_means_something_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, "/m", *argv)


@pytest.mark.parametrize("flag", [flag for flag in FOREIGN if flag.instead], ids=lambda flag: flag.name)
def test_what_the_page_calls_refused_is_refused(flag: Foreign) -> None:
    value = "true" if flag.is_switch else "any other"
    with pytest.raises(ForeignError, match=re.escape(f"is not possible: {flag.instead}")):
        ForeignFlags(FOREIGN).take(flag, value)


def test_a_model_may_be_named_twice_if_it_is_the_same() -> None:
    config, _ = parse("/m", "--model", "/m")
    assert config.engine.model.model == "/m"
    assert parse("--model", "/m")[0].engine.model.model == "/m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("swap-space: 4", f"--swap-space 4 ignored: {NO_SWAP}"),
        ("fully_sharded_loras: false", "--no-fully-sharded-loras ignored: it is always so"),
        (
            "mm-processor-cache-gb: 2",
            "--mm-processor-cache-gb 2 ignored: only text is served",
        ),
        ("quantization-config:", None),
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
        ("fully-sharded-loras: true", "--fully-sharded-loras is not possible: adapters are given"),
        ("lora-paths: [a=b, c=d]", "--lora-paths a=b c=d is not possible: adapters are given"),
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
        config = llm_config({"model": "/m", "swap_space": 4, "cpu_offload_gb": 0, "quantization": None})
    assert config.engine.model.model == "/m"
    assert caplog.messages == [
        f"swap_space 4 ignored: {NO_SWAP}",
        "cpu_offload_gb 0 ignored: it is always so",
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
