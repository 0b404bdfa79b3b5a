"""The wire of the OpenAI-compatible endpoints: what requests may hold and what answers look like.

Field names and meanings are OpenAI's, and vLLM's where it has more. Clients send ``null`` for what they do
not set and fields that nobody knows, so every optional field takes null and unknown fields are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

MOST = 2**63 - 1
Int = Annotated[int, Meta(ge=-MOST - 1, le=MOST)]
"""JSON has no bound on integers, the messages to instances have."""

# ---- requests


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """What an answer must look like: one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's form, or in GBNF."""
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    """A regular expression of what may stand between the tokens of JSON."""


class MoreFields(msgspec.Struct, kw_only=True):
    """What every endpoint that generates takes beyond its own API, most of it vLLM's."""

    request_id: str | None = None
    seed: Int | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Int | str, float] | None = None
    """Biases by token id; JSON has the ids as text."""
    bad_words: list[str] | None = None
    thinking_token_budget: Int | None = None
    """Most tokens of reasoning; -1: no limit."""
    allowed_token_ids: list[Int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    priority: Int | None = None
    timeout: float | None = None
    """Seconds that the answer may take."""
    cache_salt: str | None = None
    session_id: str | None = None
    """Requests of one session go to the same instance while that costs little."""
    prompt_cache_key: str | None = None
    """OpenAI's name for the like; ``session_id`` wins."""
    data_parallel_rank: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    """The instance to use, under both of SGLang's names."""
    routed_dp_rank: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    """The older names of ``structured_outputs``."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    """SGLang's names, as the next two."""
    regex: str | None = None
    ebnf: str | None = None
    # Not supported (yet): refused when set to anything that would matter.
    best_of: Any = None
    logprob_token_ids: Any = None
    packed_top_logprobs: Any = None
    use_beam_search: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    repetition_detection: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None
    return_prompt_text: Any = None
    moderation: Any = None
    custom_logit_processor: Any = None
    stop_regex: Any = None
    """SGLang's names, as the rest."""
    no_stop_trim: Any = None
    min_new_tokens: Any = None
    input_ids: Any = None
    lora_path: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    separate_reasoning: bool | None = None


class GenerationRequest(MoreFields, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    """Chat's newer name of ``max_tokens``, over which it goes."""
    max_output_tokens: Any = None
    """Refused, like the next one: names that other endpoints have."""
    stop_sequences: Any = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    prompt_logprobs: Int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    response_format: Any = None

    prompt_field: ClassVar[str] = "prompt"
    """Field that holds the prompt, for errors."""
    default_max_tokens: ClassVar[int | None] = None
    """Most tokens of an answer where none are given; None: up to the context length."""

    @property
    def max_tokens_field(self) -> str:
        """Field that ``max_tokens`` was given in, for errors."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(GenerationRequest, kw_only=True):
    default_max_tokens: ClassVar[int | None] = 16

    prompt: str | list[str | Int | list[Int]] | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    prompt_logprobs_from: Annotated[int, Meta(ge=0)] | None = None
    """First prompt token whose log-probability is wanted with ``prompt_logprobs``; those before are null."""
    return_routed_experts: bool | None = None
    """Whether the answer is to have the experts of each token."""
    top_logprobs: Any = None
    """Refused, like the next one where it asks for anything."""
    tools: Any = None


class OpenEndedCompletion(CompletionRequest, kw_only=True):
    """Completion that may fill the context length unless it names fewer tokens."""

    default_max_tokens: ClassVar[int | None] = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    verbosity: str | None = None
    prompt_token_ids: Any = None
    functions: Any = None
    """The older form of tools.

    Refused, like the next four where they ask for more than text.
    """
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    prompt_field: ClassVar[str] = "messages"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    """Not supported: refused."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[Int]
    model: str | None = None


# ---- log-probabilities


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One per prompt token, by token id; None for the first."""


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


# ---- answers


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class NumericsChange(msgspec.Struct, rename={"before": "from", "after": "to"}):
    """A choice that went on in another numerics class: see :class:`router.mesh.NumericsSwitch`."""

    choice: int
    """Its ``index``."""
    after_tokens: int
    before: str | None
    after: str | None


class WeightRange(msgspec.Struct):
    """Tokens of a choice that one weight version made, up to its next range."""

    choice: int
    """Its ``index``."""
    first_token: int
    weight_version: str
    """Label of the version; its number where it has none; ``default`` at first."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType | None = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    numerics_changes: list[NumericsChange] | UnsetType = UNSET
    """Those of all choices; unset where there are none."""


RoutedLists = list[list[list[int] | None]]
"""Experts by token and layer; None in a layer that is no mixture."""


class CompletionChoice(msgspec.Struct):
    """One choice of a whole answer and, without ``prompt_logprobs``, of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightRange] | UnsetType = UNSET
    """With ``token_ids``: the ranges that begin among them."""
    routed_experts: RoutedLists | UnsetType = UNSET
    """By token of prompt and output but the last; in a stream, the new ones."""


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    """An answer of /v1/completions, whole or a chunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    """Name of the numerics class; null in whole answers if there is none, or several."""
    service_tier: UnsetType | None = UNSET
    """Null in whole answers, as vLLM has it; so is the next one."""
    kv_transfer_params: UnsetType | None = UNSET
    numerics_changes: list[NumericsChange] | UnsetType = UNSET
    """In the last chunk of a choice, as in its ``usage``."""
    weight_version: str | UnsetType = UNSET
    """Newest weight version of its tokens; in the last chunks of a stream."""
    weight_versions: list[WeightRange] | UnsetType = UNSET
    """Ranges of all choices, where several versions made them."""


class FunctionCall(msgspec.Struct):
    """``arguments`` is JSON text, as the model wrote it."""

    arguments: str = ""
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """The same under the name that it had before."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    weight_versions: list[WeightRange] | UnsetType = UNSET
    """With ``token_ids``: their ranges."""


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None
    weight_version: str | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """More of the call at ``index``.

    The first one has id, type and the function's name.
    """

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    numerics_changes: list[NumericsChange] | UnsetType = UNSET
    """In the last chunk of a choice, as in its ``usage``."""
    weight_version: str | UnsetType = UNSET
    """In the last chunk of a choice, and of the stream."""
    weight_versions: list[WeightRange] | UnsetType = UNSET


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    id: str
    created: int
    max_model_len: int
    root: str
    owned_by: str = "lockstep"
    parent: str | None = None
    permission: list[Any] = []
    input_modalities: tuple[str, ...] = ("text",)
    """What requests may have: ``text``, and ``image`` where images are taken."""


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[ModelCard]
