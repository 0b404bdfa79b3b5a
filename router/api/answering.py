"""Way of an understood request to its answer: span, samples, quota, run.

Quotas, deadlines and spans are kept here. The request may come from any API; :data:`Shape` makes its answer.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from coordinator.process.process import REQUEST
from coordinator.process.tracing import Tracing
from router.api.answers import Answer, AnswerFacts
from router.api.capsules import capsule_of
from router.api.headers import (
    CAPSULE,
    MOST_REMARKS,
    RequestTerms,
    key_of,
    printable,
    read_terms,
    request_id,
)
from router.api.request_run import RequestRun
from router.api.request_samples import UNPREDICTABLE, make_samples
from router.api.stored_terms import stored_terms
from router.api.streaming import EventStream, whole_response
from router.api.tracing import UNTRACED, RequestTrace
from router.api.understanding import Understood
from router.capsule import DIGEST_PREFIX
from router.config import HttpConfig
from router.http.body import read_body
from router.http.quotas import Quotas
from router.mesh import Mesh
from router.metrics.metrics import Metrics
from router.openai_api import StreamOptions
from router.signing.keys import CapsuleKey
from router.text.output_stream import OutputStream

NOT_ENFORCED = "x-lockstep-not-enforced"
"""Response header: JSON paths of the schemas given that answers need not follow."""

Shape = Callable[[AnswerFacts], Answer]
"""Makes the answer of an API, given what all answers have in common."""


class Answering:
    """Runner of understood requests, which gives their HTTP responses."""

    def __init__(
        self,
        mesh: Mesh,
        config: HttpConfig,
        metrics: Metrics,
        quotas: Quotas,
        tracing: Tracing | None = None,
        capsule_key: CapsuleKey | None = None,
    ) -> None:
        """``capsule_key`` signs capsules."""
        self._mesh = mesh
        self._config = config
        self._metrics = metrics
        self._quotas = quotas
        self._tracing = tracing
        self._capsule_key = capsule_key
        self._chance = UNPREDICTABLE if config.seed is None else random.Random(config.seed)

    def __repr__(self) -> str:
        return f"<Answering with {self._mesh!r}>"

    async def receive_body(self, request: Request, *, any_type: bool = False) -> bytes:
        """The body of a request, read where the request could be admitted now.

        ``any_type``: as for :func:`.read_body`.

        Raises:
            ApiError, MeshError: it cannot be read, or could not be admitted now, as far as known.
        """
        body = await read_body(request, self._config, any_type=any_type)
        if request.headers.get(CAPSULE):
            request.state.body_digest = DIGEST_PREFIX + hashlib.sha256(body).hexdigest()
        self._mesh.check_room()
        if (stored := stored_terms(request)) is None or stored.is_limited:
            self._quotas.check(key_of(request))
        return body

    async def answer_request(
        self, request: Request, understood: Understood, prefix: str, shape: Shape
    ) -> Response:
        """The answer to an understood request; ``prefix`` begins its id.

        Raises:
            ApiError, MeshError: it is refused, or failed before anything was sent.
        """
        wanted = understood.wanted
        client_id = request.state.request_id = request_id(request, wanted)
        REQUEST.set(client_id)
        if self._config.enable_force_include_usage and wanted.stream:
            wanted.stream_options = wanted.stream_options or StreamOptions()
            wanted.stream_options.include_usage = wanted.stream_options.continuous_usage_stats = True
        id = prefix + client_id
        trace = RequestTrace.begin(self._tracing, request, id, understood)
        try:
            terms = read_terms(request, id, wanted, trace.traceparent)
            stored = stored_terms(request)
            chance = self._chance if stored is None else random.Random(stored.seed)
            samples = make_samples(understood, terms, chance)
            digest = request.state.body_digest if terms.records else None
            created = int(time.time()) if stored is None else stored.created
            answer = shape(self._facts(understood, id, created, samples, digest))
            prompt_tokens = sum(len(prompt.ids) for prompt in understood.prompts)
            run = self.admitted(request, samples, prompt_tokens, terms, trace)
        except Exception as error:
            trace.end_with(error)
            raise
        response: Response
        if wanted.stream or (stored is not None and not stored.is_whole):
            # the store makes a whole answer of the last event
            response = EventStream(run, answer, keep_alive=self._config.sse_keep_alive_interval)
        else:
            if stored is None:
                response = await whole_response(run, answer, request.receive)
            else:
                response = await whole_response(run, answer, None, stored.wait_for_turn)
        if understood.not_enforced:
            remarks = "; ".join(understood.not_enforced)
            response.headers[NOT_ENFORCED] = printable(remarks, MOST_REMARKS)
        return response

    def admitted(
        self,
        request: Request,
        samples: Sequence[OutputStream],
        prompt_tokens: int,
        terms: RequestTerms,
        trace: RequestTrace = UNTRACED,
    ) -> RequestRun:
        """The run of samples that are admitted under the quota of the client's key.

        Raises:
            ApiError: the quota is used up (429).
        """
        stored, arrival = stored_terms(request), request.state.arrival
        if stored is None:
            lease = self._quotas.admit(terms.key, prompt_tokens)
            return RequestRun(self._mesh, self._metrics, samples, arrival, terms.timeout, trace, lease)
        lease = self._quotas.admit(terms.key, prompt_tokens) if stored.is_limited else None
        counts = stored.counts or self._metrics
        return RequestRun(stored.mesh, counts, samples, arrival, terms.timeout, trace, lease)

    def _facts(
        self,
        understood: Understood,
        id: str,
        created: int,
        samples: Sequence[OutputStream],
        digest: str | None,
    ) -> AnswerFacts:
        """Facts for the class of the answer.

        ``digest``: of the body of a request for a capsule; None for others.
        """
        model = understood.model

        def capsule() -> bytes:
            classes, params, key = self._mesh.numerics(), understood.params, self._capsule_key
            return capsule_of(id, created, model, classes, params, samples, request=digest or "", key=key)

        return AnswerFacts(
            id=id,
            created=created,
            model=understood.wanted.model or model.name,
            samples=samples,
            shows_cached_tokens=self._config.enable_prompt_tokens_details,
            capsule=None if digest is None else capsule,
        )
