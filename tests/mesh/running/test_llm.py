"""``LLM`` with real processes: exact, spread, interrupted, killed, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from engine.model.finding import find_model
from lockstep import LLM, EngineDeadError, RequestOutput, SamplingParams
from router.faults import FaultEvent
from tests.mesh.harness import free_port, wait_until

pytestmark = pytest.mark.mesh

EXAMPLES = Path(__file__).parents[3] / "examples"
FLAGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 600, "max_num_seqs": 32}
PROMPTS = ["It is a truth universally acknowledged, that", "Elizabeth", "Mr. Darcy", "My dear sister"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(data_parallel_size=2, **FLAGS) as llm:
        pids = llm._mesh.pids
        assert len(pids) == 3, "a coordinator and two instances"
        yield llm
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        find_model(None, None), dtype=torch.float32
    ).eval()


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[sample.text for sample in output.outputs] for output in outputs]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def running(llm: LLM) -> list[int]:
    """Requests at each instance, as the instances report."""
    reports = llm._mesh.client.reports()
    return [report.running + report.waiting for _, report in sorted(reports.items())]


def assert_idle(llm: LLM) -> None:
    """No request and no block anywhere."""
    reports = llm._mesh.client.reports
    wait_until(
        lambda: running(llm) == [0, 0] and not any(report.blocks_used for report in reports().values()), 10
    )
    assert llm._mesh.client.num_in_flight == 0


def test_greedy_ids_and_logprobs_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    for output in llm.generate(PROMPTS * 4, params, use_tqdm=False):
        prompt, sample = output.prompt_token_ids, output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert sample.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values.sum().item()
        assert sample.cumulative_logprob == pytest.approx(expected, abs=1e-3)
    totals = [report.counters.generation_tokens for report in llm._mesh.client.reports().values()]
    assert len(totals) == 2
    assert min(totals) > 0, "both instances worked"


def test_seeded_samples(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=0.9, seed=4, max_tokens=20, stop=["."])
    first = llm.generate("Elizabeth", params, use_tqdm=False)
    crowd = llm.generate(["Elizabeth", *PROMPTS], params, use_tqdm=False)
    assert texts(first)[0] == texts(crowd)[0], "the same alone and in a batch"
    assert len(set(texts(first)[0])) == 2
    assert [sample.index for sample in first[0].outputs] == [0, 1]


def test_chat_is_generate_on_the_templates_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me about Mr. Darcy."}]
    params = SamplingParams(temperature=0, max_tokens=16)
    (chat,) = llm.chat(messages, params, use_tqdm=False)
    rendered = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.prompt == rendered
    (plain,) = llm.generate(rendered, params, use_tqdm=False)
    assert (plain.prompt_token_ids, ids([plain])) == (chat.prompt_token_ids, ids([chat]))


def test_in_a_running_loop_and_from_threads(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = ids(llm.generate(PROMPTS, params, use_tqdm=False))

    async def notebook() -> list[list[int]]:
        return ids(llm.generate(PROMPTS, params))

    assert asyncio.run(notebook()) == expected
    assert "Processed prompts" in (said := capsys.readouterr().err)
    assert "4/4" in said
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: ids(llm.generate(text, params, use_tqdm=False))[0], PROMPTS))
    assert found == expected


def test_ctrl_c_aborts_and_the_llm_lives_on(llm: LLM) -> None:
    def interrupt() -> None:
        wait_until(lambda: sum(running(llm)) > 20, 30, "work everywhere")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 8, SamplingParams(max_tokens=1500, ignore_eos=True), use_tqdm=False)
    thread.join()
    assert_idle(llm)
    assert len(llm.generate("Elizabeth", use_tqdm=False)) == 1


def test_a_killed_instance_costs_no_token(llm: LLM) -> None:
    prompts = PROMPTS * 6
    params = [
        SamplingParams(temperature=0 if n % 2 else 0.8, seed=n, max_tokens=300, ignore_eos=True)
        for n in range(len(prompts))
    ]
    undisturbed = llm.generate(prompts, params, use_tqdm=False)
    with LLM(data_parallel_size=2, log_level="error", **FLAGS) as other:
        client = other._mesh.client

        def kill() -> None:
            wait_until(
                lambda: min([*running(other), 0] if len(running(other)) < 2 else running(other)) > 2, 30
            )
            assert client.view is not None
            os.kill(client.view.members[1].pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        disturbed = other.generate(prompts, params, use_tqdm=False)
        thread.join()
        assert sum(client.faults.counts[FaultEvent.RESUME].values()) > 0
        assert client.num_ready == 1
        assert (ids(disturbed), texts(disturbed)) == (ids(undisturbed), texts(undisturbed))

        def kill_the_last() -> None:
            wait_until(lambda: client.num_in_flight > 2, 30)
            assert client.view is not None
            os.kill(client.view.members[0].pid, signal.SIGKILL)

        thread = threading.Thread(target=kill_the_last)
        thread.start()
        with pytest.raises(
            EngineDeadError, match=r"no local instance is left: Engine_0 .* killed by signal 9"
        ):
            other.generate(prompts, params, use_tqdm=False)
        thread.join()


PLAIN_SCRIPT = """
import sys
from lockstep import LLM, SamplingParams
llm = LLM(num_gpu_blocks_override=200, log_level="error")
print(*llm._mesh.pids, flush=True)
print(llm.generate("Elizabeth", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text, flush=True)
sys.stdin.readline()
raise RuntimeError("on purpose")
"""


def test_a_plain_script_leaves_no_process(tmp_path: Path) -> None:
    """No main guard, no ``close()``: its end, an exception or SIGKILL ends all processes."""
    (tmp_path / "script.py").write_text(PLAIN_SCRIPT)
    scripts = [start([str(tmp_path / "script.py")], tmp_path) for _ in range(2)]
    raises, killed = scripts
    families = []
    try:
        for script in scripts:
            assert script.stdout is not None
            families.append([int(pid) for pid in script.stdout.readline().split()])
            assert script.stdout.readline() == " was not sorry to\n"
        assert [len(pids) for pids in families] == [2, 2], "a coordinator and an instance each"
        killed.kill()
        _, said = raises.communicate("\n", timeout=30)
        killed.communicate(timeout=30)
    finally:
        for script in scripts:
            script.kill()
            script.wait()
    assert (raises.returncode, killed.returncode) == (1, -signal.SIGKILL)
    assert not any(psutil.pid_exists(pid) for pid in families[0]), "ended before their parent"
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in families[1]), 5, "the kernel ends them")
    assert said.rstrip().endswith("RuntimeError: on purpose"), "and nothing else is said at the end"


def start(argv: list[str], directory: Path) -> subprocess.Popen[str]:
    """A Python program of a user."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *argv], cwd=directory, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.nightly
def test_two_nodes_print_what_one_prints(tmp_path: Path) -> None:
    nodes = ["--dp-size", "2", "--node-size", "2", "--master-port", str(free_port()), "--node-rank"]
    commands = [["--dp-size", "1"], [*nodes, "1"], [*nodes, "0"]]
    processes = [
        start([str(EXAMPLES / "data_parallel.py"), "--num-prompts", "13", *argv], tmp_path)
        for argv in commands
    ]
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, stderr) in zip(processes, ended, strict=True):
        assert process.returncode == 0, stderr
    one, second, first = (stdout.splitlines() for stdout, _ in ended)
    assert (len(first), len(second)) == (6, 7)
    assert first + second == one
    assert len(set(one)) == 13
