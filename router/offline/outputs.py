"""Outputs of the offline class, with vLLM's names (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.api.logprobs import LogprobShapes
from router.mesh import NumericsSwitch, WeightSpan
from router.offline.inputs import Job
from router.openai_api import PromptLogprob as Logprob
from router.openai_api import PromptLogprobs
from router.text.output_stream import TextPiece
from router.text.tokens import Tokenizer

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "output_of"]


@dataclass
class CompletionOutput:
    """One generated sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """Generated tokens; a stop token that ended it included."""
    cumulative_logprob: float | None
    """Sum over the generated tokens (natural logarithm); None without ``logprobs``."""
    logprobs: PromptLogprobs | None
    """Per generated token: by token id, the generated token first."""
    finish_reason: str | None
    """``stop`` or ``length``."""
    stop_reason: int | str | None
    """Stop token or string that ended it; None at the end of sequence or length."""
    system_fingerprint: str | None = None
    """Name of the numerics class that computed its first token; None if unknown."""
    numerics_changes: Sequence[NumericsSwitch] = ()
    """Changes of its numerics class; empty if it was computed in one."""
    weight_spans: Sequence[WeightSpan] = ()
    """Weight versions that made its tokens."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """Prompt and generated samples of one request."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    """Per prompt token, None for the first; None without ``SamplingParams.prompt_logprobs``."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV cache was there already."""
    metrics: None = None
    """Always None, as vLLM's is by default; our metrics are those of ``serve``."""


def scores_of(output: RequestOutput, num_prompt: int) -> PromptLogprobs:
    """Log-probabilities of a prompt's tokens behind the first ``num_prompt``."""
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs[num_prompt:]


def output_of(job: Job, pieces: Sequence[TextPiece], tokenizer: Tokenizer) -> RequestOutput:
    """Output of a job, from the joined piece of each sample."""
    params, first = job.params, job.samples[0]
    num_prompt = params.prompt_logprobs
    shapes = LogprobShapes(tokenizer, params.logprobs or 0)
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.prompt,
        prompt_token_ids=first.prompt.prompt_ids,
        prompt_logprobs=None if num_prompt is None else shapes.prompt(first.prompt_logprobs, num_prompt),
        outputs=[
            CompletionOutput(
                index=sample.index,
                text=piece.text if params.detokenize else "",
                token_ids=piece.token_ids,
                cumulative_logprob=None
                if params.logprobs is None
                else sum(entry.logprob for entry in piece.logprobs),
                logprobs=None if params.logprobs is None else shapes.prompt(piece.logprobs, params.logprobs),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                system_fingerprint=sample.system_fingerprint,
                numerics_changes=sample.numerics_changes,
                weight_spans=sample.weight_spans,
            )
            for sample, piece in zip(job.samples, pieces, strict=True)
        ],
        finished=True,
        num_cached_tokens=first.num_cached_tokens,
    )
