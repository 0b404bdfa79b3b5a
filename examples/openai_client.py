#!/usr/bin/env python3
"""What the ``openai`` package can ask of a Lockstep mesh, one thing after the other.

    python examples/openai_client.py --base-url http://127.0.0.1:8000/v1

Needs ``pip install openai`` and a running mesh. Any key will do, unless the mesh was started with --api-key.
"""

from __future__ import annotations

import argparse
import os
import sys

import openai

OPENING = "It is a truth universally acknowledged, that"


def models(client: openai.OpenAI) -> str:
    """Which models there are; returns the first."""
    names = [model.id for model in client.models.list()]
    print("models:", ", ".join(names))
    return names[0]


def completion(client: openai.OpenAI, model: str) -> None:
    """Go on with a text."""
    answer = client.completions.create(model=model, prompt=OPENING, max_tokens=40, seed=1)
    print(f"{OPENING}[{answer.choices[0].text}]")
    print("finish reason:", answer.choices[0].finish_reason)
    if answer.usage:
        print(
            f"usage: {answer.usage.prompt_tokens} prompt + {answer.usage.completion_tokens} completion tokens"
        )


def chat(client: openai.OpenAI, model: str) -> None:
    """Ask a question."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me about Mr. Darcy."}],
        max_completion_tokens=60,
        seed=2,
    )
    print(answer.choices[0].message.content)


def stream(client: openai.OpenAI, model: str) -> None:
    """Print tokens as they come; the last chunk has no choices and tells the usage."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a short story about a ball at Netherfield."}],
        max_completion_tokens=80,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\nusage: {chunk.usage.completion_tokens} completion tokens")


def two_samples(client: openai.OpenAI, model: str) -> None:
    """Two different answers to one prompt, ended at a full stop."""
    answer = client.completions.create(
        model=model, prompt="Elizabeth", n=2, stop=["."], max_tokens=60, seed=4
    )
    for choice in answer.choices:
        print(f"{choice.index}: Elizabeth{choice.text}. ({choice.finish_reason})")


def logprobs(client: openai.OpenAI, model: str) -> None:
    """How likely each token was, and what else might have stood there."""
    answer = client.completions.create(model=model, prompt=OPENING, max_tokens=5, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    for token, logprob, top in zip(
        found.tokens or [], found.token_logprobs or [], found.top_logprobs or [], strict=True
    ):
        others = ", ".join(f"{other!r} {value:.2f}" for other, value in top.items())
        print(f"{token!r:<12} {logprob:6.2f}   most likely: {others}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=os.environ.get("OPENAI_API_KEY", "any"))
    print("---- models")
    model = models(client)
    for show in (completion, chat, stream, two_samples, logprobs):
        print(f"\n---- {show.__name__}: {show.__doc__}")
        show(client, model)


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"no mesh answers at {error.request.url}: start one with make serve, or see --base-url")
    except openai.APIStatusError as error:
        sys.exit(f"the mesh refuses: {error.message}")
