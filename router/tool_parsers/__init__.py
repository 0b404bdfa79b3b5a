"""Tool parsers by the names that ``--tool-call-parser`` takes, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping

from router.tool_parsers.base import ToolParser
from router.tool_parsers.deepseek import DeepseekV3, DeepseekV31
from router.tool_parsers.llama import LlamaJson
from router.tool_parsers.marked_json import Granite, Granite20bFunctionCalling, Hermes
from router.tool_parsers.mistral import Mistral
from router.tool_parsers.pythonic import Pythonic
from router.tool_parsers.tagged import Glm45, Qwen3Coder

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
    "glm45": Glm45,
    "pythonic": Pythonic,
    "llama4_pythonic": Pythonic,
}
