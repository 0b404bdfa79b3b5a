"""The prompts of a request as token ids that the model can take."""

from __future__ import annotations

import msgspec

from router.chat_template import ChatTemplateError
from router.errors import ApiError, bad_request, refuse
from router.openai_api import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from router.rules import check_messages, check_template_fields, name_of_prompt, wanted_tokens
from router.text_model import TextModel

MAX_PROMPTS = 1024
"""Prompts of one request."""


class PromptText(msgspec.Struct, frozen=True):
    """One prompt as token ids, and its text where the client gave it or wants it back."""

    ids: list[int]
    text: str = ""
    offsets: list[int] | None = None
    """Where in the text each of them begins, if that is wanted and the client gave the text."""


def completion_prompts(request: CompletionRequest, model: TextModel) -> list[PromptText]:
    """Token ids of all prompts of a request: one text, one list of ids, or a list of either."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = [prompt]
    assert prompt is not None, "check_completion saw to it"
    if not prompt:
        refuse("The prompt is empty.", "prompt")
    of_ids = [item for item in prompt if isinstance(item, int)]
    if of_ids:
        if len(of_ids) < len(prompt):
            refuse("prompt must not mix token ids with texts or lists.", "prompt")
        return [_from_ids(request, of_ids, model)]
    if len(prompt) > MAX_PROMPTS:
        refuse(f"prompt may hold at most {MAX_PROMPTS} prompts.", "prompt")
    if len({type(item) for item in prompt}) > 1:
        refuse("prompt must not mix texts with lists of token ids.", "prompt")
    return [
        _from_text(request, item, model) if isinstance(item, str) else _from_ids(request, item, model)
        for item in prompt
        if not isinstance(item, int)
    ]


def _from_text(request: CompletionRequest, text: str, model: TextModel) -> PromptText:
    if not text:
        refuse("The prompt is empty.", "prompt")
    _check_length(text, request, model)
    add_special_tokens = request.add_special_tokens is not False
    offsets = None
    if request.echo and request.logprobs is not None:
        ids, offsets = model.tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
    else:
        ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    kept = _fit(ids, request, model)
    if len(kept) < len(ids):
        return PromptText(kept, model.tokenizer.decode(kept))
    return PromptText(kept, text, offsets)


def _from_ids(request: CompletionRequest, ids: list[int], model: TextModel) -> PromptText:
    kept = _fit(ids, request, model)
    return PromptText(kept, model.tokenizer.decode(kept) if request.echo else "")


def chat_prompt(request: ChatRequest, model: TextModel) -> PromptText:
    """Token ids of a conversation."""
    if len(request.messages) > model.served.max_model_len:
        refuse("There are more messages than the model's context can hold.", "messages")
    text = render_chat(request, model)
    _check_length(text, request, model)
    return PromptText(_fit(_chat_ids(text, request, model), request, model), text)


def _chat_ids(text: str, request: ChatRequest, model: TextModel) -> list[int]:
    """A template writes special tokens itself."""
    return model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens is True)


def num_prompt_tokens(request: ChatRequest, model: TextModel) -> int:
    """How many tokens a conversation is, also where they are more than the model takes."""
    return len(_chat_ids(render_chat(request, model), request, model))


def render_chat(request: ChatRequest | TokenizeRequest, model: TextModel) -> str:
    """The text that the chat template makes of a conversation."""
    messages = request.messages or []
    variables = dict(model.template_kwargs)
    if isinstance(request, ChatRequest) and (effort := request.reasoning_effort) is not None:
        thinks = effort != "none"  # templates that switch thinking off go by one of two names
        variables |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    variables |= request.chat_template_kwargs or {}
    documents = None
    if isinstance(request, ChatRequest):
        documents = request.documents
    continues = request.continue_final_message is True
    begins = request.add_generation_prompt
    try:
        return model.templates.choose(with_tools=bool(request.tools)).render(
            messages,
            tools=request.tools,
            documents=documents,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
            variables=variables,
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", logged=error.logged) from error


def text_to_tokenize(request: TokenizeRequest, model: TextModel) -> tuple[str, bool]:
    """The text of a /tokenize request, and whether to add special tokens."""
    if (request.prompt is None) == (request.messages is None):
        refuse("give either prompt or messages.", "prompt")
    if request.prompt is not None:
        return request.prompt, request.add_special_tokens is not False
    check_messages(request.messages or [])
    check_template_fields(request)
    return render_chat(request, model), request.add_special_tokens is True


def _fit(ids: list[int], request: GenerationRequest, model: TextModel) -> list[int]:
    """The prompt, truncated if the request says so; it must leave room and have known tokens only."""
    context = model.served.max_model_len
    limit = request.truncate_prompt_tokens
    if limit == -1:
        wanted = max(1, wanted_tokens(request) or 0)
        if wanted >= context:
            raise too_long(len(ids), wanted, request, model)
        limit = context - wanted
    if limit is not None:
        if limit > context:
            refuse(
                f"truncate_prompt_tokens ({limit}) exceeds the context length ({context}).",
                "truncate_prompt_tokens",
            )
        ids = ids[: max(0, limit)] if request.truncation_side == "right" else ids[max(0, len(ids) - limit) :]
    if not ids:
        refuse("The prompt is empty.", name_of_prompt(request))
    if len(ids) >= context:
        raise too_long(len(ids), max(1, wanted_tokens(request) or 0), request, model)
    check_vocabulary(ids, model, name_of_prompt(request))
    return ids


def _check_length(text: str, request: GenerationRequest, model: TextModel) -> None:
    """Refuse a text that is far too long before time is spent on its tokens."""
    fewest = model.tokenizer.fewest_tokens(text)
    if request.truncate_prompt_tokens is None and fewest >= model.served.max_model_len:
        raise too_long(fewest, max(1, wanted_tokens(request) or 0), request, model, at_least="at least ")


def check_vocabulary(ids: list[int], model: TextModel, param: str) -> None:
    """Refuse ids that the model does not have."""
    vocab_size = model.served.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        refuse(f"Token id {wrong} is out of the vocabulary of {vocab_size} tokens.", param)


def too_long(
    prompt: int, wanted: int, request: GenerationRequest, model: TextModel, *, at_least: str = ""
) -> ApiError:
    """The answer to a request beyond the context length, in words that clients look for."""
    name = name_of_prompt(request)
    return bad_request(
        f"This model's maximum context length is {model.served.max_model_len} tokens. However, you requested "
        f"{at_least}{prompt + wanted} tokens ({prompt} in the {name}, {wanted} in the completion). "
        f"Please reduce the length of the {name} or completion.",
        name,
    )
