"""A server whose model writes a given text; its template shows tools and reasoning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.messages import FinishReason
from router.config import HttpConfig
from router.mesh import ServedModel
from router.text.tokens import Tokenizer
from tests.router import tiny_tokenizer
from tests.router.conftest import Server, serving
from tests.router.fake_mesh import FakeMesh, saying

TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}THINKING {{ enable_thinking }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""A template that takes one message of instructions, before all others."""
THOUGHT = "<think>\nthe dog 🙂\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOL_FLAGS: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@contextlib.contextmanager
def talking(
    served: ServedModel,
    directory: Path,
    special: Sequence[str] = (),
    template: str = TEMPLATE,
    **config: Any,
) -> Iterator[Server]:
    """A server of a model in ``directory``, with ``special`` tokens more than others."""
    tiny_tokenizer.write_model(directory, special, chat_template=template)
    model = msgspec.structs.replace(served, directory=str(directory), max_model_len=2048)
    with serving(FakeMesh(model, saying([])), HttpConfig(**config)) as server:
        yield server


class Speaker:
    """Makes the mesh generate a text, one token per step."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer

    def __call__(self, text: str, reason: FinishReason = FinishReason.STOP) -> list[int]:
        """Script this text; returns its token ids.

        A turn that ends by itself has one more, which is not shown.
        """
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), tiny_tokenizer.EOS]
        ids = ids if reason is FinishReason.STOP else ids[:-1]
        self.server.mesh.reset(saying(ids, reason))
        return ids

    @property
    def last_prompt(self) -> str:
        """Text of the last prompt."""
        return self.tokenizer.decode(self.server.mesh.prompts[-1].prompt_ids)


@pytest.fixture
def openai_client(talking_server: Server) -> Iterator[openai.OpenAI]:
    """A client of a test module's server. A test ends when no request is left."""
    with openai.OpenAI(base_url=talking_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
    talking_server.wait_until_idle()


@pytest.fixture
def speaker(talking_server: Server, tokenizer: Tokenizer) -> Speaker:
    return Speaker(talking_server, tokenizer)
