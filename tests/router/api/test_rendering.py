"""Chats and completions as token ids, and that these give the same requests."""

from __future__ import annotations

from tests.router.conftest import Server
from tests.router.fake_mesh import saying

IDS = [70, 71, 72]
CHAT = {
    "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 3, "temperature": 0.5,
    "seed": 7, "stop": ["x"], "logprobs": True, "top_logprobs": 2, "cache_salt": "s", "priority": 1,
}  # fmt: skip


def test_a_rendered_chat_is_the_same_request(server: Server) -> None:
    server.mesh.script = saying(IDS)
    assert server.post("/v1/chat/completions", CHAT).status_code == 200
    asked = server.mesh.prompts[-1]
    rendered = server.post("/v1/chat/completions/render", CHAT | {"request_id": "mine"}).json()
    assert rendered["request_id"] == "chatcmpl-mine"
    assert rendered["token_ids"] == asked.prompt_ids
    assert rendered["features"] is None
    assert server.post("/inference/v1/generate", rendered).status_code == 200
    again = server.mesh.prompts[-1]
    assert (again.prompt_ids, again.params, again.seed) == (asked.prompt_ids, asked.params, asked.seed)


def test_each_prompt_of_a_completion(server: Server) -> None:
    body = {"prompt": [[64], [65, 66]], "max_tokens": 2, "logprobs": 1, "request_id": "mine"}
    one, two = server.post("/v1/completions/render", body).json()
    assert [one["request_id"], two["request_id"]] == ["cmpl-mine-0", "cmpl-mine-1"]
    assert two["token_ids"] == [65, 66]
    assert two["sampling_params"] == {"logprobs": 1, "max_tokens": 2}


def test_what_token_ids_cannot_carry_is_refused(server: Server) -> None:
    schema = CHAT | {"response_format": {"type": "json_object"}}
    answer = server.post("/v1/chat/completions/render", schema)
    assert answer.status_code == 400
    assert "send the request itself" in answer.json()["error"]["message"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    assert server.post("/v1/chat/completions/render", body).status_code == 400


def test_small_calls_of_trainers(server: Server) -> None:
    assert server.post("/finish_session?session_id=t", {}).json() == {}
    assert server.client.get("/health_generate").status_code == 200
