"""Quotas of keys: the buckets, what front ends share, and answers to clients."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from router.config import HttpConfig
from router.errors import ApiError
from router.http.quotas import Account, QuotaRefusal, Quotas, admit
from router.key_limits import KeyLimits, limits_of
from router.mesh import MeshError, ServedModel
from router.text.tokens import Tokenizer
from tests.router.conftest import request_head, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.waiting import until

PROMPT = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}


def test_a_bucket_holds_a_minute_and_fills_up_steadily() -> None:
    limits = KeyLimits(requests_per_minute=3)
    account = Account(3, 0, 0.0)
    assert [admit(limits, account, 1, 0, 0.0) for _ in range(3)] == [None] * 3
    assert admit(limits, account, 1, 0, 5.0) == QuotaRefusal("3 requests per minute", 15.0)
    assert admit(limits, account, 1, 0, 20.0) is None
    assert admit(limits, account, 1, 0, 20.0) is not None
    assert [admit(limits, account, 1, 0, 10_000.0) is None for _ in range(4)] == [True] * 3 + [False]


def test_output_is_paid_for_afterwards_and_long_prompts_need_a_full_bucket() -> None:
    limits = KeyLimits(tokens_per_minute=600)
    account = Account(0, 600, 0.0)
    assert admit(limits, account, 100, 0, 0.0) is None
    account.tokens -= 700  # it generated so many
    refusal = admit(limits, account, 1, 0, 0.0)
    assert refusal is not None
    assert refusal.retry_after == pytest.approx(20.1)
    assert admit(limits, account, 1, 0, 20.2) is None
    assert admit(limits, account, 9999, 0, 60.0) is not None
    assert admit(limits, account, 9999, 0, 81.0) is None, "else it would never be"


def test_what_a_key_does_not_say_is_general() -> None:
    own = KeyLimits(requests_per_minute=5)
    general = KeyLimits(requests_per_minute=1, concurrent_requests=2)
    assert limits_of(["a", "b"], {"a": own}, general) == [
        KeyLimits(requests_per_minute=5, concurrent_requests=2),
        general,
    ]
    assert limits_of([], {}, general) == [general]


def _take(file: Path, front_end: int, tries: int, taken: multiprocessing.Queue[int]) -> None:
    quotas = Quotas([KeyLimits(requests_per_minute=100)], file=file, front_end=front_end, front_ends=3)
    count = 0
    for _ in range(tries):
        try:
            quotas.admit(0, 1, now=1.0)
        except ApiError:
            continue
        count += 1
    taken.put(count)


@pytest.mark.each_push
def test_front_ends_share_one_quota(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    taken = context.Queue()
    processes = [context.Process(target=_take, args=(tmp_path / "quotas", n, 80, taken)) for n in range(3)]
    for process in processes:
        process.start()
    counts = [taken.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(counts) == 100


def test_what_a_dead_front_end_had_running_is_forgotten_by_its_successor(tmp_path: Path) -> None:
    limits = [KeyLimits(concurrent_requests=2)]
    first = Quotas(limits, file=tmp_path / "q", front_end=0, front_ends=2)
    second = Quotas(limits, file=tmp_path / "q", front_end=1, front_ends=2)
    lease = first.admit(0, 1)
    second.admit(0, 1)
    with pytest.raises(ApiError, match="2 requests at once"):
        first.admit(0, 1)
    assert lease is not None
    lease.end(5)
    lease.end(5)
    assert first.num_running(0) == 1
    assert Quotas(limits, file=tmp_path / "q", front_end=1, front_ends=2).num_running(0) == 0


def test_clients_are_told_when_to_come_again(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(
        "one: {requests_per_minute: 2}\nfew: {concurrent_requests: 1}\nwords: {tokens_per_minute: 4}\n"
    )
    mesh = FakeMesh(served, saying(tokenizer.encode(" Hello world!", add_special_tokens=False)))
    with serving(mesh, HttpConfig(api_key_limits=str(file), api_key=("free",))) as server:

        def ask(key: str, path: str = "/v1/completions", **more: object) -> tuple[int, dict[str, str]]:
            body = {**PROMPT, **more}
            if path == "/v1/messages":
                body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
            answer = server.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            return answer.status_code, dict(answer.headers)

        assert ask("nobody")[0] == 401
        assert [ask("one")[0], ask("one", stream=True)[0]] == [200, 200]
        status, headers = ask("one")
        assert (status, headers["retry-after"], headers["x-should-retry"]) == (429, "30", "true")
        assert ask("one", "/v1/messages")[0] == 429
        assert [ask("free")[0] for _ in range(4)] == [200] * 4
        assert ask("words")[0] == 200
        status, headers = ask("words")
        assert status == 429
        assert int(headers["retry-after"]) > 1
        refusal = server.client.post(
            "/v1/completions", json=PROMPT, headers={"authorization": "Bearer one"}
        ).json()
        assert refusal["error"]["type"] == "RateLimitError"
        assert "2 requests per minute" in refusal["error"]["message"]
        for _ in range(3):
            assert ask("few")[0] == 200, "each had ended before the next one came"
        mesh.script = lambda prompt: []
        with server.connect() as connection:
            body = b'{"prompt": "Hello", "stream": true}'
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer few\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: mesh.num_open == 1)
            assert ask("few")[0] == 429
        server.wait_until_idle()
        mesh.script = saying(tokenizer.encode(" Hello", add_special_tokens=False))
        assert ask("few")[0] == 200, "a client that hangs up gives its place back"
        server.wait_until_idle()


def test_who_has_used_up_its_quota_costs_no_tokenising(served: ServedModel, tmp_path: Path) -> None:
    """Its prompt is not looked at: what is wrong with it is not found."""
    file = tmp_path / "limits.yaml"
    file.write_text(
        "one: {requests_per_minute: 1}\nfew: {concurrent_requests: 1}\nwords: {tokens_per_minute: 4}\n"
    )
    mesh = FakeMesh(served, saying([70, 71, 72]))
    with serving(mesh, HttpConfig(api_key_limits=str(file))) as server:

        def ask(key: str, prompt: object) -> int:
            headers, body = {"authorization": f"Bearer {key}"}, {**PROMPT, "prompt": prompt}
            return server.client.post("/v1/completions", json=body, headers=headers).status_code

        for key in ("one", "words"):
            assert [ask(key, []), ask(key, "Hello"), ask(key, [])] == [400, 200, 429]
        mesh.script = lambda prompt: []
        with server.connect() as connection:
            body = b'{"prompt": "Hello", "stream": true}'
            connection.sendall(request_head(len(body), b"Authorization: Bearer few\r\n") + body)
            until(lambda: mesh.num_open == 1)
            assert ask("few", []) == 429
        server.wait_until_idle()


def test_what_the_mesh_does_not_take_costs_nothing(
    served: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text("one: {requests_per_minute: 1, tokens_per_minute: 100}\n")
    ids = tokenizer.encode(" Hello", add_special_tokens=False)
    mesh = FakeMesh(served, saying(ids))
    with serving(mesh, HttpConfig(api_key_limits=str(file))) as server:

        def ask(**more: object) -> int:
            headers = {"authorization": "Bearer one"}
            return server.client.post("/v1/completions", json={**PROMPT, **more}, headers=headers).status_code

        for stream in (False, True, False):
            mesh.refusal = MeshError(503, "ServiceUnavailableError", "full", retry_after=1)
            assert ask(stream=stream) == 503
        mesh.reset(saying(ids))
        assert ask() == 200
        assert ask() == 429
        server.wait_until_idle()


def test_a_bad_file_of_limits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--api-key-limits .*none: No such file"):
        HttpConfig(api_key_limits=str(tmp_path / "none"))
    (tmp_path / "bad").write_text("a: {requests_per_hour: 1}")
    with pytest.raises(ValueError, match="requests_per_hour"):
        HttpConfig(api_key_limits=str(tmp_path / "bad"))


def test_deadline_and_session_come_by_header(served: ServedModel, tokenizer: Tokenizer) -> None:
    mesh = FakeMesh(served, lambda prompt: [])
    with serving(mesh, HttpConfig()) as server:
        for path, body in (
            ("/v1/completions", PROMPT),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {"input": "Hi"}),
            (
                "/v1/messages",
                {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]},
            ),
        ):
            headers = {"x-request-timeout": "0.05", "x-session-affinity": "s1", "x-data-parallel-rank": "3"}
            late = server.client.post(path, json=body, headers=headers)
            assert (late.status_code, late.headers["x-should-retry"]) == (504, "false"), path
            assert mesh.prompts[-1].session == "s1"
            assert mesh.prompts[-1].rank == 3
            bad = server.client.post(path, json=body, headers={"x-request-timeout": "soon"})
            assert bad.status_code == 400
        server.post("/v1/completions", {**PROMPT, "session_id": "mine", "timeout": 0.05})
        assert mesh.prompts[-1].session == "mine"
        server.post("/v1/completions", {**PROMPT, "prompt_cache_key": "k" * 999, "timeout": 0.05})
        assert mesh.prompts[-1].session == "k" * 256, "OpenAI's name for it"
        server.wait_until_idle()
