"""A conversation with a tool call: this program answers with the weather.

Needs a mesh that serves a model trained to call tools, for instance one of the Qwen 3 family:

    serve MODEL --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3
    python examples/tools.py
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import openai

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def weather(city: str) -> str:
    return f"It rains in {city}, 9 degrees."


def main() -> None:
    parser = argparse.ArgumentParser(description="A conversation with a tool.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--question", default="Do I need an umbrella in Ulm?")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.base_url, api_key="any")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": arguments.question}]
    for _ in range(5):  # a model may ask again and again
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=1000)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            assert call.type == "function"
            result = weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            print(message.content)
            return


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"no mesh answers at {error.request.url}: start one with make serve, or see --base-url")
    except openai.APIStatusError as error:
        sys.exit(f"the mesh refuses: {error.message}")
