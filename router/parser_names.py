"""Values of ``--tool-call-parser`` and ``--reasoning-parser``, without the parsers (:mod:`router.turns`).

A launcher checks its flags by them before it loads anything.
"""

from __future__ import annotations

HARMONY_REASONING, HARMONY_CALLS = "openai_gptoss", "openai"
"""The two halves of Harmony, the format of GPT-OSS, by vLLM's names."""

TOOL_CALL_PARSERS = (
    "hermes",
    "llama3_json",
    "llama4_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "granite-20b-fc",
    "granite4",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "minimax_m2",
    "glm45",
    "glm47",
    "kimi_k2",
    "internlm",
    "hunyuan_a13b",
    "phi4_mini_json",
    "pythonic",
    "llama4_pythonic",
    HARMONY_CALLS,
)
REASONING_PARSERS = (
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "granite",
    "minimax_m2",
    "mistral",
    "olmo3",
    "qwen3",
    "seed_oss",
    "step3",
    HARMONY_REASONING,
)


def check_halves(reasoning_parser: str | None, tool_call_parser: str | None) -> None:
    """Refuse one half with another format's other half (ValueError)."""
    if reasoning_parser is None or tool_call_parser is None:
        return
    if (reasoning_parser == HARMONY_REASONING) != (tool_call_parser == HARMONY_CALLS):
        raise ValueError(
            f"--reasoning-parser {HARMONY_REASONING} and --tool-call-parser {HARMONY_CALLS} are one format "
            f"and go with no other: got {reasoning_parser} and {tool_call_parser}"
        )
