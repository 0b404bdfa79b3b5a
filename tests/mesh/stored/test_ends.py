"""SIGTERM of ``serve``, and ``lockstep batch`` with a file of vLLM's run-batch."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from router.stored.database import StoreDatabase
from router.stored.store import AnswerState, AnswerStore, StoredAnswer
from tests.mesh.harness import Ports, serve
from tests.mesh.stored.test_router_deaths import _call

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def test_sigterm_lets_an_answer_in_the_background_end(tmp_path: Path) -> None:
    ports, path = Ports(), tmp_path / "answers"
    flags = [
        "lockstep-moe",
        "-dp",
        "1",
        "--store-path",
        str(path),
        "--shutdown-timeout",
        "120",
        *ports.head(),
    ]
    body = {"model": "lockstep-moe", "input": "Chapter one", "max_output_tokens": 1500, "ignore_eos": True}
    with serve(tmp_path / "serve.log", *flags) as command:
        command.wait_for("1 instance ready")
        begun = asyncio.run(_call(ports.url, "POST", "", body | {"background": True}))
        assert begun["status"] == "queued"
        assert command.stop(signal.SIGTERM, 150) == 0
    database = StoreDatabase(path, most_bytes=1 << 30, lasts=False)

    async def found() -> StoredAnswer | None:
        rows = await database.run(lambda session: session.execute("SELECT id FROM answers").fetchall())
        return await AnswerStore(database).get(rows[0][0])

    row = asyncio.run(found())
    database.close()
    assert row is not None
    assert row.state is AnswerState.DONE
    assert json.loads(row.answer or b"")["usage"]["output_tokens"] == 1500


def test_a_file_of_vllms_run_batch_runs_unchanged(tmp_path: Path) -> None:
    source, output = tmp_path / "openai_example_batch.jsonl", tmp_path / "results.jsonl"
    lines = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "lockstep-moe",
                "messages": [
                    {"role": "system", "content": told},
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_completion_tokens": 20,
            },
        }
        for number, told in enumerate(("You are a helpful assistant.", "You are an unhelpful assistant."), 1)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["batch", "-i", str(source), "-o", str(output), "--model", "lockstep-moe"]
    start = "import sys; from router.launcher.entry import lockstep; sys.exit(lockstep())"
    done = subprocess.run(
        [sys.executable, "-c", start, *argv], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == ["request-1", "request-2"]
    for each in answers:
        assert set(each) == {"id", "custom_id", "response", "error"}
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"][0]["message"]["content"]
