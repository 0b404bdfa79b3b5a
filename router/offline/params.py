"""``SamplingParams`` of the offline class, and the request they make (no torch)."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine import sampling
from engine.sampling import ALL_LOGPROBS, BadParameter, SamplingFields
from router.openai_api import CompletionRequest

WHOLE_OUTPUTS = (None, 0, 2)
"""Values of vLLM's ``RequestOutputKind`` but for DELTA (1)."""
OFFLINE_ONLY = ("detokenize", "extra_args", "output_kind")
"""Fields that requests do not have."""

FIELD_OF_ERROR = re.compile(r"^(.*) - at `\$\.(\w+)(.*)`$")


class LoRARequest(msgspec.Struct, frozen=True):
    """Choice of a low-rank adapter by name or directory, as in vLLM."""

    lora_name: str
    lora_int_id: int = 0
    """Not used: names are enough."""
    lora_path: str = ""
    """Directory of one that is not among ``lora_modules``, and is loaded."""
    load_inplace: bool = False
    """Whether the name means what the directory has now, whatever it meant before."""


class SamplingParams(SamplingFields, kw_only=True):
    """Sampling parameters of the class ``LLM``: names, ranges and defaults of vLLM's.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    """False leaves ``text`` empty."""
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
        shared = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        for name in ("logprobs", "prompt_logprobs"):
            shared[name] = None if shared[name] == ALL_LOGPROBS else shared[name]
        try:
            sampling.SamplingParams(
                **shared,
                stop=tuple(stops),
                stop_token_ids=tuple(self.stop_token_ids or ()),
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
