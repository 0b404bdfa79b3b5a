"""Each wrong file of a TLS endpoint is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.settings import flags
from router.config import HttpConfig, ServeConfig
from router.epp.certificate import CertificateError, certificate, self_signed
from router.http.tls import tls_problem
from router.launcher.preflight import problem_with

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of key and certificate, a key with a passphrase, and a text."""
    from cryptography.hazmat.primitives import serialization

    directory = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        key, chain = self_signed("localhost")
        (directory / f"{name}.key").write_bytes(key)
        (directory / f"{name}.crt").write_bytes(chain)
    locked = serialization.load_pem_private_key((directory / "one.key").read_bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (directory / "locked.key").write_bytes(locked)
    (directory / "text").write_text("no PEM")
    return directory


@pytest.mark.parametrize(
    ("key", "chain", "authorities", "problem"),
    [
        ("one.key", "one.crt", None, None),
        ("one.key", "one.crt", "two.crt", None),
        ("none", "one.crt", None, "--ssl-keyfile {0}/none cannot be read: No such file or directory"),
        ("one.key", "none", None, "--ssl-certfile {0}/none cannot be read: No such file or directory"),
        ("one.key", "one.crt", "none", "--ssl-ca-certs {0}/none cannot be read: No such file or directory"),
        ("text", "one.crt", None, "--ssl-keyfile {0}/text is no private key in PEM: "),
        ("one.crt", "one.crt", None, "--ssl-keyfile {0}/one.crt is no private key in PEM: "),
        ("one.key", "text", None, "--ssl-certfile {0}/text is no certificate in PEM: "),
        ("one.key", "one.key", None, "--ssl-certfile {0}/one.key is no certificate in PEM: "),
        ("one.key", "one.crt", "text", "--ssl-ca-certs {0}/text is no certificate in PEM: "),
        (
            "two.key",
            "one.crt",
            None,
            "--ssl-keyfile {0}/two.key is not the key of --ssl-certfile {0}/one.crt",
        ),
        (
            "locked.key",
            "one.crt",
            None,
            "--ssl-keyfile {0}/locked.key has a passphrase: give the key without",
        ),
    ],
)
def test_the_wrong_file_is_named_before_anything_starts(
    files: Path, key: str, chain: str, authorities: str | None, problem: str | None
) -> None:
    argv = ["--ssl-keyfile", str(files / key), "--ssl-certfile", str(files / chain)]
    if authorities is not None:
        argv += ["--ssl-ca-certs", str(files / authorities)]
    config = flags.parse(ServeConfig, argv, prog="serve", description="")
    found = problem_with(config)
    if problem is None:
        assert found is None
    else:
        assert (found or "").startswith(problem.format(files))
    headless = flags.parse(ServeConfig, [*argv, "--headless"], prog="serve", description="")
    assert problem_with(headless) is None, "no router is here"


def test_without_tls_nothing_is_looked_at() -> None:
    assert tls_problem(HttpConfig()) is None


def test_the_pair_of_a_picker_is_looked_at_too(files: Path, tmp_path: Path) -> None:
    (tmp_path / "tls.key").write_bytes((files / "one.key").read_bytes())
    (tmp_path / "tls.crt").write_bytes((files / "two.crt").read_bytes())
    with pytest.raises(CertificateError, match=r"--cert-path: .*tls\.key is not the key of .*tls\.crt"):
        certificate(tmp_path, "localhost")
    (tmp_path / "tls.crt").write_bytes((files / "one.crt").read_bytes())
    assert certificate(tmp_path, "localhost")[1] == (files / "one.crt").read_bytes()
