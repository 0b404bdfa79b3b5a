"""Messages between routers and instances.

The instance binds the socket, so it owns the words.

Requests are verbs (``Submit``, ``Abort``), facts are nouns (``Tokens``, ``InstanceReport``). A router numbers
its dispatches to one instance 1, 2, 3 ... (``Submit.request``); the number names the request between
the two and tells how much of the router's work a report has counted.
"""

from __future__ import annotations

import enum

import msgspec

from coordinator.numerics import Numerics
from engine.pooling_params import Pooled, PoolingParams
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from parallel.links.counts import LinkCount
from parallel.lockstep import Wake


class FinishReason(enum.StrEnum):
    """Why a request ended: the wire's word, the client's ``finish_reason`` and the metric's label."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# ---- router -> instance


class Attach(msgspec.Struct, frozen=True, tag="attach", omit_defaults=True):
    """First message of a router, repeated as a sign of life; has its name."""

    router: str
    wants_blocks: bool = False
    """Whether to send it changes of the prefix cache."""
    missed_blocks: bool = False
    """Whether it missed some changes, so that all blocks are sent again."""
    unanswered: bool = False
    """Set while the router waits for :class:`Attached`, or lost it with a broken connection."""


BATCH_PRIORITY = 2**62
"""Priority of lines of batches, which run while no other request does."""


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """Generate, or resume after ``output_ids``, which the client already has."""

    request: int
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    """Always set, even if the client gave none: a resumed request draws the same numbers."""
    sample_index: int = 0
    """Which of the ``n`` samples this is; mixed into the seed."""
    output_ids: list[int] = []
    """Tokens of an earlier try, which count as output."""
    priority: int = 0
    cache_salt: str = ""
    owed: bool = False
    """Whether an instance had taken the request already.

    Such a request is taken even if the queue is full: the loss of an instance must not fail it.
    """
    traceparent: str = ""
    """W3C Trace Context of the request, if anybody traces it."""
    scored_from: int = 0
    """First prompt token whose log-probability is wanted, where ``params.prompt_logprobs`` asks for some."""
    routed_experts: bool = False
    """Whether deltas are to have the experts of its tokens (:class:`RoutedExperts`)."""
    background: bool = False
    """Nobody waits for it: it goes after all others, whatever the scheduling policy is."""
    blocks_at: str = ""
    """:attr:`Capacity.blocks_at` of an instance whose prefix cache has more of it; empty for none.

    They are fetched from there if that is faster than computing them.
    """
    adapter: str = ""
    """Digest of the low-rank adapter to compute with; empty for none."""
    copy: int = 0
    """:attr:`Prefetch.number` of the copy that has its blocks; 0 for none.

    It waits for the end of that.
    """
    pooling: PoolingParams | None = None
    """What to answer with in place of tokens; None: it generates.

    ``params`` and ``seed`` have no effect then. The answer is one delta, with ``pooled`` and no tokens.
    """
    images: tuple[PromptImage, ...] = ()
    """In the order of the prompt."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; unknown numbers are ignored (they may have ended meanwhile)."""

    requests: list[int]


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Give back these requests if they have not begun: another instance is free for them."""

    requests: list[int]


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch", omit_defaults=True):
    """Fetch the full blocks of a running request that is to move here.

    :class:`Prefetched` answers.
    """

    number: int
    """The router's number of the copy."""
    token_ids: list[int]
    """Prompt, then output."""
    blocks_at: str
    """:attr:`Capacity.blocks_at` of the instance where it runs."""
    cache_salt: str = ""
    request: int = 0
    """Have the instance hand it over: its number there; 0: it runs on.

    It stops there at the end of a step. Then its partly filled block comes, too.
    """
    adapter: str = ""
    """Digest of its low-rank adapter; empty for none."""
    images: tuple[PromptImage, ...] = ()
    """Without their pixels."""


class ResetCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Forget all cached prefixes, in memory and in files; answered by :class:`CacheReset`."""

    number: int


class EndRequests(msgspec.Struct, frozen=True, tag="end_requests"):
    """End requests of any router with the reason ``abort``; answered by :class:`RequestsEnded`.

    Their routers get the end like any other one.
    """

    number: int
    request_ids: tuple[str, ...] = ()
    """Ids of answers; all samples of an answer end."""
    everything: bool = False

    def names(self, request_id: str) -> bool:
        """Whether a request is to end."""
        answer, _, index = request_id.rpartition("-")
        is_sample = index.isdecimal() and answer in self.request_ids
        return self.everything or is_sample or request_id in self.request_ids


ToInstance = Attach | Submit | Abort | Recall | Prefetch | ResetCache | EndRequests | Wake
"""Also from other instances: :class:`parallel.lockstep.Wake`."""

# ---- instance -> router


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, natural log, of the unmodified distribution.

    ``token_id``/``logprob``/``rank`` are those of the token that stands there (rank 1 is the most
    likely); ``top_ids``/``top_logprobs`` the most likely ones, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def logprobs_bytes(most: int) -> int:
    """Most bytes of a :class:`TokenLogprobs` with so many alternatives in a message."""
    return 32 + 14 * most  # an id is up to 5 bytes, a float 9


NO_EXPERT = 0xFFFF
"""Stands in :attr:`RoutedExperts.ids` for a layer that is no mixture."""


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Experts that routers chose for consecutive tokens of a request."""

    first: int
    """Position of the first of these tokens."""
    num_layers: int
    """All layers of the model, also those that are no mixture."""
    top_k: int
    """Experts of a token."""
    ids: bytes
    """[tokens, layers, experts of a token], 16 bits each, the lowest byte first."""

    @property
    def end(self) -> int:
        """Position behind the last of these tokens."""
        return self.first + len(self.ids) // self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return 2 * self.num_layers * self.top_k

    def between(self, first: int, end: int) -> RoutedExperts:
        """Those from one position on, up to another."""
        begin = max(first, self.first)
        cut = self.ids[(begin - self.first) * self.token_bytes : max(0, end - self.first) * self.token_bytes]
        return RoutedExperts(begin, self.num_layers, self.top_k, cut)


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output that one step added to a request; a ``finish_reason`` marks the last."""

    request: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Token that ended it: one of its stop tokens, or end-of-sequence unless ignored."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token (None for the first), with the first delta, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache (meaningful in the first delta)."""
    error: str = ""
    """Error message for the client, with finish_reason ``error``."""
    times: tuple[float, float] | None = None
    """Seconds in the queue, then to this token; only with an instance's first delta.

    The queue ends where the first of the request is computed.
    """
    num_cached_output: int = 0
    """Tokens of ``Submit.output_ids`` found in the prefix cache (meaningful in the first delta)."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens that were computed since the last delta, when asked for."""
    pooled: Pooled | None = None
    """Answer to a pooled request, with finish_reason ``stop``."""

    @property
    def is_single(self) -> bool:
        """Whether it is one token and nothing new beside it."""
        return (
            len(self.token_ids) == 1
            and self.finish_reason is None
            and self.times is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.routed_experts is None
        )


ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens: bounds of the histogram of steps by their size (vLLM's)."""


class Counters(msgspec.Struct, frozen=True, array_like=True):
    """Totals since the instance started."""

    prompt_tokens: int = 0
    """Tokens of prompts whose first token was given here.

    A request that goes on here is not among them, so over a mesh each prompt is counted once.
    """
    generation_tokens: int = 0
    """Tokens computed, also those that a router cuts off behind a stop string."""
    preemptions: int = 0
    prefix_cache_queries: int = 0
    """Part of ``prompt_tokens`` that was looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    steps: int = 0
    bad_messages: int = 0
    """Messages dropped because they could not be decoded."""
    scheduled_tokens: int = 0
    """Tokens of all steps, prompt tokens and generated ones."""
    step_sizes: list[int] = []
    """Steps by their tokens: up to each of ``ITERATION_BOUNDS``, then the larger ones."""
    drafts: int = 0
    drafted_tokens: int = 0
    taken_by_place: list[int] = []
    """Drafts of which so many tokens, 1 and more, were those that were sampled."""
    not_finite: int = 0
    """Pooled requests whose result was no finite number, and which failed for it."""
    pooled_requests: int = 0
    """Pooled requests that were computed, these among them."""
    pooled_tokens: int = 0
    """Tokens of their inputs."""
    pooled_steps: int = 0
    """Steps in which they were computed, many in one."""


STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds: bounds of the histogram of step durations."""


class LockstepCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals of the steps taken in lockstep. Times in seconds, as this instance saw them."""

    steps: int
    empty_steps: int
    """Steps among those without tokens of this instance."""
    sleeps: int
    wait_seconds: float
    """Waiting for the other instances' headers."""
    attention_seconds: float
    dispatch_seconds: float
    experts_seconds: float
    combine_seconds: float
    busiest_tokens: int
    """Sum over steps of the tokens of the busiest instance.

    Over ``mean_tokens`` it is the imbalance.
    """
    mean_tokens: float
    tokens_per_expert: dict[int, int]
    """Tokens that each expert of this instance computed, over all layers."""
    rest_seconds: float = 0.0
    """What is neither waiting, attention, nor the exchange and the products of expert layers."""
    attention_calls: int = 0
    """Layers of steps in which this instance computed attention: none in steps without its tokens."""
    step_counts: list[int] = []
    """Steps and sleeps by duration: up to each of ``STEP_BOUNDS``, then the longer ones."""
    all_steps_seconds: float = 0.0
    """Total duration of steps and sleeps, from header to result."""
    longest_step_seconds: float = 0.0
    epoch: int = 0
    """Epoch of the group that it stepped in last."""
    changes: int = 0
    """Groups that followed another by agreement: a member joined or left."""
    recoveries: int = 0
    """Groups that followed another after a loss."""
    recovery_seconds: dict[str, float] = {}
    """Time from a loss noticed to the first step after it, by part (:mod:`engine.groups.recovery_times`)."""
    links: dict[int, LinkCount] = {}
    """What has passed over links to other instances, by their rank (:mod:`engine.groups.link_totals`)."""


class BlockEvents(msgspec.Struct, frozen=True, array_like=True):
    """Changes ``first`` to ``next - 1`` of a prefix cache, newest of each block only.

    With ``reset`` they are preceded by forgetting everything: ``stored`` is all that is known.
    """

    first: int
    next: int
    reset: bool = False
    stored: bytes = b""
    """Names of ``NAME_BYTES`` each, one after the other."""
    dropped: bytes = b""


class TransferCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals of an instance's transfers of KV blocks since its start."""

    queried_tokens: int = 0
    """Tokens whose blocks were asked of other instances."""
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    """Sum over transfers, from the question to the last block."""
    outcomes: dict[str, int] = {}
    """Transfers by :class:`engine.transfers.fetching.TransferOutcome`."""
    lent_blocks: int = 0
    """Blocks that were held for other instances."""
    prompt_tokens: int = 0
    """Part of :attr:`Counters.prefix_cache_hits` whose blocks were fetched, from instances or files."""
    checked_blocks: int = 0
    """Fetched blocks that were computed as well, and compared."""
    wrong_blocks: int = 0
    """Blocks that differed from what was computed, or from their digest."""
    inherited_tokens: int = 0
    """Those of ``fetched_tokens`` that a dead instance had computed."""
    spot_checked: dict[str, int] = {}
    """Cached pieces that were computed again in spot checks, by the kind of their source."""
    spot_wrong: dict[str, int] = {}
    """Those of them that differed."""


class FileCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals of an instance's KV blocks in files since its start."""

    queried_blocks: int = 0
    """Blocks of prompts that were looked up, as the cache had them not."""
    found_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    read_failures: int = 0
    """Reads that ended by an error of the system."""
    written_bytes: int = 0
    write_seconds: float = 0.0
    write_failures: int = 0
    skipped_blocks: int = 0
    """Blocks that were not written: evicted before, too many at once, or behind a failure."""
    dropped_files: int = 0
    """Files that this instance deleted since the directory was too large."""
    directory_bytes: int = 0
    """Bytes of all files of the directory, as far as this instance knows."""
    hung_seconds: float = 0.0
    """Seconds for which the disk has not answered.

    0: it answers, or nothing is asked of it.
    """


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """Low-rank adapters that an instance's requests have, by name."""

    most: int
    """Adapters that running requests may have at once."""
    running: list[str]
    waiting: list[str]
    """Adapters of requests that wait."""
    active: list[str] = []
    """Digests of the adapters of all these requests."""
    laid_out: list[str] = []
    """Digests of the adapters that requests can run with at no cost."""


class ImageCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals of images of an instance's requests since its start, each once a request."""

    encoded: int = 0
    """Images that the encoder was run for."""
    kept: int = 0
    """Images whose rows the encoder had kept."""
    cached: int = 0
    """Images whose keys and values were cached here or fetched, so they need no rows."""
    failed: int = 0


class InstanceReport(msgspec.Struct, frozen=True, array_like=True):
    """State of an instance after a step, for one router.

    ``last_dispatch`` is the highest ``Submit.request`` of that router which these numbers include:
    the router adds what it sent later, and nothing is counted twice or forgotten.
    """

    last_dispatch: int
    running: int
    waiting: int
    waiting_tokens: int
    """Tokens not yet computed of all requests that wait or are in prefill."""
    blocks_used: int
    blocks_total: int
    counters: Counters
    lockstep: LockstepCounters | None = None
    uncached_tokens: int = 0
    """Part of ``waiting_tokens`` that the prefix cache is not expected to spare."""
    queued: int = 0
    """Part of ``waiting`` without room in the next step; limited by ``--max-num-queued-reqs``."""
    fetch_price: float = 1.0
    """What a token fetched from another instance costs, in tokens to compute (1: no use).

    As measured there: see :mod:`engine.transfers.price`.
    """
    transfers: TransferCounters | None = None
    """None: it fetches nothing."""
    files: FileCounters | None = None
    """None: it keeps no blocks in files."""
    adapters: AdapterUse | None = None
    """None: it serves none."""
    images: ImageCounters | None = None
    """None: its model takes none."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Tokens of a step for one router, in one message; or a report alone."""

    deltas: list[Delta] = []
    """Deltas other than ``singles``, which come before them: :mod:`engine.scheduling.outgoing_tokens`."""
    report: InstanceReport | None = None
    """None: the last one says what a choice hangs on (:mod:`engine.scheduling.report_policy`)."""
    blocks: BlockEvents | None = None
    """Goes along with a report."""
    singles: list[int] = []
    """Deltas of one token and nothing else, each as two numbers: the request, the token.

    A step of many requests is little else, and they are read in a fraction of the time.
    """

    def __post_init__(self) -> None:
        if len(self.singles) % 2:
            raise ValueError("a request without a token")


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal of a request. ``retry`` says that another instance may take it."""

    request: int
    reason: str
    retry: bool
    leaves: bool = False
    """This instance drains: it will take none from now on."""


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """Numbers of requests that were given back and forgotten."""

    requests: list[int]


class WeightsInUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weight version that an instance computes with."""

    number: int = 0
    """Number of the version; 0 for the weights that the mesh was started with."""
    label: str = ""
    """Name that the trainer gave it."""
    numerics: Numerics | None = None
    """Numerics class of the instance by itself; None if it names none."""


class Capacity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Size and limits of an instance, which change with its weights and adapters only."""

    block_size: int
    """Tokens."""
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None = None
    at_once: float | None = None
    """Instances like this one that the host's cores suffice for at once.

    None: it computes on devices of its own.
    """
    caches_prefixes: bool = True
    """Whether prefix caching is on."""
    blocks_at: str = ""
    """Where other instances fetch its KV blocks (:mod:`engine.transfers.mover`); empty: nowhere."""
    cache_identity: str = ""
    """Blocks of caches with equal identities can be exchanged."""
    inherited_at: str = ""
    """Where others on its host find its KV blocks once it is dead (:mod:`engine.inheritance`).

    Empty: nowhere.
    """
    weights: str = ""
    """Version of the weights that names of its blocks begin with.

    Empty: those that were loaded.
    """
    in_use: WeightsInUse = WeightsInUse()
    """Weights of all tokens that it sends from now on."""
    lacks_adapters: tuple[str, ...] = ()
    """Digests of retired adapters that requests in flight may have, and this instance does not."""


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Answer to the first message of a connection: the instance knows nothing of earlier ones.

    A router that had requests here before has lost them, and sends them again.
    """

    instance: str
    capacity: Capacity
    repeated: bool = False
    """The router asked again, over the same connection: what it has here is not lost."""


class Prefetched(msgspec.Struct, frozen=True, tag="prefetched"):
    """Answer to :class:`Prefetch`: how many of the first tokens the prefix cache has."""

    number: int
    tokens: int
    taken: bool = False
    """The instance where the request ran has handed it over, as :class:`HandedOver` says, too."""


class HandedOver(msgspec.Struct, frozen=True, tag="handed_over"):
    """A request goes no further here, as :attr:`Prefetch.request` asked; all its tokens are sent."""

    request: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Request to move away all requests: the time of a drain is over.

    They may take their KV blocks with them.
    """


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    """No prefix that was cached before :class:`ResetCache` is found any more."""

    number: int


class RequestsEnded(msgspec.Struct, frozen=True, tag="requests_ended"):
    """The requests that :class:`EndRequests` names have ended here, if there were any."""

    number: int


ToRouter = (
    Tokens
    | RequestRefused
    | Recalled
    | Attached
    | Prefetched
    | HandedOver
    | Leaving
    | CacheReset
    | RequestsEnded
)
