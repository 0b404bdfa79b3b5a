"""Capsules of prompts with images: computed again to the bit, elsewhere and by ``lockstep verify``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from router.capsule import FIELD, found_in, read, written
from router.tools.replay.command import main as replay
from router.tools.verify.command import main as verify
from tests.mesh.harness import Ports, serve
from tests.mesh.images.test_images import QUESTIONS, messages

pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(300)]


def test_answers_about_images_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    ports, directory = Ports(), make_tiny_chat_model(tmp_path / "llava")
    flags = ["-dp", "2", "--served-model-name", "m", "--dtype", "float32"]
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(serve(tmp_path / "serve.log", str(directory), *flags, *ports.head()))
        command.wait_for("2 instances ready")
        client = stack.enter_context(httpx2.Client(base_url=ports.url, timeout=60))
        files, bodies = [], []
        for number, question in enumerate([QUESTIONS[0], (1, " and ", 3, " and ", 1)]):
            body = {
                "model": "m",
                "messages": messages(*question),
                "max_tokens": 24,
                "temperature": 1.0,
                "seed": 3,
            }
            sent = json.dumps(body).encode()
            answer = client.post(
                "/v1/chat/completions", content=sent,
                headers={"x-lockstep-capsule": "1", "content-type": "application/json"},
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            files.append(tmp_path / f"{number}.json")
            files[-1].write_bytes(answer.content)
            bodies.append(tmp_path / f"body{number}.json")
            bodies[-1].write_bytes(sent)
        ((_, text),) = found_in(files[1].read_bytes())
        capsule = read(text)
        assert (capsule.format, len(capsule.images), len(capsule.places)) == (5, 2, 3)
        url = ["--url", f"{ports.url}/v1"]
        assert replay([*map(str, files), *url]) == 0, capsys.readouterr()

        other = msgspec.structs.replace(capsule, images=capsule.images[::-1], digest="")
        swapped = [
            msgspec.structs.replace(each, digest=capsule.images[1 - at].digest)
            for at, each in enumerate(capsule.images)
        ]
        other = msgspec.structs.replace(other, images=tuple(swapped))
        lie = tmp_path / "lie.json"
        lie.write_bytes(written(other))
        assert replay([str(lie), *url]) != 0, "other pixels gave the same answer"
        assert "differs at token" in capsys.readouterr().out

        placed = msgspec.structs.replace(capsule.places[0], end=capsule.places[0].end + 400)
        lie.write_bytes(written(msgspec.structs.replace(capsule, places=(placed, *capsule.places[1:]))))
        assert replay([str(lie), *url]) != 0
        assert "outside the prompt" in capsys.readouterr().err
        edited: Any = json.loads(files[1].read_bytes())
        edited[FIELD]["images"][0]["digest"] = "0" * 32
        lie.write_text(json.dumps(edited))
        assert replay([str(lie), *url]) != 0
        assert "edited" in capsys.readouterr().err
        assert command.stop() == 0
        assert "Traceback" not in command.log
    status = verify([*map(str, files), "--model", str(directory), "--dtype", "float32"])
    assert status == 0, capsys.readouterr()
