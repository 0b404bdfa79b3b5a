"""``lockstep batch``: the input, the answers that are kept, the output."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from router.api.answers import json_response
from router.batches.line_runner import LineRunner
from router.errors import refuse
from router.mesh import ServedModel
from router.metrics.request_histograms import CountedRequests
from router.tools.batch.command import main
from router.tools.batch.file_run import FileRun, WrongFile
from tests.router.fake_mesh import FakeMesh, saying


class Stopped(BaseException):
    """Raised in place of a kill."""


def lines_of(path: Path, count: int = 5) -> Path:
    source = path / "lines.jsonl"
    body = {"model": "tiny", "prompt": "Hello"}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(count)
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return source


class Answers:
    """Handler whose third answer is an error, and that stops after so many."""

    def __init__(self, most: int = 100) -> None:
        self.asked: list[str] = []
        self._most = most

    async def __call__(self, request: Request) -> Response:
        if len(self.asked) == self._most:
            raise Stopped
        id: str = request.state.request_id
        self.asked.append(id)
        await asyncio.sleep(0.001 * (10 - len(self.asked)))  # the first ends last
        if len(self.asked) == 3:
            refuse("wrong")
        return json_response(b'{"said": "%s"}' % id.encode())


def runner_of(handler: Answers, served: ServedModel) -> LineRunner:
    return LineRunner(
        {"/v1/completions": handler}, FakeMesh(served, saying([])), CountedRequests(), Counter(), 99
    )


def test_answers_come_in_the_order_of_the_lines_and_once(tmp_path: Path, served: ServedModel) -> None:
    source, output = lines_of(tmp_path), tmp_path / "answers.jsonl"
    seen: list[bool] = []
    handler = Answers()
    failed = asyncio.run(FileRun(source, output).answer(runner_of(handler, served), 3, seen.append))
    answers = [json.loads(each) for each in output.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == list("01234")
    assert failed == sum(seen) == sum(each["response"]["status_code"] == 400 for each in answers)
    assert len(seen) == len(set(handler.asked)) == 5
    assert {each.name for each in tmp_path.iterdir()} == {"lines.jsonl", "answers.jsonl"}


def test_what_was_answered_before_a_kill_is_not_asked_again(tmp_path: Path, served: ServedModel) -> None:
    source, output = lines_of(tmp_path), tmp_path / "answers.jsonl"
    first = Answers(most=2)
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(FileRun(source, output).answer(runner_of(first, served), 1, lambda _: None))
    (part,) = tmp_path.glob("*.part")
    with part.open("ab") as file:
        file.write(b'{"custom_id": "4", "res')  # cut short
    again, second = FileRun(source, output), Answers()
    assert (again.num_kept, again.total) == (2, 5)
    asyncio.run(again.answer(runner_of(second, served), 4, lambda _: None))
    assert len(second.asked) == 3
    assert not set(first.asked) & set(second.asked)
    assert [json.loads(each)["custom_id"] for each in output.read_text().splitlines()] == list("01234")


def test_a_wrong_file_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = lines_of(tmp_path, 2)
    source.write_text(source.read_text() + source.read_text() + "{no json")
    with pytest.raises(WrongFile, match=r"line 3: .*stands before.*line 5: "):
        FileRun(source, tmp_path / "out")
    assert main([str(source), "-o", str(tmp_path / "out")]) == 2
    assert "line 3" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), "-o", str(tmp_path / "out")]) == 2
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(WrongFile, match="no requests"):
        FileRun(tmp_path / "empty", tmp_path / "out")
