"""Answers of meshes, verified in one process: 200 at night, 30 for each push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from router.capsule import Capsule
from router.tools.verify.command import main as verify
from tests.engine.invariance.answers import NGRAMS
from tests.mesh.clients.test_clients import metrics
from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.running.test_replay import KINDS, LONG, SMALL, TOOLS, ask_all, capsules_of, chat, text
from tests.nightly import NIGHTLY

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

Asked = tuple[str, dict[str, Any]]
REASONING = ["--reasoning-parser", "deepseek_r1"]
MESHES: dict[str, list[str]] = {
    "plain": [],
    "drafts": ["--speculative-config", NGRAMS],
    "spread": ["-ep", "--speculative-config", NGRAMS],
    "weights": ["--quantization", "int8"],
    "cache": ["--kv-cache-dtype", "int8"],
}
"""Further flags of each mesh; for each push "drafts" alone."""
THOUGHTFUL: list[Asked] = [
    chat(temperature=1, thinking_token_budget=6, max_tokens=30),
    chat(temperature=0, thinking_token_budget=0, max_tokens=20),
]
LONGER: list[Asked] = [
    text(temperature=1, n=2, prompt=f"{LONG}{number}", max_tokens=160, ignore_eos=True, stream=True)
    for number in range(5)
] + [
    text(temperature=0, prompt=LONG, max_tokens=160, ignore_eos=True),
    text(temperature=1, frequency_penalty=0.5, max_tokens=160, ignore_eos=True, stream=True),
    text(temperature=1, structured_outputs={"regex": "[a-z ]{150}"}, max_tokens=160),
]
"""Requests that are under way while an instance is killed."""
STREAMED = {"plain": 25, "drafts": 9}
"""Answers asked for once more at night, as streams; 5 of the other meshes."""


def asked_of(name: str) -> list[Asked]:
    """Requests of one mesh that no fault concerns."""
    kinds = [*KINDS, *THOUGHTFUL]
    if not NIGHTLY:
        return [*kinds[::2], *KINDS[5:16:2], *KINDS[:1], *THOUGHTFUL[:1]]
    return [*kinds, *((path, body | {"stream": True}) for path, body in KINDS[: STREAMED.get(name, 5)])]


def running(ports: Ports, rank: int) -> float:
    counted = metrics(ports)
    return counted.get(f'vllm:num_requests_running{{engine="{rank}",model_name="{SHIPPED_MODEL}"}}', 0.0)


def answers_around_a_kill(ports: Ports, command: Command) -> list[str]:
    """Answers that a killed instance had begun, beside those of the other one."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, ports, LONGER, **{"X-Lockstep-Capsule": "1"})
        wait_until(lambda: running(ports, 1) > 1, 20, "instance 1 works")
        command.child("Engine_1").kill()
        return answers.result()


def answers_of(name: str, log: Path) -> list[str]:
    """Answers of a mesh of two instances; one of them dies where there are drafts."""
    ports = Ports()
    with serve(
        log, SHIPPED_MODEL, "-dp", "2", *ports.head(), *SMALL, *TOOLS, *REASONING, *MESHES[name]
    ) as command:
        command.wait_for("2 instances ready")
        answers = ask_all(ports, asked_of(name), **{"X-Lockstep-Capsule": "1"})
        if name in ("drafts", "spread"):
            answers += answers_around_a_kill(ports, command)
            assert _counted(ports, "faults_total", 'event="resume"') > 0
            assert _counted(ports, "num_accepted_tokens_total") > 0
        assert _counted(ports, "prefix_cache_hits_total") > 0
        assert command.stop() == 0
    return answers


def _counted(ports: Ports, *words: str) -> float:
    return sum(value for name, value in metrics(ports).items() if all(word in name for word in words))


def has(what: Callable[[Any], bool], capsules: Sequence[Capsule]) -> bool:
    return any(what(prompt) for capsule in capsules for prompt in capsule.prompts)


def test_answers_of_two_instances_are_equal_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[str] = []
    for name in MESHES if NIGHTLY else ["drafts"]:
        answers += answers_of(name, tmp_path / f"{name}.log")
    capsules = capsules_of(answers)
    assert len(capsules) == (200 if NIGHTLY else 30)
    assert len({sample.system_fingerprint for each in capsules for sample in each.prompts[0].samples}) == (
        3 if NIGHTLY else 1
    )
    for kind in ("thinking", "grammar", "frequency_penalty", "logit_bias", "bad_words", "top_k"):
        unset = getattr(type(capsules[0].prompts[0].params)(), kind)
        assert has(lambda prompt, kind=kind, unset=unset: getattr(prompt.params, kind) != unset, capsules)
    files = [tmp_path / f"{number:03}.txt" for number in range(len(answers))]
    for file, answer in zip(files, answers, strict=True):
        file.write_text(answer)
    flags = ["--model", SHIPPED_MODEL, "--kv-cache-memory-bytes", "128M"]
    status = verify([*map(str, files), *flags])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, ""), captured.out
    assert captured.out.endswith(f"\n{len(capsules)} equal\n")
