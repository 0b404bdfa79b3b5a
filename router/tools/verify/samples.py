"""Samples of capsules as requests for a scorer, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from coordinator.numerics import Facts, Numerics
from engine.messages import Delta, Submit
from engine.sampling import SamplingParams
from router.api.headers import RequestTerms
from router.api.replaying import check_adapter, check_sample, sample_of
from router.capsule import CapsulePrompt, CapsuleSample, tokens_of_first_weights
from router.errors import ApiError
from router.images.replayed import taken_from
from router.mesh import Prompt
from router.recorded import Logprob, Recorder, end_of
from router.text.text_model import TextModel
from router.tools.replay.run import Unusable, request_of
from router.tools.replay.saved import Saved
from router.tools.verify.verdict import Redraw

if TYPE_CHECKING:
    from engine.verification.scorer import Recorded, Take

TERMS = RequestTerms(id="verify")


class Computes(Protocol):
    """What :class:`engine.verification.scorer.Scorer` does."""

    @property
    def facts(self) -> Facts: ...

    @property
    def numerics(self) -> Numerics: ...

    @property
    def max_model_len(self) -> int: ...

    def compute(self, wanted: Sequence[Recorded], take: Take) -> Mapping[int, str]: ...


class SampleCheck:
    """One sample of a capsule, to be drawn again and scored."""

    def __init__(self, saved: Saved, prompt: CapsulePrompt, sample: CapsuleSample) -> None:
        self.saved, self.prompt, self.sample = saved, prompt, sample
        ends = [tokens_of_first_weights(saved.capsule, sample.index)]
        ends += [change.after_tokens for change in sample.numerics_changes[:1]]
        self.up_to = min((each for each in ends if each is not None), default=None)
        """Tokens of its first class and its first weights; None for all."""
        self.redraw: Redraw | None = None
        """None: there is nothing to draw."""
        self.scores: list[Logprob] = []
        self.problem: str | None = None
        """Why it cannot be drawn."""
        self.is_too_long = False

    def __repr__(self) -> str:
        return f"<SampleCheck of {self.saved.capsule.id}, sample {self.sample.index}: {self.redraw!r}>"

    @property
    def is_equal(self) -> bool:
        return self.problem is None and (self.redraw is None or self.redraw.difference is None)

    @property
    def numerics(self) -> Numerics:
        """Its class, as far as the capsule names it."""
        return request_of(self.saved.capsule, self.prompt, self.sample).numerics


def jobs_of(saved: Saved) -> list[SampleCheck]:
    """All samples of a capsule.

    Raises:
        Unusable: the class of one is not named.
    """
    jobs = [
        SampleCheck(saved, prompt, sample) for prompt in saved.capsule.prompts for sample in prompt.samples
    ]
    for job in jobs:
        _ = job.numerics
    return jobs


def draw_again(
    scorer: Computes, jobs: Sequence[SampleCheck], model: TextModel, params: SamplingParams | None = None
) -> None:
    """Draw samples again, and compare them; with other ``params``, if given."""
    from engine.verification.scorer import Recorded  # loads torch

    drawn: list[tuple[SampleCheck, Redrawing]] = []
    for job in jobs:
        job.redraw, job.problem, job.is_too_long = None, None, False
        if not job.sample.result.token_ids:
            continue
        try:
            drawn.append((job, Redrawing(job, model, params)))
        except (ApiError, Unusable) as error:
            job.problem = str(error)
            job.is_too_long = "context length" in str(error)
    wanted = [Recorded(_submit_of(each.prompt), job.sample.result.token_ids) for job, each in drawn]
    refused = scorer.compute(wanted, lambda index, delta: drawn[index][1].take(delta))
    for index, (job, each) in enumerate(drawn):
        job.redraw, job.problem = each.redraw, refused.get(index) or each.error
        job.is_too_long = index in refused


class Redrawing:
    """A sample that is being drawn, as text and as tokens: stop strings end it."""

    def __init__(self, job: SampleCheck, model: TextModel, params: SamplingParams | None) -> None:
        """Raises ApiError or Unusable where the capsule asks for what no request can."""
        wanted = request_of(job.saved.capsule, job.prompt, job.sample)
        if params is not None:
            wanted = msgspec.structs.replace(wanted, params=params)
        check_sample(wanted, model.served)
        check_adapter(wanted, model.served)
        recorder = Recorder()
        self._stream = sample_of(wanted, model, TERMS, recorder)
        self.prompt = self._stream.prompt
        self.redraw = Redraw(job.sample.result, job.up_to, recorder)
        self.error: str | None = None

    def take(self, delta: Delta) -> bool:
        """Take in drawn tokens; returns whether that is enough."""
        try:
            self._stream.take(delta)
        except ApiError as error:
            self.error = str(error)
            return True
        ended = self._stream.finish_reason is not None
        return self.redraw.look(end_of(self._stream.recorded) if ended else None) or ended


def score(scorer: Computes, jobs: Sequence[SampleCheck]) -> None:
    """Score the recorded tokens of samples, each behind those before it."""
    from engine.verification.scorer import Recorded

    wanted = []
    for job in jobs:
        prompt, answer = job.prompt.prompt_ids, job.sample.result.token_ids[: job.up_to]
        ids = [*prompt, *answer][: scorer.max_model_len - 1]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        try:
            images = taken_from(request_of(job.saved.capsule, job.prompt, job.sample).images)
        except (ApiError, Unusable):  # said where it could not be drawn
            images = ()
        wanted.append(Recorded(Submit(0, "score", ids, params, 0, images=images), ()))

    def take(index: int, delta: Delta) -> bool:
        job, found = jobs[index], delta.prompt_logprobs or []
        recorder = Recorder()
        known = [each for each in found[len(job.prompt.prompt_ids) :] if each is not None]
        recorder.add([each.token_id for each in known], known)
        job.scores = [recorder.at(number)[1] for number in range(recorder.num_tokens)]
        return True

    scorer.compute(wanted, take)


def _submit_of(prompt: Prompt) -> Submit:
    return Submit(
        request=0,
        request_id=prompt.request_id,
        prompt_ids=prompt.prompt_ids,
        params=prompt.params,
        seed=prompt.seed,
        sample_index=prompt.sample_index,
        adapter=prompt.adapter,
        images=prompt.images,
    )
