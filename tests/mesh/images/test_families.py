"""Images of families with axes or whole images: transformers' answers, other instances' blocks, a kill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.mesh.harness import Ports, serve
from tests.mesh.images.test_images import NUM_LONG, NUM_TOKENS, QUESTIONS, expected_of, messages

pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

LONG_TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 12


def make_qwen(directory: Path) -> Path:
    from tests.engine.vision.tiny_chat_models import make_tiny_qwen_chat_model

    return make_tiny_qwen_chat_model(directory)


def make_dense_qwen(directory: Path) -> Path:
    from tests.engine.vision.tiny_chat_models import make_tiny_qwen_chat_model

    return make_tiny_qwen_chat_model(directory, "qwen3_vl")


def make_small_gemma4(directory: Path) -> Path:
    from tests.engine.vision.tiny_chat_models import make_tiny_gemma4_chat_model

    return make_tiny_gemma4_chat_model(directory, "gemma4_small")


def make_gemma4_mixture(directory: Path) -> Path:
    from tests.engine.vision.tiny_chat_models import make_tiny_gemma4_chat_model

    return make_tiny_gemma4_chat_model(directory, "gemma4_moe")


def make_gemma(directory: Path) -> Path:
    from tests.engine.vision.tiny_chat_models import make_tiny_gemma_chat_model

    return make_tiny_gemma_chat_model(directory)


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        pytest.param(make_qwen, ["-dp", "2", "-ep"], id="qwen -ep", marks=pytest.mark.nightly),
        pytest.param(make_dense_qwen, ["-dp", "2", "-tp", "2"], id="qwen -tp", marks=pytest.mark.nightly),
        pytest.param(make_gemma, ["-dp", "2", "-pp", "2"], id="gemma -pp", marks=pytest.mark.nightly),
        pytest.param(make_small_gemma4, ["-dp", "2", "-tp", "2"], id="gemma4 -tp", marks=pytest.mark.nightly),
        pytest.param(make_gemma4_mixture, ["-dp", "2", "-ep"], id="gemma4 -ep", marks=pytest.mark.nightly),
    ],
)
def test_families_by_layout(make: Callable[[Path], Path], flags: list[str], tmp_path: Path) -> None:
    ports, directory = Ports(), make(tmp_path / "model")
    flags = [*flags, "--served-model-name", "m", "--dtype", "float32", "--enable-prompt-tokens-details"]
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(serve(tmp_path / "serve.log", str(directory), *flags, *ports.head()))
        command.wait_for("2 instances ready")
        client = stack.enter_context(openai.OpenAI(base_url=f"{ports.url}/v1", api_key="x", max_retries=0))

        def ask(question: tuple[str | int, ...], rank: int) -> Any:
            return client.chat.completions.create(
                model="m", messages=messages(*question), temperature=0, max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                extra_headers={"x-data-parallel-rank": str(rank)},
            )  # fmt: skip

        answers = [ask(question, index % 2) for index, question in enumerate(QUESTIONS)]
        assert [each.choices[0].model_extra["token_ids"] for each in answers] == expected_of(directory)

        question = (2, LONG_TEXT)
        first = ask(question, 0)
        time.sleep(0.3)  # its blocks are reported at the latest by then
        second = ask(question, 1)
        ids = [each.choices[0].model_extra["token_ids"] for each in (first, second)]
        assert ids[0] == ids[1]
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= second.usage.prompt_tokens - 17, "its image was computed again"

        def stream(kill: bool) -> str:
            pieces: list[str] = []
            for event in client.chat.completions.create(
                model="m", messages=messages(*QUESTIONS[2]), temperature=0.8, seed=5, max_tokens=NUM_LONG,
                stream=True, extra_body={"ignore_eos": True}, extra_headers={"x-lockstep-preferred-rank": "0"},
            ):  # fmt: skip
                pieces += [each.delta.content for each in event.choices if each.delta.content]
                if kill and len(pieces) == 2:
                    kill = False
                    command.child("Engine_0").kill()
            return "".join(pieces)

        undisturbed = stream(kill=False)
        assert stream(kill=True) == undisturbed
        assert command.stop() == 0
        assert "Traceback" not in command.log
