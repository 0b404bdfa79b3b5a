"""Errors of a GPU and its driver: the reason in one line, then the end."""

from __future__ import annotations

import pytest
import torch

from engine.__main__ import main
from engine.host.device_errors import device_error

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
LOST = "CUDA error: GPU has fallen off the bus\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    "text", [TOO_OLD, LOST, "CUDA driver initialization failed, you might not have a GPU"]
)
def test_an_instance_ends_with_the_reason_in_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_instance: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("engine.lifecycle.instance.InstanceProcess.run", run)
    monkeypatch.setattr("coordinator.process.process.set_up", lambda *_args: None)
    assert main([]) == 1
    (line,) = (each.getMessage() for each in caplog.records if "GPU cannot be used" in each.getMessage())
    assert text.partition("\n")[0] in line
    assert "asynchronously" not in line
    assert "Traceback" not in caplog.text


def test_memory_that_is_short_is_no_error_of_the_device() -> None:
    """As in a capture or a transfer: the end names what takes less."""
    assert device_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")) == ""
    assert device_error(RuntimeError("a shape does not fit")) == ""
    assert device_error(ValueError(LOST)) == ""
