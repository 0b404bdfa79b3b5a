"""Checks of Python, the required packages, and torch, which a child process loads."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import msgspec

from coordinator.distribution import DISTRIBUTION
from engine.probe.facts import ProbeFailed, TorchFacts
from parallel.devices import has_device
from router.tools.doctor.findings import Finding, broken, note, ok, warning

AREA = "installation"
PYTHON = (3, 11)
PROBE_TIMEOUT = 120.0
"""Seconds that loading torch may take."""
EXTRAS = {"ray": "instances and workers over a Ray cluster", "aiohttp": "the load generator"}
"""Packages that are needed for one thing only."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?((?:[<>=!~]=?[^;,)]+,?)*)")


def check_python(found: tuple[int, ...] = sys.version_info[:3], system: str = sys.platform) -> list[Finding]:
    """Findings about the interpreter and the operating system."""
    text = f"Python {'.'.join(map(str, found))}, {platform.platform(terse=True)}"
    if found[:2] < PYTHON:
        return [broken(AREA, "Python", text, "install Python 3.11 or newer")]
    if system != "linux":
        return [broken(AREA, "Python", f"{text}: Lockstep runs on Linux only", "use Linux, or a container")]
    return [ok(AREA, "Python", text)]


def check_packages(installed: Callable[[str], str] = version) -> list[Finding]:
    """Compare the requirements of the installed lockstep with the packages present.

    ``installed`` gives a package's version.
    """
    try:
        needs = requires(DISTRIBUTION) or []
        text = f"lockstep {version(DISTRIBUTION)}"
    except PackageNotFoundError:
        return [note(AREA, "packages", "lockstep itself is not installed", "pip install -e . in its clone")]
    problems = list(_problems(needs, installed))
    if problems:
        fix = "pip install " + " ".join(f"'{need}'" for need, _ in problems)
        found = ", ".join(f"{need} is needed, {what}" for need, what in problems)
        return [broken(AREA, "packages", f"{text}: {found}", fix)]
    own = sum("extra ==" not in need for need in needs)
    return [ok(AREA, "packages", f"{text} and the {own} packages that it needs")]


def _problems(needs: Sequence[str], installed: Callable[[str], str]) -> list[tuple[str, str]]:
    """(requirement, what is there instead) of each requirement that is not met."""
    problems = []
    for need in needs:
        if "extra ==" in need:
            continue
        match = _REQUIREMENT.match(need)
        assert match is not None, need
        name, bounds = match[1], [bound for bound in match[2].split(",") if bound.strip()]
        try:
            found = installed(name)
        except PackageNotFoundError:
            problems.append((f"{name}{match[2]}", "it is missing"))
            continue
        if not all(_meets(found, bound.strip()) for bound in bounds):
            problems.append((f"{name}{match[2]}", f"{found} is there"))
    return problems


def _meets(found: str, bound: str) -> bool:
    """Whether a version meets lower and upper bounds; other kinds are pip's business."""
    match = re.match(r"(>=|<=|<|>)\s*(.+)", bound)
    if match is None:
        return True
    have, want = _numbers(found), _numbers(match[2])
    width = max(len(have), len(want))
    have, want = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
    return {">=": have >= want, "<=": have <= want, "<": have < want, ">": have > want}[match[1]]


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of a version: 2.13.0+cpu is (2, 13, 0), 3.0rc1 is (3, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_extras(installed: Callable[[str], str] = version) -> list[Finding]:
    """Findings about packages that single features need."""
    have, lack = [], []
    for name, purpose in EXTRAS.items():
        try:
            have.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            lack.append(f"no {name} ({purpose})")
    return [ok(AREA, "extras", ", ".join(have + lack))]


def ask_torch() -> TorchFacts | ProbeFailed:
    """Facts about torch, from a child process."""
    command = [sys.executable, "-P", "-m", "engine.probe.torch_build"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return ProbeFailed(f"loading it took more than {PROBE_TIMEOUT:.0f} s")
    try:
        return msgspec.json.decode(done.stdout, type=TorchFacts)
    except msgspec.ValidationError:
        return msgspec.json.decode(done.stdout, type=ProbeFailed)
    except msgspec.DecodeError:  # it crashed
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        return ProbeFailed(f"the child that loads it ended with status {done.returncode}: {lines[-1]}")


def check_torch(facts: TorchFacts | ProbeFailed, has_gpu: bool | None = None) -> list[Finding]:
    """Findings about torch and its devices; ``has_gpu``: the kernel shows one."""
    if isinstance(facts, ProbeFailed):
        return [
            broken(AREA, "torch", f"cannot be loaded: {facts.error}", "install torch and transformers again")
        ]
    build = f"CUDA {facts.cuda}" if facts.cuda else "CPU"
    text = f"torch {facts.version} ({build} build), transformers {facts.transformers}"
    findings = [ok(AREA, "torch", f"{text}; CPU kernels use {facts.cpu_capability}")]
    if not facts.gloo:
        fix = "install a torch with gloo, such as the one of pytorch.org"
        findings.append(broken(AREA, "torch", "this build has no gloo, which hosts talk through", fix))
    return [*findings, _devices(facts, has_device() if has_gpu is None else has_gpu)]


def _devices(facts: TorchFacts, has_gpu: bool) -> Finding:
    if facts.devices:
        names = ", ".join(
            f"{device.name} ({device.memory_bytes / 2**30:.0f} GiB, sm {device.capability})"
            for device in facts.devices
        )
        nccl = f"NCCL {facts.nccl}" if facts.nccl else "no NCCL"
        return ok(AREA, "devices", f"{names}; {nccl}")
    if has_gpu and facts.cuda is None:
        text = "there is a GPU, but torch is the CPU build"
        return warning(
            AREA,
            "devices",
            text,
            "install the build for CUDA or ROCm: https://pytorch.org/get-started/locally",
        )
    if has_gpu:
        text = f"there is a GPU, but torch for CUDA {facts.cuda} does not see it"
        return warning(
            AREA, "devices", text, "look at nvidia-smi: the driver, CUDA_VISIBLE_DEVICES, the container"
        )
    return ok(AREA, "devices", "no GPU; computes on the CPU")
