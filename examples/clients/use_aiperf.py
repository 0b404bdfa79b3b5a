"""The command ``aiperf``: benchmarks of four endpoints finish without an error, with metrics."""

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
NUM_REQUESTS = 8
OUTPUT_TOKENS = 8


def run(*more: str) -> tuple[Any, Any]:
    """The report of one benchmark, and the metrics that it read."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(
                    str(Path(sys.executable).with_name("aiperf")),
                    "profile",
                    "--model",
                    MODEL,
                    "--url",
                    checks.URL,
                ),
                *(
                    "--api-key",
                    checks.KEY,
                    "--tokenizer",
                    DIRECTORY,
                    "--ui",
                    "none",
                    "--artifact-dir",
                    folder,
                ),
                *("--request-count", str(NUM_REQUESTS), "--concurrency", "2"),
                *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(OUTPUT_TOKENS)),
                *more,
            ],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        (server,) = Path(folder).rglob("server_metrics_export.json")
        return json.loads(report.read_text()), json.loads(server.read_text())["metrics"]


def check_report(report: Any, server: Any, what: str) -> None:
    count, errors = report["request_count"]["avg"], report["request_error_rate"]["avg"]
    print(
        f"{what}: {count:.0f} requests, {errors:.0f}% errors, {report['request_latency']['avg']:.0f} ms each"
    )
    assert count == NUM_REQUESTS and errors == 0 and not report["error_summary"] and report["is_complete"]
    assert {"vllm:generation_tokens", "vllm:num_requests_running", "lockstep:epoch"} <= set(server), sorted(
        server
    )


@check
def chat_in_streams() -> None:
    report, server = run("--endpoint-type", "chat", "--streaming")
    check_report(report, server, "chat")
    assert report["time_to_first_token"]["avg"] > 0
    assert report["usage_completion_tokens"]["avg"] == OUTPUT_TOKENS


@check
def completions() -> None:
    check_report(*run("--endpoint-type", "completions"), "completions")


@check
def responses() -> None:
    check_report(*run("--endpoint-type", "responses", "--streaming"), "responses")


@check
def messages() -> None:
    check_report(*run("--endpoint-type", "messages", "--streaming"), "messages")


if __name__ == "__main__":
    checks.run(f"aiperf {importlib.metadata.version('aiperf')}")
