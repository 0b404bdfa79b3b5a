"""lm-eval's ``local-completions`` against its ``hf`` (transformers) on the tasks of lm_eval_tasks/.

The model is computed twice: here by transformers in float32, and by the mesh, which must be started with
``--dtype float32``. Log-likelihoods must agree within 1e-4, greedy texts must be the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import checks

os.environ["OPENAI_API_KEY"] = checks.KEY

import lm_eval
from checks import check
from lm_eval.tasks import TaskManager

TASKS = ["lockstep_choices", "lockstep_passages", "lockstep_continued"]
FOLDER = Path(__file__).resolve().parent / "lm_eval_tasks"
os.chdir(FOLDER)  # the tasks name their data from here
MODEL = checks.model()
DIRECTORY = os.environ.get(
    "LOCKSTEP_MODEL_DIR", str(FOLDER.parents[2] / "engine" / "models" / "lockstep-moe")
)
"""Directory of the model that is served."""

TOLERANCE = 1e-4
MAX_LENGTH = 128
"""Tokens of a window: so few that the long passages take several."""

REMOTE: dict[str, Any] = {
    "model": MODEL,
    "base_url": f"{checks.URL}/v1/completions",
    "tokenizer": DIRECTORY,
    "tokenizer_backend": "huggingface",
    "max_length": MAX_LENGTH + 2,  # of which this class of lm-eval uses two less for a window
    "max_retries": 1,
}


def evaluated(model: str, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """The model's answers to the documents of each task, in order."""
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=TASKS,
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = found["samples"]
    return {
        task: [sample["resps"] for sample in sorted(samples[task], key=lambda one: one["doc_id"])]
        for task in TASKS
    }


_reference: dict[str, list[Any]] = {}


def reference() -> dict[str, list[Any]]:
    if not _reference:
        _reference.update(
            evaluated(
                "hf",
                {
                    "pretrained": DIRECTORY,
                    "dtype": "float32",
                    "device": "cpu",
                    "max_length": MAX_LENGTH,
                    "batch_size": 1,
                },
            )
        )
    return _reference


def flat(answers: list[Any]) -> list[Any]:
    """All log-likelihoods, whether each was the greedy choice, and texts, without the lists around them."""
    found: list[Any] = []
    for answer in answers:
        found += flat(list(answer)) if isinstance(answer, list | tuple) else [answer]
    return found


def compare(found: dict[str, list[Any]], what: str) -> None:
    largest, count, texts = 0.0, 0, 0
    for task, expected in reference().items():
        pairs = list(zip(flat(expected), flat(found[task]), strict=True))
        assert pairs
        for ours, theirs in pairs:
            if isinstance(ours, float):
                largest, count = max(largest, abs(ours - theirs)), count + 1
            else:
                assert ours == theirs, f"{task}: {ours!r} and {theirs!r}"
                texts += isinstance(ours, str)
    print(f"{what}: {count} log-likelihoods differ by at most {largest:.1e}, {texts} greedy texts are equal")
    assert count > 30 and texts == 10
    assert largest < TOLERANCE


@check
def one_request_at_a_time() -> None:
    compare(evaluated("local-completions", REMOTE), "one request at a time")


@check
def batches_at_once() -> None:
    arguments = REMOTE | {"batch_size": 4, "num_concurrent": 3}
    compare(evaluated("local-completions", arguments), "three requests of four prompts at once")


@check
def prompts_as_text() -> None:
    arguments = REMOTE | {"tokenized_requests": False, "batch_size": 4}
    found = evaluated("local-completions", arguments)
    compare(found, "prompts as text")


@check
def the_mesh_as_tokenizer() -> None:
    try:
        checks.get("/tokenizer_info")
    except checks.HTTPError:
        raise checks.Skipped("start the mesh with --enable-tokenizer-info-endpoint") from None
    arguments = REMOTE | {"tokenizer_backend": "remote", "tokenizer": None, "auth_token": checks.KEY}
    compare(evaluated("local-completions", arguments), "tokens from /tokenize")


@check
def the_command() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ",".join(f"{name}={value}" for name, value in REMOTE.items())
        subprocess.run(
            [
                *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
                *("--model_args", arguments, "--tasks", TASKS[0], "--include_path", str(FOLDER)),
                *("--log_samples", "--output_path", folder),
            ],
            check=True,
            capture_output=True,
            timeout=300,
        )
        (file,) = Path(folder).rglob(f"samples_{TASKS[0]}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    told = flat([each["resps"] for each in samples])  # as text
    for ours, theirs in zip(flat(reference()[TASKS[0]]), told, strict=True):
        assert abs(ours - float(theirs)) < TOLERANCE if isinstance(ours, float) else str(ours) == theirs


if __name__ == "__main__":
    checks.run(f"lm-eval {importlib.metadata.version('lm-eval')}")
