"""Step times of a real model, measured and fitted."""

from __future__ import annotations

import itertools
import time

import numpy as np

from engine.config import EngineConfig, ModelConfig
from engine.executor.uni import UniExecutor
from engine.model.checkpoint import read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from engine.step import Admit, Step
from examples.benchmarks.routing.cluster import StepTime

BLOCK = 16
REPEATS = 3


def measure(model: str, threads: int = 1) -> StepTime:
    """Measure steps and fit a base, a time per token and one per cached token.

    Steps are 1 to 64 decodes over contexts of 16 to 1536 tokens, and prefills of 16 to 1024. The fit is by
    least squares of the relative error.
    """
    info = read_model_info(find_model(model, None))
    executor = UniExecutor(EngineConfig(model=ModelConfig(model=model)), info, threads)
    executor.load(lambda phase: None)
    executor.allocate(64 * 1600 // BLOCK)
    shapes = [
        *itertools.product((1, 8, 32, 64), (1,), (16, 512, 1536)),
        *itertools.product((1, 2), (16, 256, 1024), (0, 512)),
    ]
    sizes, seconds = [], []
    for rows, count, start in shapes:
        step = _step(rows, count, start)
        taken = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            executor.begin(step)
            executor.finish()
            taken.append(time.perf_counter() - began)
        sizes.append((1.0, rows * count, rows * (start + count)))
        seconds.append(min(taken[1:]))
    wanted = np.array(seconds)
    scaled = np.array(sizes) / wanted[:, None]
    found = np.linalg.lstsq(scaled, np.ones(len(wanted)), rcond=None)[0]
    return StepTime(f"{model} on this CPU", *(max(0.0, float(part)) for part in found))


def _step(rows: int, count: int, start: int) -> Step:
    blocks = -(-(start + count) // BLOCK)
    params = SamplingParams(temperature=0.0)
    return Step(
        admits=[
            Admit(slot, [slot + 1] * (start + count), start + count, params, slot, ()) for slot in range(rows)
        ],
        slots=list(range(rows)),
        starts=[start] * rows,
        counts=[count] * rows,
        new_blocks={slot: list(range(slot * blocks, (slot + 1) * blocks)) for slot in range(rows)},
    )
