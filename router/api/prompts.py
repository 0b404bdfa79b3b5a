"""The prompts of a request as token ids that the model can take."""

from __future__ import annotations

from typing import Any

from router.api.validation import check_messages, check_template_fields
from router.errors import ApiError, bad_request, refuse
from router.images.conversation import taken_by
from router.images.messages import Prepared
from router.mesh import ServedModel
from router.openai_api import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from router.text.chat_template import ChatTemplateError
from router.text.prompt_text import PromptText
from router.text.text_model import TextModel

MAX_PROMPTS = 1024
"""Prompts of one request."""


def prompts_of(request: ChatRequest | CompletionRequest, model: TextModel) -> list[PromptText]:
    """All prompts of a checked request."""
    return (
        [chat_prompt(request, model)]
        if isinstance(request, ChatRequest)
        else completion_prompts(request, model)
    )


def completion_prompts(request: CompletionRequest, model: TextModel) -> list[PromptText]:
    """Token ids of all prompts of a request.

    The prompts are one text, one list of ids, or a list of either.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = [prompt]
    assert prompt is not None, "the request was checked"
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
    tokenizer, adds = model.tokenizer, request.add_special_tokens is not False
    ids, kept = _tokenise(text, request, model, add_special_tokens=adds)
    if len(kept) < len(ids):
        return PromptText(kept, tokenizer.decode(kept))
    if request.echo and request.logprobs is not None:
        return PromptText(kept, text, tokenizer.encode_with_offsets(text, add_special_tokens=adds)[1])
    return PromptText(kept, text)


def _from_ids(request: CompletionRequest, ids: list[int], model: TextModel) -> PromptText:
    kept = _fit(ids, _limit(len(ids), request, model), request, model)
    return PromptText(kept, model.tokenizer.decode(kept) if request.echo else "")


def chat_prompt(request: ChatRequest, model: TextModel) -> PromptText:
    """Token ids of a conversation."""
    if len(request.messages) > model.served.max_model_len:
        refuse("There are more messages than the model's context can hold.", "messages")
    text, prepared = _conversation(request, model)
    adds = request.add_special_tokens is True  # a template writes special tokens itself
    ids = _tokenise(text, request, model, add_special_tokens=adds)[1]
    if model.images is None or not prepared:
        return PromptText(ids, text)
    return PromptText(ids, text, images=model.images.find(ids, prepared))


def _conversation(request: ChatRequest, model: TextModel) -> tuple[str, list[Prepared]]:
    """The text of a conversation's prompt, and its images."""
    return taken_by(model.images, request.messages, lambda messages: _rendered(request, [*messages], model))


def num_prompt_tokens(request: ChatRequest, model: TextModel) -> int:
    """Number of tokens of a conversation, which may slightly exceed the model's limit."""
    text, _ = _conversation(request, model)
    _check_countable(text, "messages", model)
    return len(model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens is True))


def render_chat(request: ChatRequest | TokenizeRequest, model: TextModel) -> str:
    """The prompt text of a conversation, by the chat template."""
    return _rendered(request, request.messages or [], model)


def _rendered(request: ChatRequest | TokenizeRequest, messages: list[Any], model: TextModel) -> str:
    variables = dict(model.template_kwargs)
    if isinstance(request, ChatRequest) and (effort := request.reasoning_effort) is not None:
        thinks = effort != "none"  # templates that switch thinking off go by one of two names
        variables |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    if isinstance(request, ChatRequest) and request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    variables |= request.chat_template_kwargs or {}
    documents = None
    if isinstance(request, ChatRequest):
        documents = request.documents
    continues = request.continue_final_message is True
    begins = request.add_generation_prompt
    try:
        template = model.templates.choose(with_tools=bool(request.tools))
        if model.images is not None:
            template.image_mark = model.images.preparation.mark
        return template.render(
            messages,
            tools=request.tools,
            documents=documents,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
            variables=variables,
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param=error.path, logged=error.logged) from error


def text_to_tokenize(request: TokenizeRequest, model: TextModel) -> tuple[str, bool]:
    """The text of a /tokenize request, and whether to add special tokens."""
    if (request.prompt is None) == (request.messages is None):
        refuse("give either prompt or messages.", "prompt")
    if request.prompt is not None:
        _check_countable(request.prompt, "prompt", model)
        return request.prompt, request.add_special_tokens is not False
    check_messages(request.messages or [])
    check_template_fields(request)
    text = render_chat(request, model)
    _check_countable(text, "messages", model)
    return text, request.add_special_tokens is True


def _limit(
    num_tokens: int, request: GenerationRequest, model: TextModel, *, at_least: str = ""
) -> int | None:
    """Tokens to which a prompt of ``num_tokens`` is truncated; None if it stays whole.

    Raises:
        ApiError: the limit is none, or a whole prompt is too long.
    """
    context = model.served.max_model_len
    limit = request.truncate_prompt_tokens
    wanted = max(1, request.max_tokens or 0)
    if (limit is None and num_tokens >= context) or (limit == -1 and wanted >= context):
        raise too_long(num_tokens, wanted, request, model, at_least=at_least)
    if limit is not None and limit > context:
        refuse(
            f"truncate_prompt_tokens ({limit}) exceeds the context length ({context}).",
            "truncate_prompt_tokens",
        )
    return context - wanted if limit == -1 else limit


def _tokenise(
    text: str, request: GenerationRequest, model: TextModel, *, add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Token ids of a text, and those of them that its prompt keeps."""
    may_be_long = len(text) >= model.served.max_model_len  # a token has at least one character
    fewest = model.tokenizer.fewest_tokens(text) if may_be_long else 0
    limit = _limit(fewest, request, model, at_least="at least ")
    ids = _encode(text, limit, request, model, add_special_tokens=add_special_tokens)
    return ids, _fit(ids, limit, request, model)


def _encode(
    text: str, limit: int | None, request: GenerationRequest, model: TextModel, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text, or of a little more than truncation leaves of it."""
    if limit is None:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    from_end = request.truncation_side != "right"
    return model.tokenizer.encode_part(text, limit, from_end=from_end, add_special_tokens=add_special_tokens)


def _fit(ids: list[int], limit: int | None, request: GenerationRequest, model: TextModel) -> list[int]:
    """The prompt, truncated if the request asks for it.

    It must leave room and have known tokens only.
    """
    if limit is not None:
        ids = ids[:limit] if request.truncation_side == "right" else ids[max(0, len(ids) - limit) :]
    if not ids:
        refuse("The prompt is empty.", request.prompt_field)
    if len(ids) >= model.served.max_model_len:
        raise too_long(len(ids), max(1, request.max_tokens or 0), request, model)
    check_vocabulary(ids, model.served, request.prompt_field)
    return ids


def _check_countable(text: str, param: str, model: TextModel) -> None:
    """Refuse a text far longer than any prompt before time goes into its tokens."""
    fewest, context = model.tokenizer.fewest_tokens(text), model.served.max_model_len
    if fewest >= context:
        refuse(
            f"This model's maximum context length is {context} tokens, and the length of {param} is at least "
            f"{fewest}: texts of so many tokens are not counted. Please reduce the length of the {param}.",
            param,
        )


def check_vocabulary(ids: list[int], served: ServedModel, param: str) -> None:
    """Refuse token ids beyond the model's vocabulary."""
    vocab_size = served.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        refuse(f"Token id {wrong} is out of vocabulary, which has {vocab_size} tokens.", param)


def too_long(
    prompt: int, wanted: int, request: GenerationRequest, model: TextModel, *, at_least: str = ""
) -> ApiError:
    """The error for a request beyond the context length, in words that clients look for."""
    name = request.prompt_field
    return bad_request(
        f"This model's maximum context length is {model.served.max_model_len} tokens. However, you requested "
        f"{at_least}{prompt + wanted} tokens ({prompt} in the {name}, {wanted} in the completion). "
        f"Please reduce the length of the {name} or completion.",
        name,
    )
