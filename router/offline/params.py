"""``SamplingParams`` of the offline class, and the request they make (no torch)."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine import sampling
from engine.sampling import ALL_LOGPROBS, BadParameter
from router.openai_api import CompletionRequest

WHOLE_OUTPUTS = (None, 0, 2)
"""Values of vLLM's ``RequestOutputKind`` but for DELTA (1)."""
OFFLINE_ONLY = ("detokenize", "extra_args", "output_kind")
"""Fields that requests do not have."""

FIELD_OF_ERROR = re.compile(r"^(.*) - at `\$\.(\w+)(.*)`$")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to generate: names, ranges and defaults of vLLM's ``SamplingParams``.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    n: int = 1
    """Samples per prompt."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    """None (or -1): drawn from the seed of the ``LLM``."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: up to the model's context, which ends any generation."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Most likely tokens to return per generated token, 0 for the generated one alone."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """False leaves ``text`` empty."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    """Only so many last tokens of a prompt are used; -1: as many as fit."""
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    """``StructuredOutputsParams``, or a dictionary of its fields: what the output must look like."""
    output_kind: Any = None
    """vLLM's ``RequestOutputKind``: outputs are whole, so only its DELTA asks for something else."""
    extra_args: Any = None
    """vLLM's way to plug-ins, which are none here: must be empty."""

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if default is not None and getattr(self, name) is None and name != "max_tokens":
                raise ValueError(f"{name} must not be None; leave it out for {default!r}")
        request = request_of(self)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        try:
            sampling.SamplingParams(
                n=self.n,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=self.seed,
                stop=tuple(stops),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                logprobs=None if self.logprobs == ALL_LOGPROBS else self.logprobs,
                prompt_logprobs=None if self.prompt_logprobs == ALL_LOGPROBS else self.prompt_logprobs,
                logit_bias=self.logit_bias or {},
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            ).check(vocab_size=sampling.UNBOUNDED, max_logprobs=sampling.UNBOUNDED)
        except BadParameter as error:
            raise ValueError(str(error)) from error
        if getattr(self.output_kind, "value", self.output_kind) not in WHOLE_OUTPUTS:
            raise ValueError(
                "output_kind must be CUMULATIVE or FINAL_ONLY: outputs come when they are whole."
            )
        if self.extra_args:
            raise ValueError("extra_args are not supported: nothing here reads them; leave them out.")
        if stops and not self.detokenize:
            raise ValueError("stop needs detokenize: without text no stop string is found.")

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return msgspec.convert(msgspec.to_builtins(self), SamplingParams)


def request_of(params: SamplingParams) -> CompletionRequest:
    """A request that sets every parameter, so that no default of model or endpoint applies.

    Raises:
        ValueError: a value of the wrong type.
    """
    names = (name for name in SamplingParams.__struct_fields__ if name not in OFFLINE_ONLY)
    fields = {name: getattr(params, name) for name in names}
    try:
        return msgspec.convert(fields, CompletionRequest)
    except msgspec.ValidationError as error:
        match = FIELD_OF_ERROR.match(str(error))
        raise ValueError(f"{match[2]}: {match[1]}" if match else str(error)) from error
