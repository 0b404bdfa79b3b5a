"""Text side of a tiny model, and a real HTTP server before a scripted mesh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
import uvicorn
import uvloop

from router.app.app import make_app
from router.app.middleware import RootPath
from router.app.store_work import StoreWork
from router.config import HttpConfig
from router.http.connection import PatientProtocol
from router.mesh import ServedModel
from router.metrics.metrics import Metrics
from router.stored.store import AnswerStore
from router.text.text_model import TextModel, load_text_model
from router.text.tokens import Tokenizer
from tests.router import tiny_tokenizer
from tests.router.fake_mesh import FakeMesh, saying
from tests.router.postgres import new_database
from tests.router.postgres import server as postgres_server
from tests.waiting import until

MAX_MODEL_LEN = 256
VOCAB_SIZE = 512
"""Tokens of the model: more than the tokenizer has, as in padded models."""
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def served(model_directory: Path) -> ServedModel:
    return ServedModel(("tiny", "other/name"), str(model_directory), VOCAB_SIZE, MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def text_model(served: ServedModel) -> TextModel:
    return load_text_model(served, HttpConfig())


@pytest.fixture(scope="session")
def tokenizer(text_model: TextModel) -> Tokenizer:
    return text_model.tokenizer


class Server:
    """A running endpoint."""

    def __init__(
        self, mesh: FakeMesh, metrics: Metrics, port: int, connections: Collection[object] = ()
    ) -> None:
        self.mesh = mesh
        self.metrics = metrics
        self.port = port
        self.connections = connections
        """Open connections of the server."""
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx2.Client(base_url=self.url, timeout=10, trust_env=False)

    def post(self, path: str, body: object) -> httpx2.Response:
        return self.client.post(path, json=body)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def wait_until_idle(self) -> None:
        """Wait until all generations of the mesh are closed and no request counts as running."""
        until(lambda: self.mesh.num_open == 0 and self.metrics.in_flight == 0)


@contextlib.contextmanager
def serving(mesh: FakeMesh, config: HttpConfig, store: AnswerStore | None = None) -> Iterator[Server]:
    """uvicorn on a free loopback port, in a thread of its own."""
    metrics = Metrics(mesh)
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(mesh, config, metrics, store=store)
    settings = uvicorn.Config(
        RootPath(app, config.root_path),
        http=PatientProtocol,
        loop="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=config.timeout_keep_alive,
    )
    uvicorn_server = uvicorn.Server(settings)

    async def serve() -> None:
        work: StoreWork | None = app.state.work
        beside = [] if work is None else [asyncio.create_task(work.keep())]
        await uvicorn_server.serve(sockets=[listener])
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        if work is not None:
            await work.drain()
            work.give_up()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    server = Server(mesh, metrics, listener.getsockname()[1], uvicorn_server.server_state.connections)
    try:
        until(lambda: uvicorn_server.started)
        yield server
    finally:
        server.client.close()
        uvicorn_server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a store may be: a file, or a fresh database."""
    if request.param == "sqlite":
        return tmp_path / "answers"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture(params=["sqlite", "postgres"] if os.environ.get("LOCKSTEP_NIGHTLY") == "1" else ["sqlite"])
def endpoint_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """As ``place``, for tests of endpoints: a database at night only."""
    if request.param == "sqlite":
        return tmp_path / "answers"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture(scope="session")
def shared_server(served: ServedModel, tokenizer: Tokenizer) -> Iterator[Server]:
    with serving(FakeMesh(served, saying([])), HttpConfig(max_request_bytes=1024**2)) as server:
        yield server


@pytest.fixture
def server(shared_server: Server, tokenizer: Tokenizer) -> Iterator[Server]:
    """Server that answers " Hello world!"; it must be idle when a test ends."""
    shared_server.mesh.reset(saying(tokenizer.encode(" Hello world!", add_special_tokens=False)))
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def events(text: str) -> list[Any]:
    """The chunks of a stream that ended well."""
    *chunks, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [msgspec.json.decode(chunk.removeprefix("data: ")) for chunk in chunks]


def request_head(length: int, more: bytes = b"") -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + more
        + b"Content-Length: %d\r\n\r\n" % length
    )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a key and of a certificate for 127.0.0.1 that signs itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    key, chain = str(directory / "key.pem"), str(directory / "cert.pem")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", chain],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return key, chain
