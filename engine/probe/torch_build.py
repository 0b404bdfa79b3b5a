"""``python -m engine.probe.torch_build``: facts about torch and its devices, as JSON."""

from __future__ import annotations

import sys

import msgspec

from engine.probe.facts import Device, ProbeFailed, TorchFacts


def look() -> TorchFacts:
    """Load torch and collect facts about its build and devices.

    Raises:
        ImportError: it, or transformers, is not there, or is broken.
    """
    import torch
    import torch.distributed
    import transformers

    devices = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        devices.append(Device(found.name, found.total_memory, f"{found.major}.{found.minor}"))
    distributed = torch.distributed.is_available()
    has_nccl = distributed and torch.distributed.is_nccl_available() and devices
    return TorchFacts(
        version=str(torch.__version__),
        transformers=transformers.__version__,
        cuda=torch.version.cuda,
        devices=devices,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        gloo=distributed and torch.distributed.is_gloo_available(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    )


def main() -> int:
    answer: TorchFacts | ProbeFailed
    try:
        answer = look()
    except (ImportError, OSError) as error:  # OSError: a shared library that is missing
        answer = ProbeFailed(f"{type(error).__name__}: {error}")
    print(msgspec.json.encode(answer).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
