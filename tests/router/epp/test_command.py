"""The command line of the picker."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from router.epp import command
from router.epp.certificate import CertificateError, certificate
from router.epp.command import EppConfig, main


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give the routers of the mesh"),
        (["--endpoints", "a:b"], "'a:b' is no endpoint"),
        (["--endpoints", "a:1", "--cert-path", "x"], "--cert-path is for --secure-serving"),
        (["--endpoints", "a:1", "--grpc-port", "9003"], "is --grpc-port, too"),
    ],
)
def test_wrong_flags_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert problem in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("grpc_that_is_not_there", "nowhere.either"))
    assert main(["--endpoints", "127.0.0.1:8000"]) == 2
    assert "pip install 'lockstep-mesh[epp]'" in capsys.readouterr().err


def test_what_decides_prompts_is_passed_on() -> None:
    config = EppConfig(endpoints=("a:1",), root_path="/llm", exclude_tools_when_tool_choice_none=True)
    assert (config.http.root_path, config.http.exclude_tools_when_tool_choice_none) == ("/llm", True)


def test_its_own_certificate_can_be_used(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, chain = certificate(None, "127.0.0.1")
    (tmp_path / "tls.key").write_bytes(key)
    (tmp_path / "tls.crt").write_bytes(chain)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert certificate(tmp_path, "") == (key, chain)


def test_a_directory_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"tls\.key: No such file"):
        certificate(tmp_path, "")
