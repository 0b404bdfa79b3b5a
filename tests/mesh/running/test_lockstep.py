"""A mesh whose experts are spread over its instances: real processes, each way of dispatch."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.mesh.clients.test_clients import assert_idle, metrics
from tests.mesh.faults.test_loss import crowd_of
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.running.test_commands import ask, streamed

pytestmark = pytest.mark.mesh

NUM_LAYERS = 6
NUM_TOKENS = 120
"""Tokens of each of twelve streams, one a step.

No instance is killed here, so streams need not last for long.
"""
REST = 4.0
"""Seconds over which the CPU time of a sleeping mesh is taken."""
FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-seqs", "32"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Token ids that one instance with all experts gives."""
    ports = Ports()
    log = tmp_path_factory.mktemp("alone") / "log"
    with serve(log, *ports.head(), *FLAGS) as command:
        command.wait_for("1 instance ready")
        return crowd_of(ports, 12, NUM_TOKENS)


@pytest.mark.parametrize(
    ("size", "backend", "strategy"),
    [
        pytest.param(2, "auto", "linear", marks=pytest.mark.nightly),
        (3, "auto", "round_robin"),
        pytest.param(2, "allgather_reducescatter", "linear", marks=pytest.mark.nightly),
        pytest.param(2, "all_to_all", "round_robin", marks=pytest.mark.nightly),
        pytest.param(2, "tcp", "round_robin", marks=pytest.mark.nightly),
    ],
)
def test_spread_experts_change_no_token(
    alone: list[list[int]], size: int, backend: str, strategy: str, tmp_path: Path
) -> None:
    ports = Ports()
    how = ["-dp", str(size), "-ep", "--all2all-backend", backend, "--expert-placement-strategy", strategy]
    with serve(tmp_path / "log", *how, *ports.head(), *FLAGS) as command:
        command.wait_for(f"{size} instances ready")
        transport = {"auto": "shared_memory", "tcp": "tcp"}.get(backend, "gloo")
        assert f"{size} instances in lockstep over {transport}" in command.log
        assert crowd_of(ports, 12, NUM_TOKENS) == alone
        assert_idle(ports)
        found = metrics(ports)
        for rank in range(size):
            labels = f'engine="{rank}",model_name="{SHIPPED_MODEL}"'
            assert found[f"lockstep:steps_total{{{labels}}}"] > 100
            for part in ("wait", "attention", "dispatch", "experts", "combine", "rest"):
                assert found[f'lockstep:step_seconds_total{{{labels},part="{part}"}}'] > 0
        experts = [name for name in found if name.startswith("lockstep:expert_tokens_total")]
        assert len(experts) == 8, "each expert is told by the one instance that holds it"
        links = {name: value for name, value in found.items() if name.startswith("lockstep:link_")}
        assert bool(links) == (backend == "tcp")
        if links:
            assert len(links) == 2 * 3
            assert min(links.values()) > 0
            wait_until(lambda: _link_bytes(ports, 0, 1, "sent") == _link_bytes(ports, 1, 0, "received"), 10)
        assert command.stop() == 0
        assert "Traceback" not in command.log


def _link_bytes(ports: Ports, rank: int, peer: int, direction: str) -> float:
    labels = f'direction="{direction}",engine="{rank}",model_name="{SHIPPED_MODEL}",peer="{peer}"'
    return metrics(ports)[f"lockstep:link_bytes_total{{{labels}}}"]


def test_spreading_is_the_default_and_idle_instances_take_part_and_sleep_costs_nothing(
    tmp_path: Path,
) -> None:
    ports = Ports()
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *FLAGS) as command:
        command.wait_for("2 instances ready")
        assert "2 instances in lockstep over shared_memory" in command.log
        ask(ports, rank=0, max_tokens=40)
        wait_until(lambda: min(metrics(ports).get(_of(rank, "sleeps_total"), 0) for rank in (0, 1)) >= 2, 10)
        found = metrics(ports)
        assert found[_empty_steps(0)] <= 5
        assert found[_empty_steps(1)] >= 40
        steps = found[_of(0, "steps_total")]
        assert found[_of(0, "attention_calls_total")] == NUM_LAYERS * (steps - found[_empty_steps(0)])
        assert found[_of(1, "steps_total")] == found[_empty_steps(1)] == steps
        assert found[_of(1, "attention_calls_total")] == 0, "no tokens, no attention"
        assert found[_of(1, "step_seconds_total", part="attention")] == 0
        assert found[_of(1, "step_seconds_total", part="experts")] > 0, "its experts are at work"
        assert found[_of(1, "longest_step_seconds")] > 0
        engines = [command.child("Engine_0"), command.child("Engine_1")]
        time.sleep(1.0)
        for _ in range(3):  # others that compute on this machine make it look dearer
            used = rest(engines)
            if max(used) < REST * 0.01:
                break
        assert max(used) < REST * 0.01, f"CPU seconds in {REST} s of sleep: {used}"
        command.child("Coordinator").send_signal(signal.SIGSTOP)
        try:
            assert streamed(ports), "sleeping and waking need no coordinator"
        finally:
            command.child("Coordinator").send_signal(signal.SIGCONT)
        assert_is_agreed_on(ports, tmp_path)
        assert command.stop() == 0


def assert_is_agreed_on(ports: Ports, tmp_path: Path) -> None:
    """One that spreads no experts cannot come."""
    other = [SHIPPED_MODEL, "-dp", "2", "-dpr", "1", "--no-enable-expert-parallel", "--headless"]
    with serve(tmp_path / "other.log", *other, *ports.join()) as late:
        assert late.end() == 3
        assert "-ep is False, the mesh has True" in late.log


def _empty_steps(rank: int) -> str:
    return _of(rank, "empty_steps_total")


def _of(rank: int, name: str, **more: str) -> str:
    labels = {"engine": str(rank), "model_name": SHIPPED_MODEL, **more}
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"lockstep:{name}{{{inside}}}"


def rest(engines: list[psutil.Process]) -> list[float]:
    """CPU seconds of each instance while no request runs."""
    before = [cpu_seconds(engine) for engine in engines]
    time.sleep(REST)
    return [cpu_seconds(engine) - then for engine, then in zip(engines, before, strict=True)]


def cpu_seconds(engine: psutil.Process) -> float:
    """Exact time of all threads.

    The kernel's ticks are of 10 ms, a quarter of what is looked for.
    """
    threads = Path(f"/proc/{engine.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def test_random_experts_are_not_spread(tmp_path: Path) -> None:
    with serve(tmp_path / "log", "-dp", "2", "-ep", "--load-format", "dummy", *Ports().head()) as command:
        assert command.end() == 1
        assert "--load-format dummy with -ep is not built" in command.log


def test_ep_on_a_dense_model_warns_and_goes_on(tmp_path: Path) -> None:
    from tests.engine.tiny_models import make_tiny_model

    ports = Ports()
    model = make_tiny_model(tmp_path / "dense", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / name, model)
    with serve(
        tmp_path / "log", str(model), "-dp", "2", "-ep", *ports.head(), *FLAGS, "--max-model-len", "256"
    ) as command:
        command.wait_for("2 instances ready")
        assert "-ep ignored: LlamaForCausalLM is a dense model" in command.log
        assert command.stop() == 0
