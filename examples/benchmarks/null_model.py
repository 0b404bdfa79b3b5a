"""A model that computes nothing in a real instance: all other costs remain.

``python examples/benchmarks/null_model.py serve -dp 1 --port 8000`` is ``serve`` with such instances. Each of
their steps waits for so long as environment variables say, all 0 by default: ``NULL_STEP_MS`` milliseconds,
and ``NULL_TOKEN_US`` microseconds for each token that it computes and ``NULL_CONTEXT_NS`` nanoseconds for
each that these see. Waiting takes no core, so such instances stand for some with a device each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

STEP_VARIABLE, TOKEN_VARIABLE, CONTEXT_VARIABLE = "NULL_STEP_MS", "NULL_TOKEN_US", "NULL_CONTEXT_NS"

MORE_BLOCKS = 3
"""Width of block tables in decode steps, as a multiple of that in packed steps.

The further blocks are for the steps that follow.
"""


class NullModel:
    """Stand-in for :class:`engine.kernels.program.Program`: logits that cost nothing."""

    def __init__(self, vocabulary: int, most: int, block_size: int) -> None:
        import torch

        self._block_size = block_size
        self._logits = torch.randn(most, vocabulary, generator=torch.Generator().manual_seed(0))
        self.continuation: Any = None
        self.states: Any = None
        self.kept_choices: Any = None
        self.ends = SimpleNamespace(are_read=False)

    def forward(self, _packed: Any, _ids: Any, wanted: Any, _hidden: Any = None, **_options: Any) -> Any:
        self.continuation = None
        return self._logits[: len(wanted)]

    def can_choose(self, _tokens: int, draws: Any) -> bool:
        return len(draws) == 0

    def choose(self, packed: Any, ids: Any, wanted: Any, _draws: Any, given: None = None) -> Any:
        from engine.kernels.cache.native_cache import NativePlan
        from engine.kernels.core.operations import StepArguments
        from engine.kernels.decode_continuation import DecodeContinuation

        self.continuation = None
        if packed.num_single == len(packed.starts) == len(wanted):
            slots, tables = packed.positions.copy(), packed.block_tables.repeat(MORE_BLOCKS, axis=1)
            plan = NativePlan(slots, packed.starts, tables, tables, tables)
            self.continuation = DecodeContinuation(StepArguments(), ids, packed, plan, self._block_size)
        return self._chosen(len(wanted)).tolist()

    def continue_rows(self, new_blocks: Any, _rows: Any = None) -> Any:
        last, self.continuation = self.continuation, None
        if last is None or not last.fits(sys.maxsize):
            return None
        last.advance(new_blocks)
        tokens = last.chose(self._chosen(last.size))
        last.keep(tokens)
        self.continuation = last
        return tokens

    def _chosen(self, count: int) -> Any:
        return self._logits[:count].numpy().argmax(axis=1)


class NullExecutor:
    """The part of an executor that an instance without shards or spread experts uses."""

    in_flight, needs_tokens, computes_apart, has_workers, runs_ahead = 1, False, False, False, False
    image_encoder = None

    def __init__(
        self,
        vocabulary: int,
        block_size: int,
        most: int,
        step_seconds: Callable[[Any], float] = lambda _: 0.0,
    ) -> None:
        import torch

        from engine.compute.runner import ModelRunner
        from engine.model.weights import LoadedModel

        class Sized(LoadedModel):
            hidden_size = 1  # there is no module that has one

        model = Sized(None, (), vocabulary, torch.float32, torch.device("cpu"))
        null: Any = NullModel(vocabulary, most, block_size)
        self._runner = ModelRunner(model, None, block_size, null)
        self._vocabulary = vocabulary
        self._step_seconds = step_seconds
        self._result: Any = None
        self.decode_steps: list[tuple[float, float]] = []
        """CPU seconds of the loop's thread and the process at each decode step's start."""

    def load(self, _progress: Any) -> Any:
        from engine.step import KVSpec, ModelFacts

        return ModelFacts(
            architecture="null",
            num_parameters=0,
            weight_bytes=0,
            vocab_size=self._vocabulary,
            dtype="float32",
            device="cpu",
            kv=KVSpec(num_layers=1, bytes_per_token=1),
        )

    def free_kv_memory(self) -> int:
        return 1 << 22

    def begin(self, step: Any, _sizes: Any = ()) -> None:
        if all(count == 1 for count in step.counts):
            self.decode_steps.append((time.thread_time(), time.process_time()))
        end = time.perf_counter() + self._step_seconds(step)
        self._result = self._runner.run(step)
        time.sleep(max(0.0, end - time.perf_counter()))

    def finish(self) -> Any:
        return self._result

    def expert_times(self) -> None:
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        return {}

    def block_memory(self) -> None:
        return None

    def spans(self) -> dict[str, list[Any]]:
        return {}

    def arithmetic(self) -> list[Any]:
        from coordinator.numerics import Arithmetic

        return [Arithmetic("null", "", "")]

    def allocate(self, num_blocks: int, num_states: int = 0) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def set_threads(self, threads: int, cores: Any = ()) -> None: ...


def step_time() -> Callable[[Any], float]:
    """Seconds of a step, by the environment variables."""
    names, units = (STEP_VARIABLE, TOKEN_VARIABLE, CONTEXT_VARIABLE), (1e-3, 1e-6, 1e-9)
    each, token, context = (
        float(os.environ.get(name, "0")) * unit for name, unit in zip(names, units, strict=True)
    )
    return lambda step: each + token * step.num_tokens + context * sum(step.ends)


def instance(argv: list[str]) -> int:
    """Run ``python -m engine ARGV`` with such a model."""
    import engine.host.cores
    import engine.lifecycle.instance
    from engine.__main__ import main

    def make_executor(config: Any, info: Any, *_: Any, **__: Any) -> Any:
        most = max(config.scheduler.max_num_seqs, config.scheduler.token_budget())
        return NullExecutor(info.vocab_size, config.cache.block_size, most, step_time())

    engine.lifecycle.instance.make_executor = make_executor  # type: ignore[attr-defined]  # imported there
    engine.host.cores.has_gpu = lambda _: True  # type: ignore[attr-defined]  # it does not slow down others
    return main(argv)


def serve(argv: list[str]) -> int:
    """Run ``serve ARGV`` with such instances."""
    from router.launcher.launch import ProcessSpec
    from router.launcher.serve import main_serve

    real = ProcessSpec.command

    def command(spec: ProcessSpec) -> list[str]:
        if spec.role != "engine":
            return real(spec)
        return [sys.executable, "-P", __file__, "instance", *spec.argv]

    ProcessSpec.command = command  # type: ignore[method-assign]
    os.environ["LOCKSTEP_FORK_SERVER"] = "0"  # which would make real instances
    return main_serve(argv)


if __name__ == "__main__":
    commands = {"serve": serve, "instance": instance}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: {sys.argv[0]} serve [options of serve]")
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
