"""Structured outputs by many schemas at temperature 1, checked one by one.

    python -m tests.mesh.clients.structured --schemas 200
    python -m tests.mesh.clients.structured --schemas 200 --kill

Starts a mesh of two instances on the shipped model. With ``--kill`` the same answers are asked for again while one
of the two is ended with SIGKILL, and must be the same, token for token. An answer that reaches its limit of tokens
is cut and says so (``finish_reason`` "length"); it is counted, not validated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai

from engine.config import SHIPPED_MODEL
from tests.mesh.clients.schemas import schema
from tests.mesh.harness import Ports, serve

MAX_TOKENS = 1500
AT_ONCE = 16
FEW = 2
"""Answers that are there when an instance is killed."""
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "2000", "--max-num-seqs", "32")


@dataclass
class Answer:
    """Answer to a request with one schema."""

    text: str
    finish_reason: str
    problem: str = ""
    """Why the answer does not follow its schema; empty if it does."""


async def ask(client: openai.AsyncOpenAI, index: int) -> Answer:
    """Answer that follows schema ``index``, drawn at temperature 1 with ``index`` as seed."""
    answer = await client.chat.completions.create(
        model=SHIPPED_MODEL,
        messages=[{"role": "user", "content": "Tell me about it in JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema(index), "strict": index % 2 == 0},
        },
        temperature=1.0,
        top_p=1.0,
        seed=index,
        max_tokens=MAX_TOKENS,
    )
    choice = answer.choices[0]
    text = choice.message.content or ""
    return Answer(
        text, choice.finish_reason, problem_with(text, index) if choice.finish_reason == "stop" else ""
    )


def problem_with(text: str, index: int) -> str:
    try:
        value: Any = json.loads(text)
        checker = jsonschema.Draft202012Validator(
            schema(index), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        checker.validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}".splitlines()[0]
    return ""


async def ask_all(
    ports: Ports, indices: Iterable[int], disturb: Callable[[], None] | None = None
) -> list[Answer]:
    """Answers by these schemas, so many at once.

    ``disturb`` is called when some are there, and others under way.
    """
    free = asyncio.Semaphore(AT_ONCE)
    num_done = 0
    some_done = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:

        async def one(index: int) -> Answer:
            nonlocal num_done
            async with free:
                answer = await ask(client, index)
            num_done += 1
            if num_done >= FEW:
                some_done.set()
            return answer

        answers = [asyncio.create_task(one(index)) for index in indices]
        if disturb is not None:
            await asyncio.wait_for(some_done.wait(), 120)
            disturb()
        return await asyncio.gather(*answers)


def told(answers: Sequence[Answer], seconds: float, what: str) -> bool:
    """Print what came of the answers; whether all is well."""
    finished = [answer for answer in answers if answer.finish_reason == "stop"]
    wrong = [(index, answer) for index, answer in enumerate(answers) if answer.problem]
    print(
        f"{what}: {len(answers)} schemas, {len(finished)} answers finished, {len(finished) - len(wrong)} of these "
        f"valid, {len(answers) - len(finished)} cut at {MAX_TOKENS} tokens; {seconds:.1f} s"
    )
    for index, answer in wrong:
        print(f"  {index}: {answer.problem}\n    {json.dumps(schema(index))[:300]}\n    {answer.text[:300]}")
    return not wrong and len(finished) >= 0.95 * len(answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--kill", action="store_true", help="Ask again, and end an instance with SIGKILL.")
    args = parser.parse_args()
    ports = Ports()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "serve.log"
        with serve(log, "-dp", "2", "--no-enable-expert-parallel", *ports.head(), *FLAGS) as command:
            command.wait_for("2 instances ready")
            began = time.perf_counter()
            answers = asyncio.run(ask_all(ports, range(args.schemas)))
            good = told(answers, time.perf_counter() - began, "undisturbed")
            if args.kill:
                began = time.perf_counter()
                victim = command.child("Engine_1")
                again = asyncio.run(ask_all(ports, range(args.schemas), victim.kill))
                good &= told(again, time.perf_counter() - began, "one instance killed")
                same = sum(answer.text == before.text for answer, before in zip(again, answers, strict=True))
                print(f"  {same} of {len(again)} answers the same as undisturbed")
                good &= same == len(again)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
