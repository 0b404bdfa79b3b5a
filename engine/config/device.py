"""Settings of devices, workers, and experts spread over instances."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.settings.flags import Bytes, Count, Natural, flag
from engine.config.expert_balancing import EplbConfig, read_config
from parallel.kernel_kinds import ROWS, Kind
from parallel.links.transports import MeshTransport
from parallel.pipeline_parallel import parse_split

FORMING_TIMEOUT = 60.0
"""Seconds that forming a group may always take; a longer --collective-timeout allows more."""
STEP_TIMEOUT = 300.0
"""Default seconds after which a step counts as hung, as in vLLM (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""

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
        MeshTransport,
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
        Literal["auto", Kind, "torch"],
        flag(
            help=f"Kernels that compute the model: native ones for {', '.join(row.title for row in ROWS)}, "
            "or torch's own. Instances with the same ones give the same bits; auto: the fastest that this "
            "CPU has."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        flag(
            help="Compute so that the bits of an answer do not depend on the requests beside it. Native "
            "kernels always do; on a GPU, and where torch's operators compute on a CPU, it costs speed."
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
    cudagraph_prompt_sizes: Annotated[
        tuple[Count, ...],
        flag(
            help="Numbers of tokens for which steps with prompts are captured as CUDA graphs; smaller "
            "steps are filled up. Unset: nine from 64 to 2048. With 1 alone none is captured."
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
        if self.enforce_eager and (self.cudagraph_capture_sizes or self.cudagraph_prompt_sizes):
            name = "capture" if self.cudagraph_capture_sizes else "prompt"
            raise ValueError(f"--enforce-eager captures nothing: drop it, or --cudagraph-{name}-sizes")
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
            read_config(self.eplb_config)
        if not self.enable_eplb and (self.eplb_config is not None or self.eplb_survive):
            given = "--eplb-config" if self.eplb_config is not None else "--eplb-survive"
            raise ValueError(f"{given} does nothing without --enable-eplb: add it, or drop {given}")
        if self.enable_eplb and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"--enable-eplb is not built for pipeline stages (-pp {self.pipeline_parallel_size}): use "
                "-pp 1, or drop it"
            )
        if self.enable_eplb and self.enable_expert_parallel is False:
            raise ValueError("--enable-eplb balances spread experts: drop --no-enable-expert-parallel")

    @property
    def eplb(self) -> EplbConfig | None:
        """The parsed ``eplb_config``; None: experts are not balanced."""
        if not self.enable_eplb:
            return None
        return EplbConfig() if self.eplb_config is None else read_config(self.eplb_config)[0]

    @property
    def wants_native(self) -> bool:
        """Whether ``--numerics`` names a kind of native kernels."""
        return self.numerics not in ("auto", "torch")

    @property
    def on_torch(self) -> bool:
        """Whether flags demand torch's operators, so that native kernels are ruled out."""
        return self.numerics == "torch" or self.attention_backend != "auto"

    @property
    def num_workers(self) -> int:
        """Number of workers of one instance."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each pipeline stage as given; None: to be balanced."""
        return None if self.pipeline_split is None else parse_split(self.pipeline_split)

    @property
    def micro_batches(self) -> int:
        """Most steps under way at once, one per micro-batch of the pipeline."""
        if self.pipeline_parallel_size == 1:
            return 1
        return self.pipeline_micro_batches or self.pipeline_parallel_size

    @property
    def step_timeout(self) -> float:
        """Seconds after which a step that waits for no other instance counts as hung."""
        if self.execute_model_timeout is not None:
            return self.execute_model_timeout
        return max(STEP_TIMEOUT, 2 * self.collective_timeout)

    @property
    def lockstep_timeout(self) -> float:
        """Seconds after which a step in lockstep counts as hung.

        Those that wait for a hung instance must find it lost first, or all of them would end with it.
        """
        return max(self.step_timeout, 2 * self.collective_timeout)

    @property
    def forming_timeout(self) -> float:
        """Seconds that forming a group may take, in which other members may still read experts."""
        return max(self.collective_timeout, FORMING_TIMEOUT)

    @property
    def uses_processes(self) -> bool:
        """Whether each worker is a process of its own, here or elsewhere."""
        return self.num_workers > 1 or self.distributed_executor_backend in ("mp", "ray")
