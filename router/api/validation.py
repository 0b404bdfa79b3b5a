"""Checks of requests that need no model (pure).

A wrong field ends in a 400 that names it. A field that would change the answer and is not supported is
refused rather than ignored.
"""

from __future__ import annotations

from typing import Any

from router.config import HttpConfig
from router.errors import refuse
from router.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from router.turns.tool_parsers.base import Tools

MAX_ID_LENGTH = 256
"""Characters of a request id, session id or cache salt."""
MAX_TIMEOUT = 7 * 86400.0
"""Longest timeout that a request may set, in seconds: a week."""

UNSUPPORTED = {
    "logprob_token_ids": "",
    "packed_top_logprobs": "ask for logprobs",
    "use_beam_search": "",
    "kv_transfer_params": "",
    "ec_transfer_params": "",
    "repetition_detection": "",
    "mm_processor_kwargs": "images are prepared as the checkpoint's processor says",
    "media_io_kwargs": "images are decoded in one way",
    "vllm_xargs": "",
    "watermarking": "",
    "return_prompt_text": "ask for return_token_ids",
    "moderation": "nothing here looks at what texts are about",
    "custom_logit_processor": "",
    "suffix": "",
    "prompt_embeds": "",
    "stop_regex": "use stop, or structured_outputs with a regex",
    "no_stop_trim": "use include_stop_str_in_output",
    "min_new_tokens": "use min_tokens",
    "input_ids": "send token ids as the prompt of /v1/completions",
    "prompt_token_ids": "send token ids as the prompt of /v1/completions",
    "lora_path": "",
    "session_params": "send the whole conversation",
    "return_hidden_states": "",
    "audio": "answers are text",
    "max_output_tokens": "use max_tokens",
    "stop_sequences": "use stop",
}
"""Fields refused when their value would matter, with what to use instead."""


def check(request: ChatRequest | CompletionRequest) -> None:
    """Refuse a chat or completion with fields that are wrong or not supported.

    Afterwards ``max_tokens`` holds the number that counts, under whichever name it was given.
    """
    _check_common(request)
    if isinstance(request, ChatRequest):
        _check_chat(request)
    else:
        _check_completion(request)


def _check_completion(request: CompletionRequest) -> None:
    if request.top_logprobs:
        refuse("top_logprobs is for chats: use logprobs.", "top_logprobs")
    if request.tools:
        refuse("tools are for chats: send messages to /v1/chat/completions.", "tools")
    if request.prompt is None:
        refuse("prompt is required.", "prompt")
    if request.thinking_token_budget not in (None, -1):
        refuse("thinking_token_budget is supported for chats only.", "thinking_token_budget")
    if request.stream and request.prompt_logprobs is not None:
        refuse("prompt_logprobs are not available with stream.", "prompt_logprobs")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        refuse("max_tokens must be at least 1 unless echo or prompt_logprobs is set.", "max_tokens")


def _check_chat(request: ChatRequest) -> None:
    if not request.messages:
        refuse("messages must not be empty.", "messages")
    if request.stream and request.prompt_logprobs is not None:
        refuse("prompt_logprobs are not available with stream.", "prompt_logprobs")
    if request.top_logprobs and not request.logprobs:
        refuse("top_logprobs needs logprobs to be true.", "top_logprobs")
    if request.max_tokens == 0:
        refuse("at least one token must be generated.", request.max_tokens_field)
    if request.separate_reasoning is False:
        refuse("separate_reasoning false is not supported: join reasoning and content.", "separate_reasoning")
    if request.function_call not in (None, "none", "auto"):
        refuse("function_call is not supported: use tool_choice.", "function_call")
    if request.functions:
        refuse("functions is not supported: name them in tools.", "functions")
    if request.modalities not in (None, [], ["text"]):
        refuse("modalities other than text are not supported.", "modalities")
    if request.web_search_options not in (None, False):  # an empty object switches the search on
        refuse("web_search_options is not supported: offer a tool that searches.", "web_search_options")
    if request.return_routed_experts:
        refuse(
            "return_routed_experts is not supported in chats: send token ids to /v1/completions.",
            "return_routed_experts",
        )
    check_messages(request.messages)
    check_template_fields(request)
    _check_tools(request)


def _check_common(request: GenerationRequest) -> None:
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    if request.stream_options not in (None, StreamOptions()) and not request.stream:
        refuse("stream_options needs stream to be true.", "stream_options")
    for name, instead in UNSUPPORTED.items():
        if getattr(request, name, None):
            refuse(f"{name} is not supported{f': {instead}' if instead else ' yet'}.", name)
    if request.best_of not in (None, 1, request.n):
        refuse("best_of is not supported: ask for n answers and choose.", "best_of")
    if request.request_id is not None and not usable_id(request.request_id):
        refuse(f"request_id must be printable ASCII of at most {MAX_ID_LENGTH} characters.", "request_id")
    if (budget := request.thinking_token_budget) is not None and budget < -1:
        refuse("thinking_token_budget must be at least 0, or -1 for none.", "thinking_token_budget")
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= MAX_ID_LENGTH:
        refuse(f"cache_salt must have 1 to {MAX_ID_LENGTH} characters.", "cache_salt")
    if request.session_id is not None and not 0 < len(request.session_id) <= MAX_ID_LENGTH:
        refuse(f"session_id must have 1 to {MAX_ID_LENGTH} characters.", "session_id")
    if request.timeout is not None and not 0 < request.timeout <= MAX_TIMEOUT:
        refuse(f"timeout must be above 0 and at most {MAX_TIMEOUT:g} seconds.", "timeout")
    if request.truncation_side not in (None, "left", "right"):
        refuse("truncation_side must be 'left' or 'right'.", "truncation_side")
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens < -1:
        refuse("truncate_prompt_tokens must be -1 or more.", "truncate_prompt_tokens")


def check_messages(messages: list[dict[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            refuse(f"messages[{index}].role must be a string.", "messages")
        if message.get("function_call"):
            refuse(f"messages[{index}].function_call is not supported: use tool_calls.", "messages")
        if message["role"] == "function":
            refuse(f"messages[{index}].role function is not supported: use tool.", "messages")
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            refuse(f"messages[{index}].tool_calls must be a list.", "messages")
        for position, call in enumerate(calls or []):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                refuse(
                    f"messages[{index}].tool_calls[{position}].function must be an object with a name.",
                    "messages",
                )


def check_template_fields(request: ChatRequest | TokenizeRequest) -> None:
    """Refuse fields that chat templates cannot show; an empty list of tools becomes none."""
    request.tools = request.tools or None
    if request.chat_template:
        refuse("chat_template is not supported: give the router --chat-template.", "chat_template")
    if request.continue_final_message and request.add_generation_prompt:
        refuse(
            "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
        )
    for index, tool in enumerate(request.tools or []):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(f"tools[{index}].function must be an object with a name.", "tools")
        if tool.get("type", "function") != "function":
            refuse(f"tools[{index}].type must be 'function'.", "tools")
        if not isinstance(function.get("parameters") or {}, dict):
            refuse(f"tools[{index}].function.parameters must be a JSON schema.", "tools")
        if tool.get("defer_loading") or function.get("defer_loading"):
            refuse(
                f"tools[{index}].defer_loading is not supported: name tools when they are needed.", "tools"
            )


def _check_tools(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not request.tools:
        refuse("tool_choice needs tools.", "tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type", "function")
        if kind == "allowed_tools":
            _check_allowed(choice.get("allowed_tools"), request.tools)
            return
        if kind != "function":
            refuse(
                f"tool_choice of type {_shortened(str(kind))} is not supported, only function.", "tool_choice"
            )
        if _name_of_function(choice) not in _names(request.tools):
            refuse("tool_choice names no function of tools.", "tool_choice")
    elif choice != "required":
        refuse(
            f"tool_choice must be none, auto, required or a function, got {_shortened(choice)}.",
            "tool_choice",
        )


def _check_allowed(allowed: Any, tools: list[dict[str, Any]]) -> None:
    named = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(named, list) or not named:
        refuse("tool_choice of type allowed_tools needs a list of tools.", "tool_choice")
    if allowed.get("mode") not in ("auto", "required"):
        refuse("tool_choice of type allowed_tools needs a mode, auto or required.", "tool_choice")
    known = _names(tools)
    for index, tool in enumerate(named):
        if not isinstance(tool, dict) or _name_of_function(tool) not in known:
            refuse(f"tool_choice: allowed tool {index} names no function of tools.", "tool_choice")


def keep_offered_tools(request: ChatRequest, config: HttpConfig) -> Tools:
    """Reduce the tools of a checked request to those that its prompt shows.

    Returns all that were sent. Of an ``allowed_tools`` choice its tools stay, and its mode becomes the
    choice. If configured, none stay where the answer may call none.
    """
    choice, sent = request.tool_choice, request.tools or ()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice["allowed_tools"]
        names = {_name_of_function(tool) for tool in allowed["tools"]}
        request.tools = [tool for tool in request.tools or () if tool["function"]["name"] in names]
        request.tool_choice = allowed["mode"]
    if request.tool_choice == "none" and config.exclude_tools_when_tool_choice_none:
        request.tools = None
    return sent


def _names(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _name_of_function(named: dict[str, Any]) -> Any:
    function = named.get("function")
    return function.get("name") if isinstance(function, dict) else None


def usable_id(text: str) -> bool:
    """Whether a client's own request id can stand in logs and headers."""
    return 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable()


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."
