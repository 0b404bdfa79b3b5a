"""Capsules of a mesh whose weights change, verified against the checkpoint of each version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from router.capsule import Capsule, found_in, read
from router.tools.replay.command import main as replay
from router.tools.verify.command import main as verify
from tests.engine.weight_versions.made import trained
from tests.mesh.running.test_pauses import PausedMesh

pytestmark = pytest.mark.mesh

NUM_TOKENS = 60
LONG = 1500
"""Tokens of an answer that an update overtakes."""


def ask(mesh: PausedMesh, num_tokens: int = NUM_TOKENS, meanwhile: Callable[[], None] | None = None) -> str:
    """A streamed answer with its capsule; something may be done once it has a token."""
    body: dict[str, Any] = {
        "prompt": [70, 71, 72, 73], "max_tokens": num_tokens, "temperature": 0.8, "seed": 5,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    url, headers = f"{mesh.url}/v1/completions", {"X-Lockstep-Capsule": "1"}
    with (
        httpx2.Client(timeout=120) as client,
        client.stream("POST", url, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        found = [next(lines)]
        if meanwhile is not None:
            meanwhile()
        return "\n".join([*found, *lines])


def capsule_of(text: str) -> Capsule:
    ((_, found),) = found_in(text.encode())
    return read(found)


@pytest.mark.nightly
def test_verify_and_replay_go_by_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = MODELS_DIRECTORY / SHIPPED_MODEL
    new = trained(old, tmp_path / "new")
    files = {name: tmp_path / f"{name}.json" for name in ("before", "over", "after")}
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, "--no-enable-expert-parallel")
        files["before"].write_text(ask(mesh))

        def update() -> None:
            """An update behind the first tokens, which a pause holds back from the others."""
            assert mesh.call("/pause?mode=keep")[0] == 200
            fields = {"model_path": str(new), "weight_version": "step 1", "in_flight": "recompute"}
            status, answer = mesh.call("/update_weights_from_disk", fields)
            assert status == 200, answer
            assert mesh.call("/resume")[0] == 200

        files["over"].write_text(ask(mesh, LONG, update))
        files["after"].write_text(ask(mesh))
        digest = mesh.view().orders.weights.digest
        capsys.readouterr()
        assert replay([str(files["after"]), "--url", mesh.url]) == 0
        assert "equal, 1 sample, 60 tokens" in capsys.readouterr().out
        assert replay([str(files["before"]), "--url", mesh.url]) != 0
        assert "the capsule is of other weights" in capsys.readouterr().err
        assert mesh.command.stop() == 0
    before, over, after = (capsule_of(path.read_text()) for path in files.values())
    assert (before.format, before.weights) == (3, ())
    ((span,),) = [each.spans for each in after.weights]
    assert (after.format, span.first_token, span.name) == (4, 0, "step 1")
    assert after.numerics[0].weights == digest != before.numerics[0].weights
    ((first, second),) = [each.spans for each in over.weights]
    assert [first.name, second.name] == ["default", "step 1"], "the update came before or behind its tokens"
    flags = ["--kv-cache-memory-bytes", "128M"]
    for name, directory, words in (
        ("before", old, f"{NUM_TOKENS} tokens"),
        ("after", new, f"{NUM_TOKENS} tokens"),
        ("over", old, f"only {second.first_token} tokens were compared"),
    ):
        assert verify([str(files[name]), "--model", str(directory), *flags]) == 0
        out = capsys.readouterr().out
        assert "equal, 1 sample" in out, out
        assert words in out, out
