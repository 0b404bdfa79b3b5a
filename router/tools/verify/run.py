"""Run of ``lockstep verify``: capsules by class, each drawn again, differences explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from coordinator.numerics import UNKNOWN, Numerics, is_invariant
from engine.verification.classes import ClassSettings, settings_of, variations
from router.capsule import CapsuleModel
from router.recorded import shown_token
from router.text.text_model import TextModel
from router.tools.replay.run import Unusable
from router.tools.replay.saved import Saved, line_of
from router.tools.verify.samples import Computes, SampleCheck, draw_again, jobs_of, score
from router.tools.verify.verdict import Cause, VerifyStatus, closeness, other_samplers


class ScorerWish(msgspec.Struct, frozen=True):
    """What a scorer is to compute with."""

    kernels: str
    dtype: str
    settings: ClassSettings | None = None
    """None: what the command's flags name."""


Opens = Callable[[ScorerWish], AbstractContextManager[Computes]]
"""Opener of a scorer, which reads the checkpoint; a CPU without the kernels gets others."""


class CapsuleVerdict(msgspec.Struct, frozen=True):
    """Result for one capsule."""

    saved: Saved
    status: VerifyStatus
    lines: tuple[str, ...]


class Verification:
    """Second computation of capsules, class by class, and its verdicts."""

    def __init__(
        self,
        opens: Opens,
        model: TextModel,
        known: CapsuleModel,
        weight_format: str,
        *,
        explains: bool,
        only_plain: bool = False,
    ) -> None:
        """``known``: the given checkpoint; ``explains``: read it with other settings for an explanation.

        ``only_plain``: no answer may be of weights or a cache that were quantised while they were read.
        """
        self._opens = opens
        self.model = model
        self._known = known
        self._weight_format = weight_format
        self._explains = explains
        self._only_plain = only_plain
        self._settings: dict[str, ClassSettings] = {}
        """By name of a class: settings that it was found to have."""
        self._others: dict[int, str] = {}
        """By id of a job: what it was drawn with, as words."""

    def __repr__(self) -> str:
        return f"<Verification by {self._known.name}>"

    def verify(self, found: Sequence[Saved]) -> Iterator[CapsuleVerdict]:
        """Verdicts of all capsules, in their order.

        Raises:
            CheckpointError, TooLittleMemory: the model cannot be computed here.
        """
        jobs: list[list[SampleCheck]] = []
        unusable: dict[int, str] = {}
        for index, saved in enumerate(found):
            try:
                jobs.append(jobs_of(saved))
            except Unusable as error:
                jobs.append([])
                unusable[index] = str(error)
        classes: dict[Numerics, list[SampleCheck]] = {}
        for job in (job for each in jobs for job in each):
            classes.setdefault(job.numerics, []).append(job)
        here: dict[str, Numerics] = {}
        for wanted, members in classes.items():
            here[wanted.fingerprint] = self._compute(wanted, members)
        for index, (saved, each) in enumerate(zip(found, jobs, strict=True)):
            if index in unusable:
                yield CapsuleVerdict(saved, VerifyStatus.UNUSABLE, (unusable[index],))
            else:
                yield self._verdict(saved, each, here)

    def _compute(self, wanted: Numerics, jobs: Sequence[SampleCheck]) -> Numerics:
        """Draw samples of one class again; returns the class that computed them."""
        wish = ScorerWish(wanted.kernels, wanted.dtype)
        with self._opens(wish) as scorer:
            computed = scorer.numerics
            settings = self._settings_of(scorer, wanted)
            if settings is None:
                self._draw(scorer, jobs)
        if settings is not None:
            self._settings[wanted.fingerprint] = settings
            wish = msgspec.structs.replace(wish, settings=settings)
            with self._opens(wish) as scorer:
                computed = scorer.numerics
                self._draw(scorer, jobs)
        lies = [job for job in jobs if self._cause(job) is Cause.MODEL]
        if lies and self._explains and computed.fingerprint == wanted.fingerprint:
            self._try_settings(wish, settings, lies)
        return computed

    def _settings_of(self, scorer: Computes, wanted: Numerics) -> ClassSettings | None:
        """Settings with which to read the checkpoint again; None where none helps."""
        if scorer.numerics.fingerprint == wanted.fingerprint:
            return None
        return settings_of(scorer.facts, wanted.fingerprint, self._weight_format)

    def _draw(self, scorer: Computes, jobs: Sequence[SampleCheck]) -> None:
        draw_again(scorer, jobs, self.model)
        different = [job for job in jobs if job.redraw is not None and not job.is_equal]
        score(scorer, different)
        for job in different:
            if self._cause(job) in (Cause.SAMPLER, Cause.TOKENS):
                self._try_samplers(scorer, job)

    def _try_samplers(self, scorer: Computes, job: SampleCheck) -> None:
        for words, params in other_samplers(job.prompt.params):
            other = SampleCheck(job.saved, job.prompt, job.sample)
            draw_again(scorer, [other], self.model, params)
            if other.is_equal:
                self._others[id(job)] = f"it is what the model gives {words}"
                return

    def _try_settings(
        self, wish: ScorerWish, used: ClassSettings | None, jobs: Sequence[SampleCheck]
    ) -> None:
        """Draw samples with other settings of the model, until each is explained."""
        for settings in variations(self._weight_format):
            left = [job for job in jobs if id(job) not in self._others]
            if settings.batch_invariant or not left:
                return
            if settings == (used or ClassSettings()):
                continue
            with self._opens(msgspec.structs.replace(wish, settings=settings)) as scorer:
                others = [SampleCheck(job.saved, job.prompt, job.sample) for job in left]
                draw_again(scorer, others, self.model)
            for job, other in zip(left, others, strict=True):
                if other.is_equal:
                    self._others[id(job)] = (
                        f"it is what the model gives with {settings}, which is not its class"
                    )

    @staticmethod
    def _cause(job: SampleCheck) -> Cause | None:
        return None if job.redraw is None or job.is_equal else job.redraw.cause(job.scores)

    # ---- words

    def _verdict(
        self, saved: Saved, jobs: Sequence[SampleCheck], here: dict[str, Numerics]
    ) -> CapsuleVerdict:
        lines, statuses = [], []
        for job in jobs:
            computed = here[job.numerics.fingerprint]
            if job.problem is not None:
                lines.append(f"sample {job.sample.index} cannot be computed: {job.problem}")
                statuses.append(VerifyStatus.TOO_LONG if job.is_too_long else VerifyStatus.UNUSABLE)
            elif not job.is_equal:
                lines.append(self._difference(job) + self._why(job, computed))
                statuses.append(self._status(job, computed))
        if not lines:
            found = [self._settings.get(job.numerics.fingerprint) for job in jobs]
            is_quantised = any(each is not None and each.is_quantised for each in found)
            status = VerifyStatus.QUANTIZED if self._only_plain and is_quantised else VerifyStatus.EQUAL
            return CapsuleVerdict(saved, status, (self._equal(saved, jobs, here),))
        return CapsuleVerdict(saved, statuses[0], tuple(lines))

    def _status(self, job: SampleCheck, computed: Numerics) -> VerifyStatus:
        if not is_invariant(job.numerics.fingerprint):
            return VerifyStatus.VARIANT
        if self._names_other_model(job):
            return VerifyStatus.OTHER_MODEL
        return (
            VerifyStatus.DIFFERENT
            if computed.fingerprint == job.numerics.fingerprint
            else VerifyStatus.ONLY_CLOSE
        )

    def _names_other_model(self, job: SampleCheck) -> bool:
        model = job.saved.capsule.model
        return model.fingerprint != self._known.fingerprint

    def _difference(self, job: SampleCheck) -> str:
        assert job.redraw is not None
        difference = job.redraw.difference
        assert difference is not None
        alone = job.sample.result.logprobs is None
        recorded, found = [
            f"{token[0]} {self._text(token[0])}"
            if token is not None and alone
            else shown_token(token, end, self._text)
            for token, end in (
                (difference.expected, difference.expected_end),
                (difference.found, difference.found_end),
            )
        ]
        return (
            f"sample {job.sample.index} differs at token {difference.index} of "
            f"{len(job.sample.result.token_ids)}: {recorded} in the capsule, {found} here: "
        )

    def _why(self, job: SampleCheck, computed: Numerics) -> str:
        """Explanation of a difference."""
        assert job.redraw is not None
        model, cause = job.saved.capsule.model, job.redraw.cause(job.scores)
        near = ""
        if job.sample.result.logprobs is not None:
            near = f"; {closeness(job.sample.result.logprobs, job.scores)}"
        if not is_invariant(job.numerics.fingerprint):
            return (
                f"its class {job.numerics} is variant, which promises no equal bits: only closeness can be "
                f"shown{near}"
            )
        if self._names_other_model(job):
            return (
                f"the capsule is of checkpoint {model.fingerprint[:64]}, not of {self._known.fingerprint} "
                f"here{near}"
            )
        if computed.fingerprint != job.numerics.fingerprint:
            wanted = job.numerics
            if computed.weights != wanted.weights and wanted.kernels != UNKNOWN:
                return (
                    f"the capsule is of weights {wanted.weights[:64]}, not of {computed.weights} here{near}"
                )
            return (
                f"only closeness can be shown, as its class {wanted} cannot be computed here (this is "
                f"{computed}){near}"
            )
        other = self._others.get(id(job))
        words = {
            Cause.CHANGED: "this place alone was changed after the answer was computed",
            Cause.END: "the answer was cut or continued after it was computed, or another limit ended it",
            Cause.SAMPLER: "the model gives its tokens these log-probabilities but draws others: another "
            "sampling parameter, seed or limit than the capsule names",
            Cause.MODEL: "the model gives other log-probabilities: other weights, another prompt, or a "
            "quantised model or cache",
            Cause.TOKENS: "other weights, another prompt, or other sampling parameters",
        }[cause]
        if cause in (Cause.CHANGED, Cause.END):
            return words
        return (f"{other}; " if other else "") + words + near

    def _equal(self, saved: Saved, jobs: Sequence[SampleCheck], here: dict[str, Numerics]) -> str:
        num_tokens = sum(len(job.sample.result.token_ids) for job in jobs)
        compared = sum(len(job.sample.result.token_ids[: job.up_to]) for job in jobs)
        classes = ", ".join(dict.fromkeys(str(job.numerics) for job in jobs)) or "no class"
        samples = f"{len(jobs)} sample{'s' * (len(jobs) != 1)}"
        words = f"equal, {samples}, {num_tokens} tokens, {classes}"
        used = dict.fromkeys(job.numerics.fingerprint for job in jobs)
        settings = {self._settings[name] for name in used if name in self._settings}
        words += "".join(f", with {each}" for each in settings if each != ClassSettings())
        if any(job.sample.result.logprobs is None for job in jobs):
            words += "; tokens alone, as it has no log-probabilities"
        if compared < num_tokens:
            words += f"; only {compared} tokens were compared: the class changed before the others"
        computed = {str(here[job.numerics.fingerprint]) for job in jobs} - {str(job.numerics) for job in jobs}
        if computed:
            words += f"; computed in {', '.join(sorted(computed))}"
        if saved.capsule.model.chat_template != self._known.chat_template:
            words += "; its chat template is not the checkpoint's: the same messages may give another prompt"
        return words

    def _text(self, token_id: int) -> str:
        return repr(self.model.tokenizer.decode([token_id]))


def printed(verdict: CapsuleVerdict) -> list[str]:
    """Lines to print for a verdict."""
    return [line_of(verdict.saved, line) for line in verdict.lines]
