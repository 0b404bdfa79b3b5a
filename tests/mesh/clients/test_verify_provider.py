"""``examples/verify_provider.py`` against real meshes: an honest provider, and five that are not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.numerics import Numerics
from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.model.finding import MODELS_DIRECTORY
from examples import verify_provider
from router.capsule import FIELD, Capsule, read, written
from tests.mesh.harness import Ports, serve
from tests.nightly import NIGHTLY
from tests.router.tools.verify.answers import honest, named_as
from tests.router.tools.verify.lies import tuned_copy

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

DIRECTORY = MODELS_DIRECTORY / SHIPPED_MODEL
NUM_REQUESTS = 50 if NIGHTLY else 12
REASONING = ["--reasoning-parser", "deepseek_r1"]
SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "16", "--dtype", "bfloat16", *REASONING]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: Gladly. "
)

Change = Callable[[dict[str, Any]], None]
"""What a dishonest provider makes of a request's fields."""
Disguise = Callable[[Capsule, dict[str, Any]], Capsule]
"""What it makes of an answer's capsule, for the fields that the client sent."""


class Provider(ThreadingHTTPServer):
    """A gateway that changes requests, and hides it in the capsules."""

    def __init__(self, mesh: Ports, change: Change, disguise: Disguise) -> None:
        super().__init__(("127.0.0.1", 0), Gateway)
        self.mesh, self.change, self.disguise = mesh, change, disguise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Gateway(BaseHTTPRequestHandler):
    """Handler of a :class:`Provider`."""

    server: Provider

    def do_GET(self) -> None:
        with urllib.request.urlopen(self.server.mesh.url + self.path, timeout=60) as answer:
            self._answer(answer.read())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fields = json.loads(body)
        self.server.change(fields)
        headers = {"Content-Type": "application/json", "X-Lockstep-Capsule": "1"}
        request = urllib.request.Request(
            self.server.mesh.url + self.path, json.dumps(fields).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=120) as found:
            answer = json.load(found)
        capsule = read(json.dumps(answer[FIELD]).encode())
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        capsule = msgspec.structs.replace(self.server.disguise(capsule, json.loads(body)), request=digest)
        self._answer(json.dumps(answer | {FIELD: json.loads(written(capsule))}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def unchanged(_: dict[str, Any]) -> None:
    """The request as it came."""


def no_disguise(capsule: Capsule, _: dict[str, Any]) -> Capsule:
    return capsule


def with_params(capsule: Capsule, **params: Any) -> Capsule:
    prompts = tuple(
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, **params))
        for each in capsule.prompts
    )
    return msgspec.structs.replace(capsule, prompts=prompts)


def cooler(fields: dict[str, Any]) -> None:
    """A temperature at which the model seems better than it is."""
    fields["temperature"] = 0.6 * fields["temperature"]


def as_warm_as_asked(capsule: Capsule, sent: dict[str, Any]) -> Capsule:
    return with_params(capsule, temperature=float(sent["temperature"]))


def briefer(fields: dict[str, Any]) -> None:
    """Reasoning that ends after a few tokens."""
    if "messages" in fields:
        fields["thinking_token_budget"] = 5


def as_thoughtful_as_asked(capsule: Capsule, _: dict[str, Any]) -> Capsule:
    return with_params(capsule, thinking=None)


def of_class(numerics: Numerics) -> Disguise:
    """Capsules that name another class than computed them."""

    def disguise(capsule: Capsule, _: dict[str, Any]) -> Capsule:
        prompts = tuple(
            msgspec.structs.replace(
                prompt,
                samples=tuple(
                    msgspec.structs.replace(each, system_fingerprint=numerics.fingerprint)
                    for each in prompt.samples
                ),
            )
            for prompt in capsule.prompts
        )
        return named_as(
            msgspec.structs.replace(capsule, numerics=(numerics,), prompts=prompts), honest().text
        )

    return disguise


@contextlib.contextmanager
def gateway(mesh: Ports, change: Change, disguise: Disguise) -> Iterator[str]:
    """A dishonest provider in front of a mesh; its address."""
    with Provider(mesh, change, disguise) as provider:
        threading.Thread(target=provider.serve_forever, daemon=True).start()
        yield provider.url
        provider.shutdown()


@contextlib.contextmanager
def mesh_of(log: Path, model: str, *flags: str) -> Iterator[Ports]:
    ports = Ports()
    with serve(log, model, *ports.head(), *SMALL, *flags) as command:
        command.wait_for("1 instance ready")
        yield ports
        assert command.stop() == 0


def check(url: str, directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Exit status of the example, and what it printed."""
    arguments = [
        "--base-url",
        f"{url}/v1",
        "--model",
        str(DIRECTORY),
        "--save",
        str(directory),
        "--seed",
        "3",
    ]
    arguments += ["--requests", str(NUM_REQUESTS), f"--serve={' '.join(REASONING)}"]
    arguments += ["--verify=--cpu-threads 1 --kv-cache-memory-bytes 128M " + " ".join(flags)]
    status = verify_provider.main(arguments)
    return status, capsys.readouterr().out


def test_an_honest_provider_and_two_gateways_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mesh_of(tmp_path / "log", SHIPPED_MODEL) as mesh:
        status, text = check(mesh.url, tmp_path / "honest", capsys)
        assert status == 0, text
        assert f"| all | {NUM_REQUESTS} | {NUM_REQUESTS} | 0 | 0 |" in text
        with gateway(mesh, cooler, as_warm_as_asked) as url:
            status, text = check(url, tmp_path / "sampler", capsys)
        assert status == 1
        assert "differs at token " in text
        assert "another sampling parameter, seed or limit than the capsule names" in text
        with gateway(mesh, briefer, as_thoughtful_as_asked) as url:
            status, text = check(url, tmp_path / "reasoning", capsys)
        assert status == 1
        assert "differs at token 5 of " in text


@pytest.mark.nightly
def test_reasoning_that_a_capsule_names_and_kernels_of_another_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mesh_of(tmp_path / "log", SHIPPED_MODEL) as mesh:
        with gateway(mesh, briefer, no_disguise) as url:
            status, text = check(url, tmp_path / "named", capsys)
        assert status == 1
        assert 'its parameters are not the request\'s: thinking {"tokens":5' in text
        if honest().numerics.kernels != "avx2":
            status, text = check(mesh.url, tmp_path / "close", capsys, "--numerics", "avx2")
            assert status == 3
            close = next(line for line in text.splitlines() if line.startswith("| all |"))
            assert close.endswith(" | 0 |"), "none is wrong"
            assert f"{mesh.url}/v1 may be what it claims to be" in text


@pytest.mark.nightly
def test_a_provider_with_a_quantised_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its capsules name the cache or hide it."""
    with mesh_of(tmp_path / "log", SHIPPED_MODEL, "--kv-cache-dtype", "int8") as mesh:
        status, text = check(mesh.url, tmp_path / "named", capsys)
        assert status == 1
        assert text.count("bfloat16), with --kv-cache-dtype int8") == NUM_REQUESTS
        with gateway(mesh, unchanged, of_class(honest().numerics)) as url:
            status, text = check(url, tmp_path / "hidden", capsys)
        assert status == 1
        assert "it is what the model gives with --kv-cache-dtype int8, which is not its class" in text


@pytest.mark.nightly
def test_a_provider_with_a_fine_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = tuned_copy(tmp_path / "tuned")
    with mesh_of(tmp_path / "log", str(tuned)) as mesh:
        status, text = check(mesh.url, tmp_path / "named", capsys, "--no-explain")
        assert status == 1
        assert "the capsule is of checkpoint " in text
        with gateway(mesh, unchanged, of_class(honest().numerics)) as url:
            status, text = check(url, tmp_path / "hidden", capsys, "--no-explain")
        assert status == 1
        assert "the model gives other log-probabilities" in text


@pytest.mark.nightly
def test_a_provider_with_another_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mesh_of(tmp_path / "log", SHIPPED_MODEL, "--chat-template", TEMPLATE) as mesh:
        status, text = check(mesh.url, tmp_path / "template", capsys)
    assert status == 1
    assert "its prompt differs from the request's at token " in text
    completions = next(line for line in text.splitlines() if line.startswith("| completion "))
    assert completions.endswith(" 0 |"), "a template concerns no completion"
