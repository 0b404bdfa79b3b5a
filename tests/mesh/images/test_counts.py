"""An image sent again, here and to another instance: neither encoded nor prefilled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.images.test_images import messages
from tests.mesh.images.two_instances import two_instances

pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

LONG_TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4
OUTCOMES = ("encoded", "kept", "cached", "failed")


def images_of(metrics: str, rank: int) -> dict[str, int]:
    """Images of an instance by what was done for them; only what is not 0."""
    found = {}
    for outcome in OUTCOMES:
        name = f'lockstep:images_total{{engine="{rank}",model_name="m",outcome="{outcome}"}} '
        if line := next((line for line in metrics.splitlines() if line.startswith(name)), ""):
            found[outcome] = int(float(line.removeprefix(name)))
    return {outcome: count for outcome, count in found.items() if count}


def test_the_same_image_again_is_neither_encoded_nor_prefilled(tmp_path: Path) -> None:
    with two_instances(tmp_path) as (command, _, url, client):

        def ask(question: tuple[str | int, ...], rank: int) -> tuple[list[int], int]:
            """Its tokens, and how many of the prompt's were computed."""
            answer: Any = client.chat.completions.create(
                model="m", messages=messages(*question), temperature=0, max_tokens=8,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                extra_headers={"x-data-parallel-rank": str(rank)},
            )  # fmt: skip
            usage = answer.usage
            computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            return answer.choices[0].model_extra["token_ids"], computed

        def counted(rank: int, **wanted: int) -> None:
            wait_until(
                lambda: images_of(client._client.get(f"{url}/metrics").text, rank) == wanted,
                10,
                f"{rank}: {wanted}",
            )

        question = (1, LONG_TEXT)
        first, computed = ask(question, 0)
        assert computed > 100
        counted(0, encoded=1)
        again, computed = ask(question, 0)
        assert (again, computed <= 17) == (first, True)
        counted(0, encoded=1, cached=1)
        other, computed = ask(question, 1)
        assert other == first
        assert computed <= 17, "its blocks were not fetched"
        counted(1, cached=1)
        elsewhere, _ = ask(("It stands elsewhere: ", 1), 0)  # other blocks, the same rows
        counted(0, encoded=1, cached=1, kept=1)
        assert elsewhere != first
        _, computed = ask((2, LONG_TEXT), 1)  # of equal size
        assert computed > 100
        counted(1, encoded=1, cached=1)
        assert command.stop() == 0


@pytest.mark.nightly
def test_instances_that_decode_encode_nothing(tmp_path: Path) -> None:
    """The role ``prefill`` gets prompts with images, also short ones."""
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    ports, directory = Ports(), make_tiny_chat_model(tmp_path / "llava")
    flags = ["-dpl", "1", "--served-model-name", "m", "--dtype", "float32", "--disaggregation-mode"]
    head_flags = [str(directory), "-dp", "2", *ports.head(), *flags, "decode"]
    with (
        serve(tmp_path / "head.log", *head_flags) as head,
        serve(tmp_path / "other.log", str(directory), "--headless", *ports.join(), *flags, "prefill"),
        openai.OpenAI(base_url=f"{ports.url}/v1", api_key="x", max_retries=0) as client,
    ):
        head.wait_for("2 instances ready")
        decoding = next(rank for rank in (0, 1) if f"Engine_{rank}" in head.log)

        def ask(*question: str | int) -> str:
            answer = client.chat.completions.create(
                model="m", messages=messages(*question), temperature=0, max_tokens=200,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.choices[0].message.content or ""

        def metrics() -> str:
            return client._client.get(f"{ports.url}/metrics").text

        first = ask(1, "What?")
        wait_until(lambda: images_of(metrics(), 1 - decoding).get("encoded") == 1, 10, "one encoded it")
        ask("Only text.")
        assert ask(1, "What?") == first
        wait_until(lambda: images_of(metrics(), decoding).get("cached"), 10, "the other has its blocks")
        assert images_of(metrics(), decoding).keys() == {"cached"}
        assert head.stop() == 0
