"""Table of other systems' flags that ``serve`` honours, ignores or refuses (pure).

Commands that run elsewhere shall run here where they ask for nothing that is not there. So a flag is ignored,
with a warning, if it is about speed, logs, or what is always so; it is refused if answers, or who gets them,
would be other than it says. Where we have the same under another name, the error tells the name.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.settings.foreign import Foreign

_ADAPTERS = "adapters are given by --enable-lora --lora-modules NAME=DIRECTORY: leave it out"
_TEXT = "only text is served: leave it out"
_WEIGHTS = (
    "how a checkpoint is quantised is seen in it: leave it out; --quantization has names for plain weights "
    "(serve --help=quantization)"
)
_NO_CODE = "no code of others runs in the server: leave it out"
_NO_CODE_CHECKPOINT = "other files of a model are read from a directory only: download them and give that"
_BALANCED = (
    "one endpoint serves all instances: give -dp, and --headless on the other hosts; or start a serve on "
    "each, without -dp, behind a balancer of your own"
)
_NO_OFFLOAD = "weights stay in the memory of their device: spread them with -tp, -pp or -ep"
_NO_TRANSFER = (
    "KV blocks stay in instances' memory, and others fetch them without a flag: leave it out; "
    "--kv-cache-dir keeps them in files as well, --disaggregation-mode gives instances a role"
)
_SPECULATION = """--speculative-config '{"method": "ngram", "num_speculative_tokens": N}'"""

_KERNELS = "kernels are chosen by what the device and the model are"
_LOADING = "weights are mapped into memory, shard by shard"
_GRAPHS = "--enforce-eager and --cudagraph-capture-sizes say what is captured"
_COUNTED = "/metrics always has what is counted"
_PLANNED = "the scheduler plans its steps by itself"
_NO_SWAP = "requests that lose their KV blocks are computed again, nothing is swapped"
_PROMPTS = "neither prompts nor answers are logged; the access log has a line for each request"
_PLACES = "an instance reads the experts that it has, and no others"
_ALWAYS = "it is always so"
_SLEEP = "instances can always sleep, by POST /sleep of the admin API (--admin-port)"
_NO_STATE = "recurrent states are kept every 64 tokens, as the model computes them"
_LORA = "adapters are computed beside the model's own products, in its type, and all stay in memory"
_ONLY_TEXT = "only text is served"
_NO_LOCKSTEP_INTERVAL = "instances agree before every step, and prefill waits for nobody"
_HEADS = "ranks of -tp share heads, not the tokens of a context"
_NO_GRPC = "only HTTP is served: leave it out"
_NO_RETURN = "answers have tokens and log-probabilities, nothing else of the model: leave it out"

_IGNORED_SWITCHES = {
    _PROMPTS: ("disable-log-requests", "enable-log-requests", "enable-log-outputs", "enable-log-deltas"),
    _COUNTED: (
        "aggregate-engine-logging", "cudagraph-metrics", "kv-cache-metrics",
        "enable-mfu-metrics", "enable-logging-iteration-details", "enable-layerwise-nvtx-tracing",
        "enable-per-request-metrics", "per-request-spec-decode-metrics", "enable-metrics",
        "jit-monitor-verbose",
    ),
    _KERNELS: (
        "disable-custom-all-reduce", "enable-flashinfer-autotune", "disable-cascade-attn",
        "disable-nccl-for-dp-synchronization", "use-fp64-gumbel", "ray-workers-use-nsight", "numa-bind",
        "enable-hc-sp", "enable-cumem-allocator", "enable-flash-late-interaction",
    ),
    _PLANNED: (
        "use-v2-block-manager", "disable-async-output-proc", "multi-step-stream-outputs",
        "scheduler-reserve-full-isl", "disable-hybrid-kv-cache-manager", "enable-dbo",
        "disable-overlap-schedule", "enable-mixed-chunk", "kv-sharing-fast-prefill",
        "enable-batch-sharded-sampling", "long-prefill-token-threshold-adaptive", "swa-bounded-replay",
    ),
    _LOADING: ("use-tqdm-on-load",),
    _PLACES: ("enable-ep-weight-filter",),
    _ALWAYS: (
        "enable-server-load-tracking", "language-model-only", "skip-mm-profiling", "enable-fault-tolerance",
        "enable-elastic-ep", "skip-server-warmup", "fail-on-environ-validation",
    ),
    "/openapi.json describes the endpoints, and there are no pages of it": (
        "disable-fastapi-docs", "enable-offline-docs",
    ),
    _NO_STATE: (
        "use-replayssm", "enable-mamba-cache-stochastic-rounding", "enable-mamba-shared-prefix-checkpoint",
    ),
    _LORA: (
        "enable-tower-connector-lora", "specialize-active-lora", "enable-mixed-moe-lora-format",
        "enable-moe-shared-loras",
    ),
    _ONLY_TEXT: (
        "disable-chunked-mm-input", "enable-shm-tensor-arena", "mm-device-do-normalize",
    ),
    _SLEEP: ("enable-sleep-mode", "enable-memory-saver"),
    "devices keep their memory in a sleep": ("sleep-mode-offload-cudagraph", "enable-nccl-comm-suspend"),
    "quantised weights are read by what the checkpoint says, deprecated or not": (
        "allow-deprecated-quantization",
    ),
    _HEADS: ("dcp-q-replicate",),
    "/cohere/v2/chat is not served": ("cohere-is-reasoning-model",),
}  # fmt: skip
_IGNORED_VALUES = {
    "all weights come back after a sleep": ("sleep-preserve-parameter-names",),
    "calls of the admin API (--admin-port) name the way of new weights": ("weight-transfer-config",),
    _PROMPTS: ("max-log-len",),
    _COUNTED: (
        "show-hidden-metrics-for-version", "collect-detailed-traces", "decode-log-interval",
        "kv-cache-metrics-sample", "jit-monitor-mode",
    ),
    _KERNELS: (
        "moe-backend", "linear-backend", "kernel-config", "attention-config", "ir-op-priority",
        "gdn-prefill-backend", "numa-bind-nodes", "numa-bind-cpus", "grammar-backend",
        "sparse-indexer-topk-backend", "kda-prefill-backend", "kda-decode-backend", "engram-config",
    ),
    _GRAPHS: ("compilation-config", "optimization-level", "max-seq-len-to-capture"),
    _PLANNED: (
        "stream-interval", "num-scheduler-steps", "max-num-partial-prefills", "max-long-partial-prefills",
        "scheduler-delay-factor", "preemption-mode", "renderer-num-workers", "max-logits-chunk-size",
        "watermark", "ubatch-size", "dbo-decode-token-threshold", "dbo-prefill-token-threshold",
    ),
    _NO_LOCKSTEP_INTERVAL: ("dp-sync-interval", "prefill-schedule-interval"),
    "the blocks of a prefix are found at the ends of blocks, and go when others need the room": (
        "prefix-cache-retention-interval", "prefix-match-unit",
    ),
    _NO_STATE: (
        "mamba-backend", "mamba-config", "mamba-block-size", "mamba-cache-dtype", "mamba-cache-mode",
        "mamba-cache-philox-rounds", "mamba-ssm-cache-dtype", "mamba-ssu-algorithm", "replayssm-buffer-len",
    ),
    "lockstep scale adds as many instances as there is room for": ("elastic-ep-max-dp-size",),
    "requests go on at another instance when theirs ends, however often": ("migration-limit",),
    "weights stay in the memory of their device": ("offload-num-in-group", "offload-prefetch-step"),
    _HEADS: (
        "cp-kv-cache-interleave-size", "dcp-kv-cache-interleave-size", "dcp-comm-backend",
    ),
    "one endpoint serves all instances, and lockstep status shows them": (
        "data-parallel-supervisor-port", "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s",
        "dp-supervisor-probe-failure-threshold",
    ),
    "a member that does not answer is lost after --collective-timeout, and the others go on": (
        "fault-tolerance-config",
    ),
    "the model is where MODEL says": ("model-weights",),
    "/cohere/v2/chat is not served": ("cohere-format",),
    _NO_SWAP: ("swap-space",),
    _LOADING: (
        "max-parallel-loading-workers", "safetensors-load-strategy", "safetensors-prefetch-num-threads",
        "safetensors-prefetch-block-size", "pt-load-map-location", "ignore-patterns",
        "model-loader-extra-config",
    ),
    _LORA: ("lora-dtype", "lora-extra-vocab-size", "max-lora-cls-labels"),
    "KV blocks are named by 128 bits of BLAKE2b": ("prefix-caching-hash-algo",),
    "--log-level is for all of it": ("uvicorn-log-level",),
    "heads of requests have limits that do not change": (
        "h11-max-incomplete-event-size", "h11-max-header-count",
    ),
    _ONLY_TEXT: (
        "mm-processor-cache-gb", "mm-processor-cache-type", "mm-encoder-tp-mode",
        "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-save-margin", "mm-hasher-algorithm",
        "mm-ipc-gpu-memory-gb", "mm-processor-device", "mm-shm-cache-max-object-size-mb", "mm-tensor-ipc",
        "video-pruning-method", "ec-manager-config",
    ),
}  # fmt: skip

_REFUSED_SWITCHES = {
    _ADAPTERS: ("fully-sharded-loras",),
    _TEXT: (
        "enable-mm-embeds", "interleave-mm-strings", "mm-encoder-only", "enable-prompt-embeds",
        "trust-request-mm-kwargs",
    ),
    _BALANCED: (
        "data-parallel-hybrid-lb", "data-parallel-external-lb", "data-parallel-multi-port-external-lb",
    ),
    "with --kv-cache-dtype each token has scales of its own: leave it out": ("calculate-kv-scales",),
    _NO_RETURN: ("return-sampling-mask",),
    "requests ask for it, each with return_routed_experts": ("enable-return-routed-experts",),
    "the model chooses its tokens: leave it out": ("enable-trace-replay",),
    "--kv-cache-dir keeps KV blocks in files as well: leave it out": ("enable-hierarchical-cache",),
    "token ids are served beside text, on /inference/v1/generate and /v1/completions: leave it out": (
        "tokens-only",
    ),
    "/render and /derender are not served; /inference/v1/generate is, without a flag: leave it out": (
        "enable-scale-out",
    ),
    "models have the attention of their config.json: lower --max-model-len to the window instead": (
        "disable-sliding-window",
    ),
    "the router makes tokens of prompts: give --tokenizer, or the model's own": ("skip-tokenizer-init",),
    "requests are not to bring templates: give --chat-template": ("trust-request-chat-template",),
    "requests ask for it, each with return_tokens_as_token_ids": ("return-tokens-as-token-ids",),
    _NO_GRPC: ("grpc",),
    "certificates are read once: start serve again when they change": ("enable-ssl-refresh",),
    "errors are logged without a stack trace: leave it out": ("log-error-stack",),
}  # fmt: skip

_REFUSED_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    _WEIGHTS: {"quantization-config": (), "torchao-config": ("",)},
    "--kv-cache-dtype is for all layers: leave it out": {"kv-cache-dtype-skip-layers": ()},
    _ADAPTERS: {"default-mm-loras": (), "lora-paths": (), "lora-target-modules": ()},
    _NO_OFFLOAD: {"cpu-offload-gb": ("0",), "offload-backend": ("auto",), "offload-group-size": ("0",),
        "offload-params": (), "cpu-offload-params": ()},
    _NO_TRANSFER: {
        "ec-transfer-config": (),
        "kv-offloading-size": ("0",), "kv-offloading-backend": ("native",),
        "disaggregation-transfer-backend": (),
    },
    _NO_GRPC: {"grpc-port": ()},
    _NO_RETURN: {"aux-output-config": ("{}",)},
    "answers are the model's own tokens, without a watermark: leave it out": {"watermark-config": ("{}",)},
    "models that make one token after the other are served: leave it out": {"diffusion-config": ("{}",)},
    "--reasoning-parser says how the model marks its reasoning: leave it out": {"reasoning-config": ("{}",)},
    "histograms have the bounds that they have: leave it out": {"custom-histogram-buckets": ("{}",)},
    "a tool's own strict and tool_choice say what is enforced: leave it out": {
        "tool-strict-level": ("auto",),
    },
    "thinking that a request disables is off, where the chat template can turn it off: leave it out": {
        "anthropic-disabled-thinking-effort": ("auto",),
    },
    "system_fingerprint is the numerics class of the instance that answers: leave it out": {
        "fingerprint-mode": (), "fingerprint-value": (),
    },
    "what a model answers with is chosen by --runner, --convert and --pooler-config": {
        "task": ("auto", "generate"), "override-pooler-config": ("{}",),
    },
    "tokenizer.json is what is read: give --tokenizer a directory that has it": {
        "tokenizer-mode": ("auto", "hf"),
    },
    "models run on transformers' code, and on kernels of ours for it: leave it out": {
        "model-impl": ("auto", "transformers"),
    },
    "the template itself shows what content it takes: leave it out, or give --chat-template": {
        "chat-template-content-format": ("auto",),
    },
    _NO_CODE_CHECKPOINT: {
        "tokenizer-revision": (), "code-revision": (), "hf-config-path": (), "config-format": ("auto", "hf"),
    },
    "config.json is taken as it is: change it in a copy of the checkpoint": {
        "hf-overrides": ("{}",), "json-model-override-args": ("{}",), "rope-scaling": ("{}",),
        "rope-theta": (),
    },
    _NO_CODE: {
        "middleware": (), "logits-processors": (), "logits-processor-pattern": (),
        "tool-parser-plugin": ("",), "reasoning-parser-plugin": ("",), "io-processor-plugin": (),
        "worker-cls": ("auto",), "worker-extension-cls": ("",), "scheduler-cls": (),
        "model-class-overrides": ("{}",), "additional-config": ("{}",), "tool-server": (),
    },
    "workers of an instance share layers (-tp) or have some each (-pp): give these": {
        "decode-context-parallel-size": ("1",), "prefill-context-parallel-size": ("1",),
    },
    _TEXT: {
        "mm-processor-kwargs": ("{}",), "media-io-kwargs": ("{}",),
        "mm-encoder-attn-backend": (),
        "mm-encoder-fp8-scale-path": (), "mm-encoder-fp8-scale-save-path": (),
        "video-pruning-rate": ("0",),
    },
    "log-probabilities are those of the model, before temperature and penalties: leave it out": {
        "logprobs-mode": ("raw_logprobs",),
    },
    "set HF_HOME to the directory": {"download-dir": ()},
    "set HF_TOKEN to it, for everybody on the machine can read a command line": {"hf-token": ()},
    "set CUDA_VISIBLE_DEVICES to them": {"device-ids": ()},
    "--trace writes what workers computed when": {"profiler-config": ("{}",)},
    "--log-format and --log-level say what is logged": {"log-config-file": (), "logging-config": ("{}",)},
    "OpenSSL's choice is what there is: leave it out": {"ssl-ciphers": ("",)},
}  # fmt: skip

_NAMED = {
    "--tensor-parallel-size (-tp)": ("tp", "tp-size", "num-shard"),
    "--data-parallel-size (-dp)": ("dp", "dp-size"),
    "--pipeline-parallel-size (-pp)": ("pp", "pp-size"),
    "--enable-expert-parallel (-ep)": ("ep", "ep-size", "expert-parallel-size"),
    "MODEL (the first argument)": ("model-path", "model-id", "hf-repo"),
    "--tokenizer": ("tokenizer-path",),
    "--served-model-name": ("alias",),
    "--max-model-len": (
        "context-length", "ctx-size", "max-seq-len", "max-input-length", "max-total-tokens", "max-length",
    ),
    "--gpu-memory-utilization": (
        "mem-fraction-static", "device-memory-utilization", "kv-cache-free-gpu-memory-fraction",
        "cuda-memory-fraction",
    ),
    "--max-num-seqs": ("max-running-requests", "max-batch-size", "max-num-active-seqs", "parallel"),
    "--max-num-batched-tokens": (
        "chunked-prefill-size", "max-prefill-tokens", "max-num-tokens", "max-num-scheduled-tokens",
        "max-batch-prefill-tokens",
    ),
    "--max-num-queued-reqs": ("max-queued-requests",),
    "--block-size": ("page-size",),
    "--seed": ("random-seed",),
    "--cpu-threads": ("threads",),
    "--scheduling-policy": ("schedule-policy",),
    "--load-balancing-policy": ("load-balance-method",),
    "--generation-config": ("sampling-defaults",),
    "--override-generation-config": ("preferred-sampling-params",),
    "--no-enable-prefix-caching": ("disable-radix-cache",),
    "--batch-invariant": ("enable-deterministic-inference",),
    "--enforce-eager": ("disable-cuda-graph",),
    "--cudagraph-capture-sizes": (
        "cuda-graph-bs", "cuda-graph-max-bs", "max-cudagraph-capture-size", "cuda-graph-sizes",
    ),
    "--master-addr with --master-port": ("dist-init-addr", "nccl-init-addr"),
    "--collective-timeout": (
        "dist-timeout", "distributed-timeout-seconds", "cpu-distributed-timeout-seconds",
    ),
    "--execute-model-timeout": ("watchdog-timeout",),
    "--all2all-backend": ("moe-a2a-backend",),
    "--eplb-config.num_redundant_experts": ("num-redundant-experts", "ep-num-redundant-experts"),
    _SPECULATION: (
        "spec-method", "spec-model", "spec-tokens", "speculative-algorithm", "speculative-num-draft-tokens",
        "speculative-num-steps", "speculative-model", "num-speculative-tokens",
    ),
    "--structured-outputs-config": ("guided-decoding-backend", "guided-decoding-disable-fallback"),
}  # fmt: skip

_SHORTS = {
    "optimization-level": ("-O",),
    "compilation-config": ("-cc",),
    "attention-config": ("-ac",),
    "decode-context-parallel-size": ("-dcp",),
    "prefill-context-parallel-size": ("-pcp",),
    "data-parallel-hybrid-lb": ("-dph",),
    "data-parallel-external-lb": ("-dpe",),
}


def _all() -> Iterator[Foreign]:
    for why, names in _IGNORED_SWITCHES.items():
        for name in names:
            yield Foreign(name=name, is_switch=True, harmless=None, why=why)
    for why, names in _IGNORED_VALUES.items():
        for name in names:
            yield Foreign(name=name, shorts=_SHORTS.get(name, ()), harmless=None, why=why)
    for instead, names in _REFUSED_SWITCHES.items():
        for name in names:
            shorts = _SHORTS.get(name, ())
            yield Foreign(
                name=name, shorts=shorts, is_switch=True, harmless=("false",), why=_ALWAYS, instead=instead
            )
    for instead, values in _REFUSED_VALUES.items():
        for name, harmless in values.items():
            shorts = _SHORTS.get(name, ())
            yield Foreign(name=name, shorts=shorts, harmless=harmless, why=_ALWAYS, instead=instead)
    for here, names in _NAMED.items():
        for name in names:
            yield Foreign(name=name, here=here)


FOREIGN = tuple(_all())
