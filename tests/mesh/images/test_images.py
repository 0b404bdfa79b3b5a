"""Images sent to a mesh: transformers' answers by each API, and over a kill."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.mesh.images.two_instances import two_instances

Image = pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

NUM_TOKENS = 24
NUM_LONG = 800


def png(number: int) -> str:
    """A picture as base64."""
    into = io.BytesIO()
    Image.linear_gradient("L").resize((90, 60)).rotate(40 * number).convert("RGB").save(into, "PNG")
    return base64.b64encode(into.getvalue()).decode()


def messages(*content: str | int) -> list[Any]:
    """A user's turn: texts, and pictures by their numbers."""
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(each)}"}}
        for each in content
    ]
    return [{"role": "user", "content": parts}]


QUESTIONS: list[tuple[str | int, ...]] = [
    ("What is this? ", 1),
    ("What is this? ", 2),
    (1, " and ", 3, " differ?"),
    ("No picture.",),
]


def expected_of(directory: Path) -> list[list[int]]:
    """What transformers generates with the model's own processor."""
    import torch
    import transformers as hf

    model = hf.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    processor = hf.AutoProcessor.from_pretrained(directory, backend="pil")
    found = []
    for question in QUESTIONS:
        content = [
            {"type": "image"} if isinstance(each, int) else {"type": "text", "text": each}
            for each in question
        ]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        images = [
            Image.open(io.BytesIO(base64.b64decode(png(each)))) for each in question if isinstance(each, int)
        ]
        given = processor(text=text, images=images or None, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(
                **given, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1
            )
        found.append(ids[0, given["input_ids"].shape[1] :].tolist())
    return found


def test_images_of_all_apis_over_a_kill(tmp_path: Path) -> None:
    with two_instances(tmp_path) as (command, directory, url, client):

        def ask(question: tuple[str | int, ...]) -> Any:
            return client.chat.completions.create(
                model="m", messages=messages(*question), temperature=0, max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip

        expected = expected_of(directory)
        answers = [ask(question) for question in QUESTIONS]
        assert [answer.choices[0].model_extra["token_ids"] for answer in answers] == expected
        assert expected[0] != expected[1], "the pictures make no difference"

        again = ask(QUESTIONS[0])
        assert again.choices[0].model_extra["token_ids"] == expected[0]
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= again.usage.prompt_tokens - 17, "all but the last block or two"

        text = answers[0].choices[0].message.content
        by_response = client.responses.create(
            model="m", temperature=0, max_output_tokens=NUM_TOKENS, extra_body={"ignore_eos": True},
            input=[
                {"role": "user", "content": [
                    {"type": "input_text", "text": "What is this? "},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{png(1)}", "detail": "auto"},
                ]}
            ],
        )  # fmt: skip
        assert by_response.output_text == text
        seen_one: Any = {"type": "base64", "media_type": "image/png", "data": png(1)}
        with anthropic.Anthropic(base_url=url, api_key="x") as other:
            by_message = other.messages.create(
                model="m", max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True, "temperature": 0},
                messages=[
                    {"role": "user", "content": [
                        {"type": "text", "text": "What is this? "}, {"type": "image", "source": seen_one},
                    ]}
                ],
            )  # fmt: skip
        assert isinstance(by_message.content[0], anthropic.types.TextBlock)
        assert by_message.content[0].text == text

        question = {"role": "user", "content": "Look."}
        seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(2)}"}}
        by_result = client.chat.completions.create(
            model="m", temperature=0, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True},
            messages=[question, {"role": "tool", "tool_call_id": "1", "content": [seen]}],  # type: ignore[list-item,misc]
        )  # fmt: skip
        output = [{"type": "input_image", "image_url": f"data:image/png;base64,{png(2)}", "detail": "auto"}]
        by_output = client.responses.create(
            model="m", temperature=0, max_output_tokens=NUM_TOKENS, extra_body={"ignore_eos": True},
            input=[question, {"type": "function_call_output", "call_id": "1", "output": output}],  # type: ignore[list-item,misc]
        )  # fmt: skip
        assert by_output.output_text == by_result.choices[0].message.content
        assert by_output.usage is not None
        assert by_result.usage is not None
        assert by_output.usage.input_tokens == by_result.usage.prompt_tokens

        bad: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
        asked: Any = [{"role": "user", "content": [bad]}]
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\] is in none of the"):
            client.chat.completions.create(model="m", messages=asked)

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
        command.wait_for("was killed by signal 9")
        assert command.stop() == 0
        assert "Traceback" not in command.log
