"""Batches of seeded requests, and their answers without what names a run."""

from __future__ import annotations

import io
import json
from typing import Any

import openai

from tests.mesh.harness import wait_until


def batch_lines(count: int, num_tokens: int = 60) -> bytes:
    """File of seeded requests, of ``num_tokens`` each on average: they end one after the other."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "lockstep-moe",
                "messages": [{"role": "user", "content": f"Letter {number} begins"}],
                "max_tokens": 2 + number % (2 * num_tokens),
                "temperature": 0.8,
                "seed": number,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines)


def begin_batch(url: str, lines: bytes) -> str:
    """Id of a new batch."""
    with _client(url) as client:
        file = client.files.create(file=io.BytesIO(lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        return batch.id


def some_done(url: str, id: str) -> dict[str, int] | None:
    """Counts of a batch, once some lines have answers."""
    with _client(url) as client:
        counts = client.batches.retrieve(id).request_counts
        return counts.model_dump() if counts is not None and counts.completed else None


def num_done(url: str, id: str) -> int:
    """Number of a batch's lines that have answers; 0 while no router says so."""
    try:
        return (some_done(url, id) or {"completed": 0})["completed"]
    except (openai.APIConnectionError, openai.InternalServerError):  # it is being killed, or begins
        return 0


def finished(url: str, id: str) -> list[dict[str, Any]]:
    """Lines of a batch's output, once it is completed."""
    with _client(url) as client:
        wait_until(lambda: client.batches.retrieve(id).status == "completed", 500)
        batch = client.batches.retrieve(id)
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        return [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]


def answers_of(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Ids and texts of all lines, in their order."""
    found = [(each["custom_id"], each["response"]["body"]) for each in lines]
    return [(id, body["choices"][0]["message"]["content"]) for id, body in found]


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none")
