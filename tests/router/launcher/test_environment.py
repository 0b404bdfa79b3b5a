from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest

from coordinator.process import process
from router.config import ServeConfig
from router.launcher import serve
from router.launcher.environment import key_of_client
from router.launcher.launch import Doors, process_table


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What ``serve`` would start, with no key in the environment of the tests."""
    configs: list[ServeConfig] = []

    def run(config: ServeConfig, *_: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(serve, "_run", run)
    monkeypatch.setattr(process, "set_up", lambda *_: None)  # its log is of this process, too
    for name in ("LOCKSTEP_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return configs


@pytest.mark.parametrize(
    ("variables", "argv", "key", "named"),
    [
        ({}, [], (), ""),
        ({"LOCKSTEP_API_KEY": "one"}, [], ("one",), "LOCKSTEP_API_KEY"),
        ({"VLLM_API_KEY": "two"}, [], ("two",), "VLLM_API_KEY"),
        ({"VLLM_API_KEY": "two", "LOCKSTEP_API_KEY": "one"}, [], ("one",), "LOCKSTEP_API_KEY"),
        ({"LOCKSTEP_API_KEY": "one"}, ["--api-key", "three"], ("three",), ""),
        ({"LOCKSTEP_API_KEY": "one"}, ["--headless"], (), ""),
    ],
)
def test_the_endpoint_has_the_key_of_the_environment(
    variables: dict[str, str],
    argv: list[str],
    key: tuple[str, ...],
    named: str,
    started: list[ServeConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "serve"):
        assert serve.main_serve(argv) == 0
    assert started[0].http.api_key == key
    assert [line for line in caplog.messages if "API_KEY" in line] == (
        [f"clients must present the key in {named}, since no --api-key is given"] if named else []
    )
    assert "one" not in " ".join(caplog.messages).split()


def test_routers_read_it_from_the_file_of_secrets(
    started: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "hidden")
    serve.main_serve([])
    (config,) = started
    descriptor = serve.secret_file(config)
    assert descriptor is not None
    doors = Doors(http=7, secrets=descriptor)
    try:
        assert json.loads(os.pread(descriptor, 99, 0)) == {"api_key": ["hidden"]}
        table = process_table(config, None, 2, doors=doors)
        assert not [word for spec in table for word in spec.argv if "hidden" in word]
        assert f"--config=/proc/self/fd/{descriptor}" in table[-1].argv
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("key", ["", " ", "a\n"])
def test_a_variable_that_holds_no_key_is_refused(
    key: str, started: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert serve.main_serve([]) == 2
    assert not started
    assert "serve: error: VLLM_API_KEY " in capsys.readouterr().err


def test_clients_present_the_key_of_the_endpoint() -> None:
    assert key_of_client({}) is None
    assert key_of_client({"OPENAI_API_KEY": "", "VLLM_API_KEY": "a"}) == "a"
    assert key_of_client({"OPENAI_API_KEY": "b", "VLLM_API_KEY": "a"}) == "b"
    assert key_of_client({"OPENAI_API_KEY": "b", "LOCKSTEP_API_KEY": "c"}) == "c"
