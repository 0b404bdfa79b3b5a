"""Settings of one instance: the model, its KV cache, its scheduler, its devices (no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.addresses import check_not_wildcard, check_written, is_loopback
from coordinator.config import LogLevel, MeshConfig
from coordinator.messages import Role
from coordinator.settings.flags import Bytes, Count, Natural, Port, Size, flag
from engine import eplb_config
from engine.eplb_config import EplbConfig
from engine.kv_events_config import KvEventsConfig
from engine.kv_events_config import read_config as read_events_config
from engine.kv_transfer_config import KvTransferConfig
from engine.kv_transfer_config import read_config as read_transfer_config
from engine.quantization_config import ONLINE, OnlineName, QuantizationName
from engine.speculation_config import SpeculativeConfig, read_config
from engine.step import CRUMBS, most_tokens
from parallel.pipeline_parallel import parse_split

DType = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
KVCacheDType = Literal["auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3", "fp8_per_token_head"]

SHIPPED_MODEL = "lockstep-moe"
QUANTIZED_MODELS: dict[str, Literal["int8", "int4"]] = {
    f"{SHIPPED_MODEL}-int8": "int8",
    f"{SHIPPED_MODEL}-int4": "int4",
}
"""Names of the shipped model in fewer bits, made at first use."""
FORMING_TIMEOUT = 60.0
"""Seconds that forming a group may take at least."""
STEP_TIMEOUT = 300.0
"""Seconds after which a step hangs, as in vLLM (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is read. The same on all instances of a mesh."""

    model: Annotated[
        str | None,
        flag(
            positional=True,
            help=f"Local directory, GGUF file or Hugging Face repository id; unset: {SHIPPED_MODEL}, which "
            "ships with Lockstep, or on an instance that joins, the model of the mesh.",
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        flag(help="Names that clients use; the first is reported. Unset: the model as given."),
    ] = ()
    revision: Annotated[str | None, flag(help="Branch, tag or commit of the repository.")] = None
    dtype: Annotated[DType, flag(help="Data type of weights and activations.")] = "auto"
    max_model_len: Annotated[
        Size | None,
        flag(
            words={"auto": -1},
            help="Context length in tokens (8k, 1K and the like work); unset, -1 or auto: the model's own, "
            "as much of it as fits the KV cache.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, flag(help="Run the checkpoint's model code where transformers has none for its family.")
    ] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        flag(help="How weights are read; dummy makes random ones, for measurements."),
    ] = "auto"

    quantization: Annotated[
        QuantizationName | None,
        flag(
            "-q",
            help="Quantise plain weights while they are read: int8 (activations in 8 bits, too), "
            "int8_per_channel_weight_only, int4, fp8_per_channel or fp8_per_block. Other names say what a "
            "checkpoint must be quantised by; unset: as it is.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.served_model_name):
            raise ValueError(
                "--served-model-name is empty: give a name, or leave it out for the model as given"
            )

    @property
    def reads_weights(self) -> bool:
        return self.load_format != "dummy"

    @property
    def online(self) -> OnlineName | None:
        """How plain weights are quantised while they are read."""
        return next((name for name in ONLINE if name == self.quantization), None)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024), flag(help="Tokens per KV block.")] = 16
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        flag(
            help="Share of a GPU's memory that an instance may use; unset: 0.92, in equal parts for the "
            "instances that share the GPU."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Bytes | None,
        flag(help="Bytes for each worker's KV cache (4G and the like work); unset: from free memory."),
    ] = None
    num_gpu_blocks_override: Annotated[
        Count | None, flag(help="Number of KV blocks, whatever the memory (any device).")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        flag(
            help="What keys and values are kept as; auto: the data type of the model; int8, fp8 (e4m3): a "
            "byte each, with a scale for each token and KV head, so that nearly twice as many blocks fit."
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, flag(help="Reuse KV blocks of equal prefixes.")] = True
    enable_kv_transfer: Annotated[
        bool,
        flag(
            help="Fetch KV blocks of equal prefixes from other instances where that is faster than computing "
            "them, and lend them blocks."
        ),
    ] = True
    enable_kv_inheritance: Annotated[
        bool,
        flag(
            help="Keep KV caches in memory of `serve`, so that other instances of the host copy what one "
            "that died had computed. On CPUs, without -tp and -pp."
        ),
    ] = False
    kv_cache_dir: Annotated[
        str | None,
        flag(
            path=True,
            help="Directory where computed KV blocks are written to files as well, so that instances that "
            "share it, and those that start later, find prefixes there.",
        ),
    ] = None
    kv_cache_dir_size: Annotated[
        Bytes,
        flag(
            help="Bytes of all KV blocks in --kv-cache-dir (100G and the like work); those used least "
            "lately are deleted beyond that."
        ),
    ] = 16 * 1024**3
    kv_events_config: Annotated[
        str | None,
        flag(
            json=True,
            help='JSON object, like {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}: changes of '
            "the prefix cache are published in vLLM's form, for routers outside.",
        ),
    ] = None
    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"],
        flag(
            help="What these instances are preferred for: prefill: long prompts, whose requests move to "
            "another instance with their KV blocks after the first token; decode: all but long prompts; "
            "null: both. lockstep role changes it while they serve."
        ),
    ] = "null"
    kv_transfer_config: Annotated[
        str | None,
        flag(
            json=True,
            help='JSON object, like {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}: the form of '
            "--disaggregation-mode in vLLM (kv_producer: prefill, kv_consumer: decode, kv_both: null). "
            "Blocks move in our own way, whatever the connector.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.kv_cache_dir is not None and not (self.enable_prefix_caching and self.enable_kv_transfer):
            off = "prefix-caching" if not self.enable_prefix_caching else "kv-transfer"
            raise ValueError(f"--kv-cache-dir does nothing with --no-enable-{off}: drop one of the two")
        if self.enable_kv_inheritance and not (self.enable_prefix_caching and self.enable_kv_transfer):
            off = "prefix-caching" if not self.enable_prefix_caching else "kv-transfer"
            raise ValueError(
                f"--enable-kv-inheritance does nothing with --no-enable-{off}: drop one of the two"
            )
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ValueError(
                "--kv-events-config does nothing with --no-enable-prefix-caching: drop one of the two"
            )
        if self.kv_transfer is not None:
            self._check_transfer(self.kv_transfer)

    def _check_transfer(self, given: KvTransferConfig) -> None:
        if given.kv_connector is not None and not (self.enable_prefix_caching and self.enable_kv_transfer):
            off = "prefix-caching" if not self.enable_prefix_caching else "kv-transfer"
            raise ValueError(f"--kv-transfer-config does nothing with --no-enable-{off}: drop one of the two")
        mode = self.disaggregation_mode
        if mode != "null" and given.role not in (None, mode):
            raise ValueError(
                f"--disaggregation-mode {mode} and --kv-transfer-config with {given.kv_role} are two roles: "
                "drop one of the two"
            )

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """``kv_events_config``, read; None: nothing is published."""
        config = None if self.kv_events_config is None else read_events_config(self.kv_events_config)
        return config if config is not None and config.is_on else None

    @property
    def kv_transfer(self) -> KvTransferConfig | None:
        """``kv_transfer_config``, read."""
        return None if self.kv_transfer_config is None else read_transfer_config(self.kv_transfer_config)

    @property
    def role(self) -> Role:
        """The role that these instances begin with."""
        if self.disaggregation_mode != "null":
            return Role(self.disaggregation_mode)
        given = self.kv_transfer
        return Role.MIXED if given is None or given.role is None else given.role

    @property
    def kv_codes(self) -> Literal["int8", "fp8"] | None:
        """What keys and values are kept as; None: numbers of the model's data type."""
        if self.kv_cache_dtype == "auto":
            return None
        return "int8" if self.kv_cache_dtype.startswith("int8") else "fp8"

    def utilization(self, sharers: int) -> float:
        """Share of a device's memory for one of so many instances on it."""
        given = self.gpu_memory_utilization
        return GPU_MEMORY / sharers if given is None else given


GPU_MEMORY = 0.92
"""Default share of a GPU's memory, for all instances on it together."""
CPU_TOKENS, GPU_TOKENS = 512, 2048
"""Default token budget of a step, on CPUs and on GPUs."""
CPU_TOKENS_BESIDE_DECODES = 128
"""Smallest limit of prompt tokens in a step with decode rows on CPUs."""
LARGEST_LONE_STEP = 2048
"""Most tokens of a step on a CPU while there is one request only."""
SECONDS_BESIDE_DECODES = 0.15
"""Seconds that prompts may add to a step with decode rows, with the default budget."""
LONE_CHUNK_SECONDS = 0.5
"""Seconds that a step beyond the usual budget may take.

A request that arrives meanwhile waits for its rest.
"""
INTERACTIVE_SECONDS = 0.05
"""Both with ``--performance-mode interactivity``."""
CPU_THROUGHPUT_TOKENS, GPU_THROUGHPUT_TOKENS = 2048, 4096
"""Default token budget of a step with ``--performance-mode throughput``."""
REQUESTS, THROUGHPUT_REQUESTS = 128, 256
"""Default number of requests that run at once, and with ``--performance-mode throughput``."""
MOST_SEQUENCES = 65536
"""Most requests in a step.

Far more than pays anywhere: each has a token in every step, and a step must stay short.
"""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the scheduler: what goes into one step."""

    max_num_batched_tokens: Annotated[
        Size | None,
        flag(
            help="Token budget of a step, a sixteenth more where that completes a prompt; unset: 512 on a "
            "CPU, 2048 on a GPU, more with --performance-mode throughput, at least --max-num-seqs."
        ),
    ] = None
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_SEQUENCES)] | None,
        flag(help="Requests that run at once; unset: 128, with --performance-mode throughput 256."),
    ] = None
    performance_mode: Annotated[
        Literal["balanced", "interactivity", "throughput"],
        flag(
            help="throughput: more tokens and requests in a step where --max-num-batched-tokens and "
            "--max-num-seqs are unset, and prompts are not held back for requests that decode; "
            "interactivity: prompts add at most 0.05 s to a step on a CPU where 0.15 s is the default, and "
            "on a GPU decode steps of 1 to 32 requests are captured each."
        ),
    ] = "balanced"
    enable_chunked_prefill: Annotated[
        bool, flag(help="Split long prompts over steps; without it a prompt must fit the token budget.")
    ] = True
    long_prefill_token_threshold: Annotated[
        Natural, flag(help="Prompts get at most this many tokens per step (0: no limit).")
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        flag(help="Order of waiting requests: arrival, or priority then arrival."),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        Natural, flag(help="Requests that may wait on an instance; more are answered 503.")
    ] = 4096
    max_num_queued_tokens: Annotated[
        Size | None,
        flag(help="Tokens that may wait on an instance before it takes no more requests (503); unset: any."),
    ] = None
    speculative_config: Annotated[
        str | None,
        flag(
            "-sc",
            json=True,
            help='JSON object, like {"method": "ngram", "num_speculative_tokens": 5}: tokens that may come '
            "next are looked up in the request's own text and computed ahead; the output stays the same.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            read_config(self.speculative_config)
        if self.max_num_queued_tokens is not None and self.max_num_queued_tokens < 1:
            raise ValueError("--max-num-queued-tokens must be at least 1")
        if self.max_num_batched_tokens is None:
            return
        if self.max_num_batched_tokens < 1:
            raise ValueError("--max-num-batched-tokens must be at least 1")
        if self.max_num_batched_tokens < self.most_requests():
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.most_requests()}: each running request needs a token per step"
            )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """``speculative_config``, read; None: nothing is drafted."""
        return None if self.speculative_config is None else read_config(self.speculative_config)

    @property
    def goes_for_throughput(self) -> bool:
        return self.performance_mode == "throughput"

    def most_requests(self) -> int:
        """Requests that run at once."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if not self.goes_for_throughput:
            return REQUESTS
        return max(REQUESTS, min(THROUGHPUT_REQUESTS, self.max_num_batched_tokens or THROUGHPUT_REQUESTS))

    def most_sampled(self) -> int:
        """Tokens that a step samples at most: one of each request, and those of drafts."""
        each = 1 if self.speculative is None else 1 + self.speculative.num_speculative_tokens
        return min(self.most_requests() * each, self.token_budget())

    def token_budget(self, has_gpu: bool = False) -> int:
        """Token budget of one step.

        From a few hundred tokens on a CPU computes prompts little faster, and more would only make the first
        of many prompts wait for the last.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.goes_for_throughput:
            default = GPU_THROUGHPUT_TOKENS if has_gpu else CPU_THROUGHPUT_TOKENS
        else:
            default = GPU_TOKENS if has_gpu else CPU_TOKENS
        return max(default, self.most_requests())

    def prompt_tokens_beside_decodes(self, has_gpu: bool = False) -> int | None:
        """Most prompt tokens in a step with decode rows; None: no limit.

        On a CPU so many are computed as fast as more are. On a GPU, where each step with prompts has to be
        launched anew, they are not.
        """
        if has_gpu or self.goes_for_throughput:
            return None
        return max(CPU_TOKENS_BESIDE_DECODES, self.token_budget() // 4)

    def prompt_seconds_beside_decodes(self, has_gpu: bool = False) -> float | None:
        """Seconds that these tokens may take; None: no limit, as where the budget is given."""
        if has_gpu or self.goes_for_throughput or self.max_num_batched_tokens is not None:
            return None
        return INTERACTIVE_SECONDS if self.performance_mode == "interactivity" else SECONDS_BESIDE_DECODES

    def largest_lone_chunk(self, has_gpu: bool = False) -> int:
        """Most tokens of a prefill chunk of the only request; 0: the usual budget.

        With what may complete a prompt beyond it, a step has :data:`LARGEST_LONE_STEP` tokens at most.
        """
        if has_gpu or self.max_num_batched_tokens is not None or self.goes_for_throughput:
            return 0
        return LARGEST_LONE_STEP - self.token_budget() // CRUMBS

    def lone_chunk_seconds(self) -> float:
        """Seconds that such a chunk may take."""
        return INTERACTIVE_SECONDS if self.performance_mode == "interactivity" else LONE_CHUNK_SECONDS

    def largest_step(self) -> int:
        """Most tokens of a step on a CPU."""
        return max(most_tokens(self.token_budget()), LARGEST_LONE_STEP if self.largest_lone_chunk() else 0)


MOST_THREADS = 1024
"""Largest number of threads of an instance; libraries crash beyond what a machine can start."""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices and threads of one instance."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], flag(help="auto takes a CUDA device where there is one.")
    ] = "auto"
    tensor_parallel_size: Annotated[Count, flag("-tp", help="Tensor-parallel shards inside an instance.")] = 1
    pipeline_parallel_size: Annotated[Count, flag("-pp", help="Pipeline stages inside an instance.")] = 1
    pipeline_split: Annotated[
        str | None,
        flag(help="Layers of each pipeline stage, like 10,12,10; unset: balanced by parameter bytes."),
    ] = None
    pipeline_micro_batches: Annotated[
        Natural,
        flag(
            help="Steps of different requests under way at once in a pipeline (0: as many as stages). More "
            "keep the stages busier, each with smaller batches."
        ),
    ] = 0
    distributed_executor_backend: Annotated[
        Literal["uni", "mp", "ray"] | None,
        flag(
            help="Where workers run: uni, in the instance's own process; mp, a process each; ray, an actor "
            "each, anywhere in a Ray cluster. Unset: uni for one worker, mp for more."
        ),
    ] = None
    trace: Annotated[
        str | None,
        flag(
            path=True,
            help="When the instance ends, write to this file when each of its workers computed, in Chrome's "
            "trace format; the rank goes in front of the suffix, as in FILE.0.json.",
        ),
    ] = None
    cpu_threads: Annotated[
        int,
        Meta(ge=0, le=MOST_THREADS),
        flag(help="Compute threads per instance, over its workers (0: this machine's cores, shared fairly)."),
    ] = 0
    enable_expert_parallel: Annotated[
        bool | None,
        flag(
            "-ep",
            help="Spread the experts of a mixture-of-experts model over the workers of all instances, which "
            "then step in lockstep (default: on where it can be done, if -dp is more than 1 and -tp and -pp "
            "are not, except on GPUs). Without it each instance holds all experts and steps by itself.",
        ),
    ] = None
    expert_placement_strategy: Annotated[
        Literal["linear", "round_robin"], flag(help="Which instance holds which experts.")
    ] = "linear"
    expert_memory_bytes: Annotated[
        Bytes | None,
        flag(
            help="Bytes for the experts that a worker holds where they are spread (4G and the like work). "
            "When they do not fit on those who are left, the mesh waits for one more; unset: what memory is "
            "free."
        ),
    ] = None
    enable_eplb: Annotated[
        bool,
        flag(
            help="Balance the load of spread experts: copies of those with most rows are put on several "
            "workers, and experts move, while requests are served."
        ),
    ] = False
    eplb_config: Annotated[
        str | None,
        flag(
            json=True,
            help='JSON object for --enable-eplb, like {"window_size": 1000, "step_interval": 3000, '
            '"num_redundant_experts": 2, "log_balancedness": true}.',
        ),
    ] = None
    eplb_survive: Annotated[
        Natural,
        flag(
            help="Instances that may die at once without any expert being read by the others: with "
            "--enable-eplb each expert is kept on so many more, where num_redundant_experts allows it."
        ),
    ] = 0
    all2all_backend: Annotated[
        Literal["auto", "tcp", "shared_memory", "allgather_reducescatter", "all_to_all", "nccl"],
        flag(
            help="How tokens reach their experts; auto: shared memory among instances on one host, "
            "--mesh-transport between hosts; tcp: also on one host; allgather_reducescatter, all_to_all: "
            "that dispatch over gloo; nccl: straight between GPUs."
        ),
    ] = "auto"
    mesh_transport: Annotated[
        Literal["auto", "tcp", "ucx", "gloo"],
        flag(
            help="What carries tensors between hosts, of spread experts, -tp and -pp; tcp: sockets whose "
            "ends prove the mesh key, unlike gloo's; ucx: InfiniBand, RoCE and what else UCX has; auto: ucx "
            "where all members have an RDMA device that is up, else tcp."
        ),
    ] = "auto"
    collective_timeout: Annotated[
        float, Meta(gt=0), flag(help="Seconds after which a peer that does not answer in a step is lost.")
    ] = 60.0
    execute_model_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        flag(
            help="Seconds after which a step that has not ended hangs, and its instance ends; unset: 300, or "
            "twice --collective-timeout if that is more. Where experts are spread it is never less than that."
        ),
    ] = None
    attention_backend: Annotated[
        Literal["auto", "TORCH_SDPA", "TRITON_ATTN"],
        flag(
            help="What computes attention over the KV cache: torch's operators on gathered contexts, or "
            "Triton kernels that read the blocks where they are (CUDA). auto: native kernels on a CPU that "
            "they are for; on CUDA Triton's, if they agree with torch's on a few steps."
        ),
    ] = "auto"
    numerics: Annotated[
        Literal["auto", "amx", "avx512", "avx2", "torch"],
        flag(
            help="Kernels that compute the model: native ones for AMX, AVX-512 or AVX2, or torch's own. "
            "Instances with the same ones give the same bits; auto: the fastest that this CPU has."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        flag(
            help="Compute so that the bits of an answer do not depend on the requests beside it. Native "
            "kernels always do; where torch's operators compute (on a CPU), it costs speed."
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        flag(help="Launch each kernel of each step by itself: no CUDA graphs. (A CPU never has any.)"),
    ] = False
    cudagraph_capture_sizes: Annotated[
        tuple[Count, ...],
        flag(
            help="Numbers of running requests for which decode steps are captured as CUDA graphs; smaller "
            "steps are filled up. Unset: 1, 2, 4, 8, then every 8 up to --max-num-seqs, at most 512."
        ),
    ] = ()

    def __post_init__(self) -> None:
        self._check_balancing()
        if self.wants_native and (self.device == "cuda" or self.attention_backend != "auto"):
            backend = f"--attention-backend {self.attention_backend}"
            raise ValueError(
                f"--numerics {self.numerics} means native kernels for a CPU, which "
                f"{'--device cuda' if self.device == 'cuda' else backend} rules out: drop one of the two"
            )
        if self.batch_invariant and self.device == "cuda":
            raise ValueError(
                "--batch-invariant is not built for GPUs: drop it, or compute on the CPU with --device cpu"
            )
        if self.enforce_eager and self.cudagraph_capture_sizes:
            raise ValueError("--enforce-eager captures nothing: drop it, or --cudagraph-capture-sizes")
        if self.distributed_executor_backend == "uni" and self.num_workers > 1:
            raise ValueError(
                f"--distributed-executor-backend uni runs one worker, -tp {self.tensor_parallel_size} -pp "
                f"{self.pipeline_parallel_size} needs {self.num_workers}: use mp, or leave the flag out"
            )
        if self.trace is not None and Path(self.trace).name in ("", ".."):
            raise ValueError(f"--trace {self.trace!r} names no file: give one, like trace.json")
        if self.pipeline_split is not None:
            try:
                parse_split(self.pipeline_split)
            except ValueError as error:
                raise ValueError(f"--pipeline-split: {error}") from error
            if len(self.split or ()) != self.pipeline_parallel_size:
                raise ValueError(
                    f"--pipeline-split {self.pipeline_split} is for {len(self.split or ())} stages, but "
                    f"--pipeline-parallel-size is {self.pipeline_parallel_size}"
                )

    def _check_balancing(self) -> None:
        if self.eplb_config is not None:
            eplb_config.read_config(self.eplb_config)
        if not self.enable_eplb and (self.eplb_config is not None or self.eplb_survive):
            given = "--eplb-config" if self.eplb_config is not None else "--eplb-survive"
            raise ValueError(f"{given} does nothing without --enable-eplb: add it, or drop {given}")
        if self.enable_eplb and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"--enable-eplb is not built for pipeline stages (-pp {self.pipeline_parallel_size}): use "
                "-pp 1, or drop it"
            )
        if self.enable_eplb and self.device == "cuda":
            raise ValueError("--enable-eplb is not built for GPUs: drop it, or use --device cpu")
        if self.enable_eplb and self.enable_expert_parallel is False:
            raise ValueError("--enable-eplb balances spread experts: drop --no-enable-expert-parallel")

    @property
    def eplb(self) -> EplbConfig | None:
        """``eplb_config``, read; None: experts keep their places."""
        if not self.enable_eplb:
            return None
        return EplbConfig() if self.eplb_config is None else eplb_config.read_config(self.eplb_config)[0]

    @property
    def wants_native(self) -> bool:
        """Whether one kind of native kernels is asked for."""
        return self.numerics not in ("auto", "torch")

    @property
    def on_torch(self) -> bool:
        """Whether torch's operators are asked for."""
        return self.numerics == "torch" or self.attention_backend != "auto"

    @property
    def num_workers(self) -> int:
        """Number of workers of one instance."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each stage, if they were given."""
        return None if self.pipeline_split is None else parse_split(self.pipeline_split)

    @property
    def micro_batches(self) -> int:
        """Steps that may be under way at once."""
        if self.pipeline_parallel_size == 1:
            return 1
        return self.pipeline_micro_batches or self.pipeline_parallel_size

    @property
    def step_timeout(self) -> float:
        """Seconds that a step may take."""
        if self.execute_model_timeout is not None:
            return self.execute_model_timeout
        return max(STEP_TIMEOUT, 2 * self.collective_timeout)

    @property
    def lockstep_timeout(self) -> float:
        """Seconds that a step may take that waits for other instances.

        Who waits must find them lost first, or all end because one hangs.
        """
        return max(self.step_timeout, 2 * self.collective_timeout)

    @property
    def forming_timeout(self) -> float:
        """Seconds that forming a group may take: others may have experts to read first."""
        return max(self.collective_timeout, FORMING_TIMEOUT)

    @property
    def uses_processes(self) -> bool:
        """Whether each worker is a process of its own, here or elsewhere."""
        return self.num_workers > 1 or self.distributed_executor_backend in ("mp", "ray")


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts over which the workers of each instance are spread."""

    nnodes: Annotated[
        Count,
        flag(
            "-n",
            help="Hosts over which the workers (-tp, -pp) of each instance are spread; start the same "
            "command on each, with its --node-rank.",
        ),
    ] = 1
    node_rank: Annotated[
        Natural,
        flag("-r", help="Number of this host among them; 0 runs the instances, the others only workers."),
    ] = 0
    master_addr: Annotated[
        str, flag(help="Address of the host with node rank 0: its workers' own, and where the others ask.")
    ] = "127.0.0.1"
    master_port: Annotated[Port, flag(help="Port there; each further instance takes the next one.")] = 29501
    ray_placement_strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        flag(help="With a ray backend, how the workers of an instance are laid over the cluster's nodes."),
    ] = "PACK"

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is out of range: with --nnodes {self.nnodes} ranks are 0 to "
                f"{self.nnodes - 1}"
            )
        if self.nnodes > 1:
            check_written("--master-addr", self.master_addr)
            check_not_wildcard("--master-addr", self.master_addr)
            if self.master_port == 0:
                raise ValueError("--master-port must be a port that all hosts know, not 0")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one instance."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    nodes: NodesConfig = NodesConfig()
    drain_timeout: Annotated[
        float,
        Meta(ge=0),
        flag(help="Seconds that a leaving instance gives its requests to finish before they move elsewhere."),
    ] = 120.0

    def __post_init__(self) -> None:
        device, nnodes = self.device, self.nodes.nnodes
        is_elsewhere = nnodes > 1 or device.distributed_executor_backend == "ray"
        if self.cache.kv_cache_dir is not None and (is_elsewhere or device.device == "cuda"):
            what = "caches on a GPU" if device.device == "cuda" else "workers on other hosts (--nnodes, ray)"
            raise ValueError(f"--kv-cache-dir is not built for {what}: drop it")
        if self.cache.kv_codes is not None and device.attention_backend == "TRITON_ATTN":
            raise ValueError(
                f"--attention-backend TRITON_ATTN reads no {self.cache.kv_codes} KV cache: drop it, or "
                "--kv-cache-dtype"
            )
        if nnodes > 1 and device.distributed_executor_backend == "ray":
            raise ValueError(
                "--nnodes with --distributed-executor-backend ray: Ray knows its nodes, drop --nnodes"
            )
        if nnodes > 1 and device.distributed_executor_backend == "uni":
            raise ValueError(
                "--nnodes with --distributed-executor-backend uni: use mp, or leave the flag out"
            )
        if device.num_workers % nnodes:
            raise ValueError(
                f"--nnodes {nnodes}: the {device.num_workers} workers of -tp "
                f"{device.tensor_parallel_size} -pp {device.pipeline_parallel_size} cannot be spread "
                "evenly. Numbers of hosts that can: "
                + ", ".join(str(n) for n in range(1, device.num_workers + 1) if device.num_workers % n == 0)
            )
        if self.workers_elsewhere and device.enable_expert_parallel:
            raise ValueError(
                "-ep needs all workers of an instance on one host: drop --nnodes, and --distributed-executor-"
                "backend ray"
            )

    @property
    def workers_elsewhere(self) -> bool:
        """Whether workers of an instance may run on other hosts."""
        return self.nodes.nnodes > 1 or self.device.distributed_executor_backend == "ray"

    @property
    def num_local_workers(self) -> int:
        """Workers of one instance on each of its hosts; 0 where Ray decides."""
        if self.device.distributed_executor_backend == "ray":
            return 0
        return self.device.num_workers // self.nodes.nnodes


def check_keys(mesh: MeshConfig, nodes: NodesConfig) -> None:
    """Workers that come from other hosts must be let in, and nobody else.

    Raises:
        ValueError: there is no key; says what to do.
    """
    if nodes.nnodes > 1 and not is_loopback(nodes.master_addr) and not mesh.is_guarded:
        raise ValueError(
            f"--master-addr {nodes.master_addr} is not loopback, so the mesh needs a key: make one with "
            "`lockstep keygen FILE`, copy it to all hosts and give --mesh-key-file FILE everywhere (or "
            "--insecure-mesh, if nobody else can reach that network)"
        )


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process of one instance, or of its workers on another host."""

    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_keys(self.mesh, self.engine.nodes)
