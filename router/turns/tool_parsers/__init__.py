"""Tool parsers by the names that ``--tool-call-parser`` takes, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping

from router.turns.tool_parsers.base import ToolParser
from router.turns.tool_parsers.deepseek import DeepseekV3, DeepseekV31, KimiK2
from router.turns.tool_parsers.llama import LlamaJson
from router.turns.tool_parsers.marked_json import (
    Granite,
    Granite20bFunctionCalling,
    Hermes,
    HunyuanA13b,
    InternLm,
    Phi4Mini,
)
from router.turns.tool_parsers.mistral import Mistral
from router.turns.tool_parsers.pythonic import Pythonic
from router.turns.tool_parsers.tagged import Glm45, MinimaxM2, Qwen3Coder, SeedOss

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": Hermes,
    "llama3_json": LlamaJson,
    "llama4_json": LlamaJson,
    "mistral": Mistral,
    "deepseek_v3": DeepseekV3,
    "deepseek_v31": DeepseekV31,
    "granite": Granite,
    "granite-20b-fc": Granite20bFunctionCalling,
    "granite4": Hermes,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "seed_oss": SeedOss,
    "minimax_m2": MinimaxM2,
    "glm45": Glm45,
    "glm47": Glm45,
    "kimi_k2": KimiK2,
    "internlm": InternLm,
    "hunyuan_a13b": HunyuanA13b,
    "phi4_mini_json": Phi4Mini,
    "pythonic": Pythonic,
    "llama4_pythonic": Pythonic,
}
