"""Share of a machine's limits that decode steps reach, measured by a child process."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from engine.roofline.facts import RooflineFacts, RooflineRequest, StepFacts
from parallel.machine_rates import MachineRates

KERNELS_VARIABLE = "LOCKSTEP_NATIVE_KERNELS"
MOST_SECONDS = 1800.0
"""Most seconds of loading the model and measuring its steps."""


class StepShare(msgspec.Struct, frozen=True):
    """A decode step beside the least time that the machine allows."""

    batch: int
    seconds: float
    read_gb: float
    """Bytes that it must read, in 1e9."""
    gflop: float
    share: float
    """Least time divided by its time."""
    limit: str
    """What the least time is that of: ``memory`` or ``products``."""


class ModelShare(msgspec.Struct, frozen=True):
    """Decode steps of a model, and the kind of kernels that computed them."""

    model: str
    kind: str
    steps: list[StepShare]


def measure_model(ask: RooflineRequest, rates: MachineRates) -> ModelShare | str:
    """Steps of a model against all cores' rates; a text if they cannot be measured."""
    command = [sys.executable, "-P", "-m", "engine.roofline", msgspec.json.encode(ask).decode()]
    environment = {**os.environ, KERNELS_VARIABLE: rates.kind, "OMP_NUM_THREADS": str(ask.threads)}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=MOST_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"the steps of {ask.model} were not measured within {MOST_SECONDS:.0f} s"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        return f"{ask.model} cannot be measured: {lines[-1]}"
    found = msgspec.json.decode(done.stdout, type=RooflineFacts)
    rounds = ask.quantization == "int8"
    steps = [share_of(step, rates, ask.dtype, rounds=rounds) for step in found.steps]
    return ModelShare(ask.model, found.kind, steps)


def share_of(step: StepFacts, rates: MachineRates, dtype: str, *, rounds: bool) -> StepShare:
    """Share of the nearest limit.

    ``rounds``: activations are rounded to 8 bits, so products may be as fast as those of bytes.
    """
    types = {dtype, "float32"} | ({"int8"} if rounds else set())
    products = max(rates.all_cores[name] for name in types if name in rates.all_cores) * 1e9
    least = {"memory": step.read_bytes / (rates.read_all_cores * 1e9), "products": step.operations / products}
    limit = max(least, key=lambda name: least[name])
    return StepShare(
        batch=step.batch,
        seconds=step.seconds,
        read_gb=step.read_bytes / 1e9,
        gflop=step.operations / 1e9,
        share=least[limit] / step.seconds,
        limit=limit,
    )
