from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.process import process
from coordinator.settings import flags
from engine.config.speculation import SpeculativeConfig
from router.config import ServeConfig


def parse(*argv: str) -> ServeConfig:
    return flags.parse(ServeConfig, argv, prog="serve", description="")


def test_vllm_spellings() -> None:
    config = parse(
        "/m", "-dp", "4", "-dpl", "2", "-dpr", "2", "-dpa", "127.0.0.1", "-dpp", "62300", "--headless",
        "--max-model-len", "8K", "--kv-cache-memory-bytes", "2g", "--no-enable-prefix-caching",
        "--served-model-name", "a", "b",
    )  # fmt: skip
    assert config.engine.model.model == "/m"
    assert (config.mesh.data_parallel_size, config.mesh.local_size) == (4, 2)
    assert config.mesh.data_parallel_start_rank == 2
    assert config.mesh.coordinator_endpoint == "tcp://127.0.0.1:62300"
    assert config.mesh.headless
    assert config.engine.model.max_model_len == 8192
    assert config.engine.cache.kv_cache_memory_bytes == 2 * 10**9
    assert not config.engine.cache.enable_prefix_caching
    assert config.engine.model.served_model_name == ("a", "b")


def test_long_flags_may_have_underscores() -> None:
    config = parse(
        "--max_model_len", "1K", "--served_model_name=a_b", "--no_enable_prefix_caching", "--data-parallel_rank",
        "0", "--chat_template", "x_y", "--", "/m_n",
    )  # fmt: skip
    assert config.engine.model.max_model_len == 1024
    assert config.engine.model.served_model_name == ("a_b",)
    assert not config.engine.cache.enable_prefix_caching
    assert config.mesh.data_parallel_start_rank == 0
    assert (config.http.chat_template, config.engine.model.model) == ("x_y", "/m_n")


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "5"],
        [
            "--speculative_config.method=ngram",
            "--port",
            "81",
            "--speculative-config.num_speculative_tokens=5",
        ],
        ["--served-model-name", "a", "-sc.method=ngram", "-sc.num_speculative_tokens", "5"],
        ["-sc", '{"method": "ngram", "num_speculative_tokens": 5}'],
    ],
)
def test_json_objects_may_be_given_in_parts(argv: list[str]) -> None:
    config = parse(*argv, "/m")
    assert config.engine.scheduler.speculative == SpeculativeConfig(num_speculative_tokens=5)
    assert config.engine.model.model == "/m"


def test_parts_of_json_objects_have_types_and_parts() -> None:
    config = parse(
        "--default-chat-template-kwargs.a.b", "-1.5", "--default-chat-template-kwargs.a.c", "x.y=z",
        "--default-chat-template-kwargs.on", "--port", "81", "--default-chat-template-kwargs.list=[1]",
    )  # fmt: skip
    assert config.http.template_kwargs == {"a": {"b": -1.5, "c": "x.y=z"}, "on": True, "list": [1]}
    assert config.http.port == 81


def test_the_context_may_be_called_auto(tmp_path: Path) -> None:
    (tmp_path / "mesh.yaml").write_text("max-model-len: auto")
    for argv in (["--max-model-len", "auto"], ["--config", str(tmp_path / "mesh.yaml")]):
        assert parse(*argv).engine.model.max_model_len == -1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flags.parse(ServeConfig, ["--version"], prog="serve", description="", version="lockstep 1.2")
    assert (ended.value.code, capsys.readouterr().out) == (0, "lockstep 1.2\n")


def test_help_is_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "--cudagraph-capture-sizes int [int ...]" in said
    assert "HTTP methods allowed to --allowed-origins (CORS). (default: *)" in said
    assert "Path prefix at which a proxy serves the endpoint. --allowed-origins" in said
    assert not [word for word in ("Annotated", "(default: )", "(default: (", "<class") if word in said]


@pytest.mark.parametrize("spelling", ["-dpr", "-dpn", "--data-parallel-rank", "--data-parallel-start-rank"])
def test_both_spellings_of_the_rank(spelling: str) -> None:
    assert parse("-dp", "2", spelling, "1", "--headless").mesh.data_parallel_start_rank == 1


def test_local_instances() -> None:
    assert parse().mesh.local_size == 1
    assert parse("-dp", "3").mesh.local_size == 3
    assert parse("-dp", "3", "-dpr", "1", "--headless").mesh.local_size == 1
    assert parse("-dp", "3", "-dpl", "0").mesh.local_size == 0
    assert parse("--headless").mesh.local_size == 1


def test_rendered_flags_give_the_same_config() -> None:
    config = parse("/m", "-dp", "2", "--headless", "--dtype", "bfloat16", "--response-role", "x y")
    assert flags.parse(ServeConfig, flags.to_argv(config), prog="serve", description="") == config


@pytest.mark.parametrize("methods", ["[]", "[GET]", "['[a', '-b', 'c d', \"e'f\"]"])
def test_lists_of_a_file_reach_those_who_are_started(tmp_path: Path, methods: str) -> None:
    (tmp_path / "mesh.yaml").write_text(f"allowed-methods: {methods}")
    config = parse("--config", str(tmp_path / "mesh.yaml"))
    assert flags.parse(ServeConfig, flags.to_argv(config), prog="serve", description="") == config


def test_yaml_lies_under_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("model: /m\ndata-parallel-size: 4\nmax-model-len: 8k\nenable_prefix_caching: false\n")
    config = parse("--config", str(file), "-dp", "2")
    assert config.engine.model.model == "/m"
    assert config.mesh.data_parallel_size == 2
    assert config.engine.model.max_model_len == 8000
    assert not config.engine.cache.enable_prefix_caching


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-dp", "0"], "--data-parallel-size: Expected `int` >= 1"),
        (["-dp", "x"], "--data-parallel-size must be a number, not 'x'"),
        (["-dp", "2", "-dpr", "2"], "rank 2 is out of range: with -dp 2 ranks are 0 to 1"),
        (["-dp", "4", "-dpl", "2", "-dpr", "3"], "need ranks up to 4, but -dp 4 has ranks 0 to 3"),
        (["-dp", "2", "-dpl", "3"], "-dpl 3 local instances are more than -dp 2 in all"),
        (["--headless", "-dpl", "0"], "--headless with -dpl 0 starts nothing"),
        (["-dpa", "10.0.0.1"], "so the mesh needs a key: make one with `lockstep keygen FILE`"),
        (["--instance-address", "10.0.0.1"], "--instance-address 10.0.0.1 is not loopback"),
        (
            ["-dpa", "0.0.0.0", "--mesh-key-file", "k"],
            "names no address that others could connect to; choose",
        ),
        (["--instance-address", "::", "--insecure-mesh"], "--instance-address :: names no address"),
        (["-tp", "2", "--distributed-executor-backend", "uni"], "uni runs one worker, -tp 2 -pp 1 needs 2"),
        (
            ["--max-model-len", "8q"],
            "--max-model-len must be a number like 8192, 8k (8000), 8K or 2G, not '8q'",
        ),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--max-num-batched-tokens", "4"], "must be at least --max-num-seqs 128"),
        (["--max-num-seqs", "100000000"], "--max-num-seqs: Expected `int` <= 65536"),
        (["-dp", "100000000"], "--data-parallel-size: Expected `int` <= 65536"),
        (["-asc", "100000"], "--api-server-count: Expected `int` <= 256"),
        (["--startup-timeout", "nan"], "--startup-timeout must be a number of at most"),
        (["--drain-timeout", "inf"], "--drain-timeout must be a number of at most"),
        (["--seed", "9" * 30], "--seed must be a number of at most 9223372036854775807, not 9999"),
        (["--max-num-batched-tokens", "9e30T"], "--max-num-batched-tokens must be a number of at most"),
        (["--max-model-len", "infK"], "--max-model-len must be a number like 8192"),
        (["-dpa", "127.example.org"], "127.example.org is not loopback, so the mesh needs a key"),
        (
            ["--admin-port", "9", "--admin-host", "127.example.org"],
            "--admin-host 127.example.org is not loopback: give --admin-api-key",
        ),
        (["--shadow-rate", "1.5"], "--shadow-rate 1.5 is no share of requests: give 0 (none) to 1 (all)"),
        (["--shadow-rate", "-0.1"], "--shadow-rate -0.1 is no share of requests"),
        (["--shadow-rate", "nan"], "--shadow-rate must be a number"),
        (["--shadow-action", "drain"], "--shadow-action drain needs --shadow-rate: no request is checked"),
        (["--shadow-action", "kill"], "--shadow-action"),
        (["-dpa", "a..b", "--insecure-mesh"], "--data-parallel-address 'a..b' is no address"),
        (["--kv-cache-memory-bytes", "0"], "--kv-cache-memory-bytes: Expected `int` >= 1"),
        (["--max-request-bytes=-5K"], "--max-request-bytes: Expected `int` >= 1"),
        (["--api-key", ""], "--api-key is empty, which would let everybody in"),
        (["--api-key", "good", "--api-key", " "], "--api-key is empty, which would let everybody in"),
        (["--admin-api-key", ""], "--admin-api-key is empty, which would let everybody in"),
        (["--api-key", "key\n"], "--api-key has blanks around it"),
        (["--host", ""], "--host is empty: 127.0.0.1 is for this machine only, 0.0.0.0 for all"),
        (["--cpu-threads", "100000000"], "--cpu-threads: Expected `int` <= 1024"),
        (["-dpa", ""], "--data-parallel-address '' is no address"),
        (["-dpa", "a b", "--insecure-mesh"], "--data-parallel-address 'a b' is no address"),
        (["--nnodes", "2", "-tp", "2", "--master-addr", "host:5"], "--master-addr 'host:5' is no address"),
        (["--otlp-traces-endpoint", "localhost:4317"], "'localhost:4317' is no URL: write it like http://"),
        (["--served-model-name", ""], "--served-model-name is empty: give a name"),
        (["--config", ""], "--config  cannot be read: No such file or directory"),
        (["/model-\udcff"], "MODEL must be valid UTF-8, not '/model-"),
        (["--cudagraph-capture-sizes", "\udcff"], "--cudagraph-capture-sizes must be valid UTF-8"),
        (["--speculative-config", "{}"], '--speculative-config: the method must be "ngram"'),
        (
            ["--speculative-config", "{}", "--speculative-config.method", "x"],
            "--speculative-config is given as a whole and in parts: give one of them",
        ),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--max-model", "5"], "unrecognized arguments: --max-model"),
        (["--max_model", "5"], "unrecognized arguments: --max_model"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read: No such file or directory"),
        (["--config", "/"], "--config / cannot be read: Is a directory"),
        (["--config", "n" * 300], "cannot be read: File name too long"),
    ],
)
def test_wrong_settings_end_with_a_clear_message(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense: 1", "unknown setting 'nonsense'"),
        ("model: /m\ndata-paralel-size: 2", "unknown setting 'data-paralel-size'"),
        ("seed: 2024-13-45", "is not valid YAML: month must be in 1..12"),
        ("[1, 2]", "must hold settings"),
        ("a: [", "is not valid YAML"),
        ("dtype: int3", "--dtype must be one of auto, float32"),
        ("data-parallel-size: two", "--data-parallel-size must be a number, not 'two'"),
        ("drain-timeout: .inf", "--drain-timeout must be a number of at most"),
        ("served-model-name: {a: 1}", "--served-model-name: Expected `array`, got `object`"),
        ("served-model-name:", "--served-model-name: Expected `array`, got `null`"),
        ("speculative-config: {method: eagle}", "--speculative-config: the method must be"),
        ("allowed-origins: [[a]]", "--allowed-origins: Expected `str`, got `array`"),
    ],
)
def test_wrong_files_too(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_text_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert "is not valid YAML" in capsys.readouterr().err


def test_text_in_a_file_is_taken_as_it_is_written(tmp_path: Path) -> None:
    """YAML would read octal numbers, floats, booleans, dates (an impossible one) and null."""
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "served-model-name: [1.10, 1_000, no, 7, b]\napi-key: 0123\nadmin-api-key: [0x10]\n"
        "revision: 2024-13-45\ntokenizer: null\nhost: 'null'\n"
        "max-model-len: 1_000\nenable-prefix-caching: no\ncollective-timeout: 1.10\n"
    )
    config = parse("--config", str(file))
    assert config.engine.model.served_model_name == ("1.10", "1_000", "no", "7", "b")
    assert (config.http.api_key, config.http.admin_api_key) == (("0123",), ("0x10",))
    assert (config.engine.model.revision, config.http.tokenizer) == ("2024-13-45", None)
    assert config.http.host == "null"
    assert (config.engine.model.max_model_len, config.engine.device.collective_timeout) == (1000, 1.1)
    assert not config.engine.cache.enable_prefix_caching


def test_json_may_be_a_mapping_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    config = parse("--config", str(file))
    speculative = config.engine.scheduler.speculative
    assert speculative is not None
    assert speculative.num_speculative_tokens == 3
    again = parse(*flags.to_argv(config))
    assert again.engine.scheduler.speculative == speculative


def test_every_long_flag_is_a_key_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "data-parallel-rank: 1\nheadless: true\npolicy: round_robin\ndisable-uvicorn-access-log: true\n"
    )
    config = parse("--config", str(file))
    assert config.mesh.data_parallel_start_rank == 1
    assert (config.http.load_balancing_policy, config.http.disable_access_log) == ("round_robin", True)
    assert (
        parse("--config", str(file), "--policy", "least_loaded").http.load_balancing_policy == "least_loaded"
    )


@pytest.mark.parametrize("in_file", [True, False])
def test_paths_may_begin_with_the_home_directory(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "limits.yaml").write_text("a: {requests_per_minute: 1}")
    given = {"mesh-key-file": "~/k", "tokenizer": "~/t", "generation-config": "~", "trace": "~nobody-here/t"}
    given |= {"ssl-keyfile": "~/k.pem", "ssl-certfile": "~/c.pem", "ssl-ca-certs": "~/ca.pem"}
    given["api-key-limits"] = "~/limits.yaml"
    (tmp_path / "mesh.yaml").write_text(
        "\n".join(f"{key}: {json.dumps(path)}" for key, path in given.items())
    )
    flat = [word for key, path in given.items() for word in (f"--{key}", path)]
    config = parse(*(["--config", "~/mesh.yaml"] if in_file else flat))
    http = config.http
    assert (config.mesh.mesh_key_file, http.tokenizer) == (f"{tmp_path}/k", f"{tmp_path}/t")
    assert (http.ssl_keyfile, http.ssl_certfile) == (f"{tmp_path}/k.pem", f"{tmp_path}/c.pem")
    assert (http.ssl_ca_certs, http.generation_config) == (f"{tmp_path}/ca.pem", str(tmp_path))
    assert http.keys == ("a",)
    assert config.engine.device.trace == "~nobody-here/t"


def test_keys_are_given_one_by_one_and_swallow_no_model() -> None:
    config = parse("--api-key", "one", "--api-key", "two", "/m")
    assert config.http.api_key == ("one", "two")
    assert config.engine.model.model == "/m"


def test_secrets_reach_those_who_are_started_in_a_file(tmp_path: Path) -> None:
    config = parse("--api-key", "one", "--api-key", "two", "/m")
    argv = flags.to_argv(config)
    assert not [each for each in argv if "one" in each or "two" in each]
    (tmp_path / "secrets").write_text(json.dumps(flags.secrets_of(config)))
    assert parse(*argv, "--config", str(tmp_path / "secrets")) == config


@pytest.mark.parametrize(
    ("argv", "warning"),
    [
        ([], None),
        (["--mesh-key-file", "k"], None),
        (["-dpa", "10.0.0.1", "--mesh-key-file", "k"], None),
        (["-dpa", "10.0.0.1", "--insecure-mesh"], "anyone on this network can read all requests"),
        (["--instance-address", "10.0.0.1", "--insecure-mesh"], "anyone on this network"),
        (["--mesh-key-file", "k", "--insecure-mesh"], "--insecure-mesh ignored: there is a mesh key"),
    ],
)
def test_an_open_mesh_is_warned_of(
    argv: list[str], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    process.warn_if_open(parse(*argv).mesh)
    if warning is None:
        assert not caplog.messages
    else:
        (said,) = caplog.messages
        assert warning in said


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("-dp", "2", "-dpr", "2", "--headless")
    assert capsys.readouterr().err == (
        "serve: error: --data-parallel-rank 2 is out of range: with -dp 2 ranks are 0 to 1 (see serve --help)\n"
    )
