"""The ``litellm`` package with images, through three of its providers, and in streams."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the network for prices

import importlib.metadata
from typing import Any

import checks
import litellm
import pictures
from checks import check
from pictures import NUM_TOKENS, RAMP, STRIPES

litellm.suppress_debug_info = True
MODEL = checks.model()
PLACES = {"hosted_vllm": f"{checks.URL}/v1", "openai": f"{checks.URL}/v1", "anthropic": checks.URL}


@check
def chats_and_their_streams() -> None:
    both = pictures.needs_sight()
    for provider, base in PLACES.items():
        place = {"api_base": base, "api_key": checks.KEY, "num_retries": 0, "temperature": 0}
        for picture, expected in zip((STRIPES, RAMP), both, strict=True):
            asked: dict[str, Any] = {
                "model": f"{provider}/{MODEL}",
                "messages": [pictures.turn(picture)],
                "max_tokens": NUM_TOKENS,
            }
            whole = litellm.completion(**place, **asked)
            assert whole.choices[0].message.content == expected, provider
            chunks = litellm.completion(**place, **asked, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert said == expected, provider


checks.run(f"litellm {importlib.metadata.version('litellm')}")
