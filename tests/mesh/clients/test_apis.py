"""One answer of a real mesh through four APIs, with the real clients."""

from __future__ import annotations

import urllib.request
from typing import Any

import msgspec
import openai
import pytest

from engine.config import SHIPPED_MODEL
from tests.mesh.conftest import Mesh

pytestmark = pytest.mark.mesh

USER: list[Any] = [{"role": "user", "content": "Tell me about Mr. Darcy."}]


def test_all_apis_say_the_same(mesh: Mesh) -> None:
    import anthropic  # all runs of tests would wait for it, more than a second, if the module loaded it

    with (
        openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as of_openai,
        anthropic.Anthropic(base_url=mesh.url, api_key="none", max_retries=0) as of_anthropic,
    ):
        chat = of_openai.chat.completions.create(
            model=SHIPPED_MODEL, messages=USER, max_tokens=30, temperature=0
        )
        text = chat.choices[0].message.content
        assert text
        fields: dict[str, Any] = {"model": SHIPPED_MODEL, "max_output_tokens": 30, "temperature": 0}
        response = of_openai.responses.create(**fields, input="Tell me about Mr. Darcy.")
        assert response.output_text == text
        with of_openai.responses.stream(**fields, input=USER) as responses:
            assert "".join(e.delta for e in responses if e.type == "response.output_text.delta") == text
        greedy: dict[str, Any] = {"max_tokens": 30, "extra_body": {"temperature": 0}, "messages": USER}
        message = of_anthropic.messages.create(model=SHIPPED_MODEL, **greedy)
        assert [block.text for block in message.content if block.type == "text"] == [text]
        with of_anthropic.messages.stream(model=SHIPPED_MODEL, **greedy) as stream:
            assert "".join(stream.text_stream) == text
        count = of_anthropic.messages.count_tokens(model=SHIPPED_MODEL, messages=USER)
        assert chat.usage is not None
        assert response.usage is not None
        prompt_tokens = chat.usage.prompt_tokens
        assert (
            count.input_tokens == message.usage.input_tokens == response.usage.input_tokens == prompt_tokens
        )


def test_loads_of_both_instances(mesh: Mesh) -> None:
    with urllib.request.urlopen(f"{mesh.url}/v1/loads") as page:
        loads = msgspec.json.decode(page.read())
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    assert all(load["max_total_num_blocks"] > 0 for load in loads["loads"])
