"""A request to Ollama's API as a chat or a completion (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from router.api.ollama.wire import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions, OllamaRequest
from router.errors import refuse
from router.images.parts import LocatedPart
from router.mesh import ServedModel
from router.openai_api import ChatRequest, GenerationRequest, OpenEndedCompletion

NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "thinking_token_budget": "think",
    "continue_final_message": "messages",
}
"""Fields that have another name in a chat request."""

ANY_IMAGE = "data:;base64,"
"""Beginning of a data URL whose format is found out from its bytes."""
LATEST = ":latest"
"""Tag that Ollama's clients add to names without one."""
LEVELS = ("low", "medium", "high")
SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
"""Options that a chat request has under the same names."""
NOT_RAW = ("system", "think", "template", "context", "images")
"""Fields that need the chat template."""


def known_name(name: str | None, knows: Callable[[str], bool]) -> str | None:
    """Name of the model in the mesh, without Ollama's tag ``latest``."""
    if name and not knows(name) and knows(bare := name.removesuffix(LATEST)):
        return bare
    return name


def as_chat(asked: OllamaChatRequest, served: ServedModel) -> ChatRequest:
    """A request to ``/api/chat`` as one to /v1/chat/completions.

    Raises:
        ApiError: it asks for what is not supported (400).
    """
    chat = ChatRequest(messages=_messages(asked.messages or []), tools=asked.tools or None)
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
        chat.continue_final_message = True  # as with Ollama, its answer goes on
    _set_common(chat, asked, served)
    _set_chat(chat, asked)
    return chat


def as_generation(asked: OllamaGenerateRequest, served: ServedModel) -> ChatRequest | OpenEndedCompletion:
    """A request to ``/api/generate`` as a chat, or as a completion if it is raw.

    Raises:
        ApiError: it asks for what is not supported (400).
    """
    for name, instead in {
        "template": "the router has --chat-template",
        "suffix": "put the text around the gap into a raw prompt",
        "context": "send the conversation to /api/chat",
    }.items():
        if getattr(asked, name):
            refuse(f"{name} is not supported: {instead}.", name)
    if asked.raw:
        for name in NOT_RAW:
            if getattr(asked, name):
                refuse(f"raw leaves out the chat template, which {name} needs.", name)
        completion = OpenEndedCompletion(prompt=asked.prompt)
        _set_common(completion, asked, served)
        completion.logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return completion
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    content = _with_images(asked.prompt or "", asked.images, "images")
    chat = ChatRequest(messages=[*messages, {"role": "user", "content": content}])
    _set_common(chat, asked, served)
    _set_chat(chat, asked)
    return chat


def _set_common(wanted: GenerationRequest, asked: OllamaRequest, served: ServedModel) -> None:
    options = asked.options or OllamaOptions()
    _check_options(options, served)
    wanted.model = known_name(asked.model, served.knows)
    wanted.stream = asked.stream is not False
    wanted.response_format = _response_format(asked.format)
    for name in SAME:
        setattr(wanted, name, getattr(options, name))
    if options.num_predict is not None and options.num_predict >= 0:
        wanted.max_tokens = options.num_predict
    if options.repeat_last_n != 0:
        wanted.repetition_penalty = options.repeat_penalty


def _set_chat(chat: ChatRequest, asked: OllamaRequest) -> None:
    chat.logprobs, chat.top_logprobs = asked.logprobs, asked.top_logprobs
    match asked.think:
        case None:
            return
        case bool() as thinks:
            chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}
            chat.include_reasoning = thinks
        case level if level in LEVELS:
            chat.reasoning_effort = level
        case _:
            refuse(f"think must be true, false or one of {', '.join(LEVELS)}.", "think")


def _check_options(options: OllamaOptions, served: ServedModel) -> None:
    if options.num_ctx is not None and options.num_ctx > served.max_model_len:
        refuse(
            f"options.num_ctx {options.num_ctx} exceeds the context length of {served.max_model_len} tokens.",
            "options.num_ctx",
        )
    if options.num_predict is not None and options.num_predict < -2:
        refuse("options.num_predict must be -2 or more.", "options.num_predict")
    looks_back = options.repeat_last_n
    if options.repeat_penalty not in (None, 1.0) and looks_back not in (None, 0, -1):
        refuse(
            "options.repeat_last_n must be -1 or 0 here: the repeat penalty looks at all tokens or none.",
            "options.repeat_last_n",
        )
    neutral = {"mirostat": (None, 0), "typical_p": (None, 0.0, 1.0), "tfs_z": (None, 1.0)}
    for name, values in neutral.items():
        if getattr(options, name) not in values:
            refuse(f"options.{name} is not supported: use top_k, top_p or min_p.", f"options.{name}")


def _response_format(given: Any) -> Any:
    match given:
        case None | "":
            return None
        case "json":
            return {"type": "json_object"}
        case dict():
            return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}
        case _:
            refuse('format must be "json" or a JSON schema.', "format")


# ---- messages


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; calls and their results get ids where Ollama's clients give none."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for index, message in enumerate(given):
        content = message.get("content", "")
        if content is not None and not isinstance(content, str):
            refuse(f"messages[{index}].content must be a string.", "messages")
        content = _with_images(content, message.get("images"), f"messages[{index}].images")
        turned: dict[str, Any] = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            turned["reasoning"] = message["thinking"]
        if given_calls := message.get("tool_calls"):
            if not isinstance(given_calls, list):
                refuse(f"messages[{index}].tool_calls must be a list.", "messages")
            calls = [_call(index, position, call) for position, call in enumerate(given_calls)]
            open_calls += [(each["function"]["name"], each["id"]) for each in calls]
            turned["tool_calls"] = calls
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            turned["tool_call_id"] = id or _answered(message.get("tool_name"), open_calls)
        messages.append(turned)
    return messages


def _with_images(text: str | None, images: Any, where: str) -> Any:
    """The content of a message: its text, behind its images where it has some.

    ``images``: in base64, as Ollama's clients send them.
    """
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        refuse(f"{where} must be a list of images in base64.", where)
    parts: list[dict[str, Any]] = [
        LocatedPart({"type": "image_url", "image_url": {"url": f"{ANY_IMAGE}{each}"}}, f"{where}[{at}]")
        for at, each in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _call(index: int, position: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        refuse(
            f"messages[{index}].tool_calls[{position}].function must be an object with a name.", "messages"
        )
    try:
        arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    except RecursionError:
        refuse(f"messages[{index}].tool_calls[{position}] is nested too deeply.", "messages")
    id = call.get("id")
    return {
        "id": id if isinstance(id, str) and id else f"call_{index}_{position}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _answered(name: Any, open_calls: list[tuple[str, str]]) -> str:
    """Id of the call that a result belongs to, by the name of its tool."""
    at = next((i for i, (called, _) in enumerate(open_calls) if called == name), 0)
    return open_calls.pop(at)[1] if open_calls else "call"
