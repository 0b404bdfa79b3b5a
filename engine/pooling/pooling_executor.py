"""Executor of a pooling model: whole inputs, no KV cache, an answer for each row."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from coordinator.numerics import TORCH, Arithmetic
from engine.compute.trace import MOST_SPANS
from engine.config import EngineConfig
from engine.executor_contract import ExpertTimes, Progress
from engine.host.deferred import run_deferred
from engine.model.checkpoint import ModelInfo, chosen_dtype
from engine.model.host_digest import HostDigest, host_digest
from engine.pooling.pooling_model import PooledInput, PoolingModel
from engine.pooling.sentence_files import DENSE_WEIGHTS, read_sentence_files
from engine.pooling_params import Pooled
from engine.step import KVSpec, ModelFacts, Span, Step, StepResult

logger = logging.getLogger(__name__)


class PoolingExecutor:
    """An :class:`engine.executor_contract.Executor` that pools; it computes in this process, on the CPU."""

    needs_tokens = False
    has_workers = False
    image_encoder = None
    computes_apart = False
    runs_ahead = False
    in_flight = 1

    def __init__(self, config: EngineConfig, info: ModelInfo, threads: int) -> None:
        self._config = config
        self._info = info
        self._threads = threads
        self._model: PoolingModel | None = None
        self._digest: HostDigest | None = None
        """Digest of the weights; None where they are random."""
        self._inputs: dict[int, PooledInput] = {}
        """Requests by slot, from their admission to their step."""
        self._results: deque[StepResult] = deque()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    def __repr__(self) -> str:
        return f"<PoolingExecutor {self._model!r}>"

    def load(self, progress: Progress) -> ModelFacts:
        """See :class:`.Executor`."""
        self.set_threads(self._threads)
        model, info = self._config.model, self._info
        dtype = chosen_dtype(model.dtype, info, on_cpu=True)
        if model.reads_weights:
            self._digest = host_digest(Path(info.directory))
        progress(f"loading {info.architecture} from {info.directory}")
        run_deferred()  # what a model's code asks of the libraries decides whether it is packed
        self._model = PoolingModel(
            info,
            getattr(torch, dtype),
            reads_weights=model.reads_weights,
            trusts_code=model.trust_remote_code,
            online=model.online,
        )
        logger.info(
            "pooling: %s, %s; %s", ", ".join(self._model.facts.tasks), self._model.facts.pooling,
            self._model.way,
        )  # fmt: skip
        return ModelFacts(
            architecture=info.architecture,
            num_parameters=self._model.num_parameters,
            weight_bytes=self._model.weight_bytes,
            vocab_size=info.vocab_size,
            dtype=dtype,
            device="cpu",
            kv=KVSpec(num_layers=0, bytes_per_token=0),
        )

    def free_kv_memory(self) -> int:
        """See :class:`.Executor`: there is no KV cache."""
        return 0

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See :class:`.Executor`: there is no KV cache."""

    def block_memory(self) -> None:
        """See :class:`.Executor`: there is no KV cache."""

    def arithmetic(self) -> list[Arithmetic]:
        """See :class:`.Executor`."""
        weights = "" if self._digest is None else self._digest.result()
        weights = weights and with_dense_layers(weights, Path(self._info.directory))
        native = None if self._model is None else self._model.native
        if native is not None:
            return [Arithmetic(native.kind, native.version, "POOLING", weights=weights)]
        capability = str(torch.backends.cpu.get_cpu_capability())
        return [Arithmetic(TORCH, capability, "POOLING", batch_invariant=True, weights=weights)]

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See :class:`.Executor`. The step is done when this returns."""
        assert self._model is not None, "load() comes first"
        for admit in step.admits:
            assert admit.pooling is not None, "others are refused"
            self._inputs[admit.slot] = PooledInput(admit.token_ids, admit.pooling)
        began = time.monotonic()
        found = self._model.answers([self._inputs[slot] for slot in step.slots])
        self._spans.append((began, time.monotonic()))
        pooled = {
            row: Pooled(values.tobytes(), values.shape)
            for row, values in enumerate(found)
            if np.isfinite(values).all()
        }
        if len(pooled) < len(found):
            self._model.forget()
        self._results.append(StepResult([0] * len(step.slots), pooled=pooled))

    def finish(self) -> StepResult:
        """See :class:`.Executor`."""
        return self._results.popleft()

    def check(self) -> None:
        """Check for lost workers: there are none."""

    def expert_times(self) -> ExpertTimes | None:
        """See :class:`.Executor`."""
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        """See :class:`.Executor`."""
        return {}

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._threads = threads
        if threads > 0:
            torch.set_num_threads(threads)

    def spans(self) -> dict[str, list[Span]]:
        """See :class:`.Executor`."""
        return {"Engine": list(self._spans)}

    def close(self) -> None:
        """Let go of the weights."""
        self._model = None
        self._inputs.clear()


def with_dense_layers(digest: str, directory: Path) -> str:
    """Digest of a checkpoint's weights with those of its Dense layers."""
    layers = read_sentence_files(directory).dense
    if not layers:
        return digest
    whole = hashlib.sha256(digest.encode())
    for layer in layers:
        whole.update(hashlib.sha256((Path(layer.directory) / DENSE_WEIGHTS).read_bytes()).digest())
    return whole.hexdigest()[: len(digest)]
