"""The command ``guidellm``: benchmarks of chat, completions and responses finish without an error."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import checks
from checks import check

MODEL = checks.model()
DIRECTORY = os.environ.get(
    "LOCKSTEP_MODEL_DIR", str(Path(__file__).resolve().parents[2] / "engine" / "models" / "lockstep-moe")
)
"""Directory with the tokenizer of the model that is served."""
NUM_REQUESTS = 6
OUTPUT_TOKENS = 8


def run(route: str, profile: str) -> Any:
    """The report of one benchmark."""
    backend = (
        f"kind=openai_http,target={checks.URL},model={MODEL},api_key={checks.KEY},request_format={route}"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("guidellm")), "run", "--backend", backend),
                *("--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=hf_auto,model={DIRECTORY}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
                *("--output", "kind=json,path=benchmarks.json", "--disable-console-interactive"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (report,) = json.loads(Path(folder, "benchmarks.json").read_text())["benchmarks"]
    return report["metrics"]


def check_report(metrics: Any, what: str) -> None:
    totals = metrics["request_totals"]
    tokens = metrics["output_token_count"]["successful"]
    latency = metrics["time_to_first_token_ms"]["successful"]
    count, errors = totals["successful"], totals["errored"]
    print(f"{what}: {count} requests, {errors} errors, first token after {latency['mean']:.0f} ms")
    assert totals["successful"] >= NUM_REQUESTS and totals["errored"] == totals["incomplete"] == 0, totals
    assert tokens["mean"] == OUTPUT_TOKENS, tokens  # as the mesh counts them
    assert latency["mean"] > 0


@check
def chat_by_two_at_a_time() -> None:
    check_report(run("/v1/chat/completions", "kind=concurrent,streams=2"), "chat")


@check
def completions_at_a_rate() -> None:
    check_report(run("/v1/completions", "kind=constant,rate=4"), "completions")


@check
def responses_one_by_one() -> None:
    check_report(run("/v1/responses", "kind=synchronous"), "responses")


if __name__ == "__main__":
    checks.run(f"guidellm {importlib.metadata.version('guidellm')}")
