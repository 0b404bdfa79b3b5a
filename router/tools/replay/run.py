"""Run of ``lockstep replay``: samples are sent to a server, and its results compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from coordinator.numerics import UNKNOWN, VARIANT, Numerics
from router.capsule import (
    Capsule,
    CapsuleError,
    CapsulePrompt,
    CapsuleSample,
    ReplayAnswer,
    ReplayRequest,
    class_name_of,
    images_of,
    tokens_of_first_weights,
)
from router.errors import one_line
from router.recorded import Difference, first_difference, shown_token
from router.tools.api_client import Api, NoApi, ServerError
from router.tools.replay.saved import MOST_CHARACTERS, Saved, line_of

BUSY = (429, 503)
"""Status of a server that has no room now."""
BUSY_PAUSE = 1.0
"""Seconds until the next try where the server names none."""
FOR_ALL = (0, 401, 403, 404, 405)
"""Status of a server that replays nothing, 0 where none answers.

Others are about one capsule.
"""
NOT_PROMISED = "its class is variant, which promises no equal bits: "


@dataclass(frozen=True)
class Replayed:
    """Sample of a capsule with its second computation."""

    sample: CapsuleSample
    answer: ReplayAnswer | None
    """None for a sample without tokens, for which there is nothing to compute."""

    first_weights: int | None = None
    """Tokens before its weights changed in the capsule; None if they did not."""

    @property
    def up_to(self) -> int | None:
        """Tokens that were computed in the capsule's class and weights both times; None for all."""
        changes = [self.sample.numerics_changes, self.answer.numerics_changes if self.answer else None]
        ends = [found[0].after_tokens for found in changes if found]
        if self.first_weights is not None:
            ends.append(self.first_weights)
        if self.answer is not None and len(self.answer.weight_spans) > 1:
            ends.append(self.answer.weight_spans[1].first_token)
        return min(ends, default=None)

    @property
    def difference(self) -> Difference | None:
        if self.answer is None:
            return None
        return first_difference(self.sample.result, self.answer.result, self.up_to)

    @property
    def is_variant(self) -> bool:
        return class_name_of(self.sample.system_fingerprint or "").endswith(VARIANT)


@dataclass
class ReplayCounts:
    """Numbers of capsules by result."""

    equal: int = 0
    different: int = 0
    unusable: int = 0

    def __str__(self) -> str:
        counts = {"equal": self.equal, "different": self.different, "not replayed": self.unusable}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


class Unusable(Exception):
    """A capsule that cannot be replayed at this server; in words for its owner."""


class Replay:
    """Sends the samples of capsules to a server."""

    def __init__(self, api: Api, concurrency: int, timeout: float, complain: Callable[[str], None]) -> None:
        """``timeout``: seconds for each sample; ``complain`` gets what cannot be replayed."""
        self._api = api
        self._concurrency = concurrency
        self._timeout = timeout
        self._complain = complain

    def __repr__(self) -> str:
        return f"<Replay at {self._api!r}>"

    def all(self, found: Sequence[Saved]) -> ReplayCounts:
        """Replay capsules, and print a line or more for each.

        Raises:
            ServerError: the server cannot replay anything.
        """
        outcome = ReplayCounts()
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            for saved, results in [(each, self._begin(pool, each.capsule)) for each in found]:
                try:
                    replayed = [result.result() for result in results]
                except Unusable as error:
                    outcome.unusable += 1
                    self._complain(saved.place + one_line(str(error), MOST_CHARACTERS))
                    continue
                lines = [*self._differences(replayed)]
                outcome.different += bool(lines)
                outcome.equal += not lines
                for line in lines or [_equal(saved.capsule, replayed)]:
                    print(line_of(saved, line), flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return outcome

    def _begin(self, pool: ThreadPoolExecutor, capsule: Capsule) -> list[Future[Replayed]]:
        return [
            pool.submit(self._replayed, capsule, prompt, sample)
            for prompt in capsule.prompts
            for sample in prompt.samples
        ]

    def _replayed(self, capsule: Capsule, prompt: CapsulePrompt, sample: CapsuleSample) -> Replayed:
        """Compute a sample again at the server.

        Raises:
            Unusable, ServerError: it cannot be.
        """
        if not sample.result.token_ids:
            return Replayed(sample, None)
        wanted = msgspec.json.encode(request_of(capsule, prompt, sample))
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                answer = self._answer(wanted)
                break
            except ServerError as error:
                if error.status in FOR_ALL:
                    raise
                pause = BUSY_PAUSE if error.retry_after is None else error.retry_after
                if error.status not in BUSY or time.monotonic() + pause > deadline:
                    raise Unusable(str(error)) from error
            time.sleep(pause)
        if answer.system_fingerprint != sample.system_fingerprint:
            raise Unusable(
                f"instance {answer.dp_rank} computed it in class {answer.system_fingerprint}, not in "
                f"{sample.system_fingerprint}: try again"
            )
        return Replayed(sample, answer, tokens_of_first_weights(capsule, sample.index))

    def _answer(self, wanted: bytes) -> ReplayAnswer:
        try:
            with self._api.open("/v1/replay", wanted) as response:
                return msgspec.json.decode(response.read(), type=ReplayAnswer)
        except NoApi as error:
            raise ServerError(
                f"the server at {self._api.url} replays nothing, it is no Lockstep or an older one: {error}"
            ) from error

    def _differences(self, replayed: Sequence[Replayed]) -> Iterator[str]:
        for each in replayed:
            if (difference := each.difference) is None:
                continue
            assert each.answer is not None
            promise = NOT_PROMISED if each.is_variant else ""
            expected = shown_token(difference.expected, difference.expected_end, self._text)
            found = shown_token(difference.found, difference.found_end, self._text)
            yield (
                f"{promise}sample {each.sample.index} differs at token {difference.index} of "
                f"{len(each.sample.result.token_ids)}: {expected} in the capsule, {found} from instance "
                f"{each.answer.dp_rank}"
            )

    def _text(self, token_id: int) -> str:
        """A token's text; its bare number says enough where the server has none."""
        try:
            with self._api.open("/detokenize", msgspec.json.encode({"tokens": [token_id]})) as response:
                return repr(msgspec.json.decode(response.read())["prompt"])
        except (ServerError, ValueError, LookupError, TypeError):
            return "?"


def request_of(capsule: Capsule, prompt: CapsulePrompt, sample: CapsuleSample) -> ReplayRequest:
    """Body of the request that has a sample computed again.

    Raises:
        Unusable: the capsule does not say in which class.
    """
    if sample.system_fingerprint is None:
        raise Unusable("its instance named no numerics class, so no other can be chosen: it was an older one")
    try:
        images = images_of(capsule, capsule.prompts.index(prompt))
    except CapsuleError as error:
        raise Unusable(str(error)) from error
    name = class_name_of(sample.system_fingerprint)
    known = {each.fingerprint: each for each in capsule.numerics}
    unknown = Numerics(name, UNKNOWN, UNKNOWN, invariant=not name.endswith(VARIANT))
    return ReplayRequest(
        model=capsule.model,
        numerics=known.get(name, unknown),
        prompt_ids=list(prompt.prompt_ids),
        params=prompt.params,
        seed=prompt.seed,
        sample_index=sample.sample_index,
        adapter=capsule.adapter,
        images=images,
    )


def _equal(capsule: Capsule, replayed: Sequence[Replayed]) -> str:
    num_tokens = sum(len(each.sample.result.token_ids) for each in replayed)
    compared = sum(len(each.sample.result.token_ids[: each.up_to]) for each in replayed)
    classes = ", ".join(map(str, capsule.numerics)) or "no class"
    words = f"equal, {len(replayed)} samples, {num_tokens} tokens, {classes}"
    if len(replayed) == 1:
        words = words.replace("1 samples", "1 sample")
    if compared < num_tokens:
        words += f"; only {compared} tokens were compared: the class changed before the others"
    remarks = dict.fromkeys(remark for each in replayed if each.answer for remark in each.answer.remarks)
    words += "".join(f"; {remark}" for remark in remarks)
    if any(each.is_variant for each in replayed):
        words += "; by luck: the class is variant, and promises no equal bits"
    return words
