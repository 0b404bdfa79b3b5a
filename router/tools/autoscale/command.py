"""``lockstep autoscale``: looks at a mesh, decides, scales it or writes a signal."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client.parser import text_string_to_metric_families

from coordinator.commands import ask, has_size
from coordinator.config import MeshAddressConfig
from coordinator.member_connection import fetch_view
from coordinator.membership.operations import ACCEPTED, FAILED
from coordinator.messages import OperatorAnswer, Scale, State, View
from coordinator.process import process
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.settings.flags import Count, flag, parse
from router.tools.autoscale.policy import Autoscaler, Goals, MeshSnapshot, SizeDecision

ASK_TIMEOUT = 10.0
"""Seconds for an answer of the coordinator."""
METRICS_TIMEOUT = 5.0
"""Seconds for an answer of a router."""
MAX_METRICS_BYTES = 16 * 1024**2
TTFT = "vllm:time_to_first_token_seconds"

Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]


class AutoscaleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscale."""

    mesh: MeshAddressConfig = MeshAddressConfig()
    min_instances: Annotated[Count, flag(help="Lowest number of instances.")] = 1
    max_instances: Annotated[Count | None, flag(help="Highest number of instances; must be given.")] = None
    target_running: Annotated[
        Positive, flag(help="Target of requests per instance, running and waiting.")
    ] = 16.0
    target_queue: Annotated[
        Positive, flag(help="Waiting requests per instance; more of them start instances at once.")
    ] = 2.0
    target_ttft: Annotated[
        Positive | None, flag(help="Target mean seconds to the first token; needs --metrics-url.")
    ] = None
    metrics_url: Annotated[
        str | None, flag(help="A router's /metrics, for --target-ttft: http://127.0.0.1:8000/metrics.")
    ] = None
    cool_down_up: Annotated[Seconds, flag(help="Least seconds from a change to one upwards.")] = 30.0
    cool_down_down: Annotated[Seconds, flag(help="Least seconds from a change to one downwards.")] = 120.0
    stabilization_window: Annotated[
        Seconds, flag(help="Seconds for which fewer must have been enough before a change downwards.")
    ] = 300.0
    interval: Annotated[Positive, flag(help="Seconds between two checks of the load.")] = 5.0
    signal_file: Annotated[
        str | None,
        flag(
            path=True,
            help="File to keep with the number wanted, for other autoscalers: JSON, or Prometheus' text "
            "format if its name ends in .prom.",
        ),
    ] = None
    act: Annotated[bool, flag(help="Scale the mesh; --no-act: only print and write the number wanted.")] = (
        True
    )

    def __post_init__(self) -> None:
        if self.max_instances is None:
            raise ValueError("give --max-instances: the most instances that may be started")
        if self.max_instances < self.min_instances:
            raise ValueError(
                f"--max-instances {self.max_instances} is less than --min-instances {self.min_instances}"
            )
        if (self.target_ttft is None) != (self.metrics_url is None):
            raise ValueError("--target-ttft and --metrics-url need each other: give both, or none")
        if self.metrics_url is not None and not self.metrics_url.startswith(("http://", "https://")):
            raise ValueError(f"--metrics-url {self.metrics_url!r} is no URL: http://127.0.0.1:8000/metrics")

    @property
    def goals(self) -> Goals:
        """Goals that :mod:`router.tools.autoscale.policy` decides by."""
        assert self.max_instances is not None
        return Goals(
            min_instances=self.min_instances,
            max_instances=self.max_instances,
            target_running=self.target_running,
            target_queue=self.target_queue,
            target_ttft=self.target_ttft,
            cool_down_up=self.cool_down_up,
            cool_down_down=self.cool_down_down,
            stabilization_window=self.stabilization_window,
        )


class TtftMeter:
    """Mean time to the first token between two looks at a router's metrics."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def read(self, text: str) -> float | None:
        """Seconds since the last text; None for the first one, and without new tokens."""
        total = count = 0.0
        for family in text_string_to_metric_families(text):
            if family.name == TTFT:
                total += sum(each.value for each in family.samples if each.name == f"{TTFT}_sum")
                count += sum(each.value for each in family.samples if each.name == f"{TTFT}_count")
        before, self._before = self._before, (total, count)
        if before is None or count <= before[1]:
            return None  # with a router that was started again it may be less
        return max(0.0, total - before[0]) / (count - before[1])


class PendingScale:
    """Scale command under way, until it is done or has failed."""

    def __init__(self, command: Callable[[Scale], Awaitable[OperatorAnswer]]) -> None:
        """``command`` has the coordinator do something; it raises TimeoutError without an answer."""
        self._command = command
        self._wish: Scale | None = None

    def __repr__(self) -> str:
        return f"<PendingScale {self._wish}>"

    async def begin(self, size: int) -> str:
        """Send a scale command; returns a line about the coordinator's answer."""
        wish = Scale(command=uuid.uuid4().hex, size=size)
        try:
            answer = await self._command(wish)
        except TimeoutError:
            return "no answer"
        self._wish = wish if answer.status == ACCEPTED else None
        return answer.text if answer.status == ACCEPTED else f"refused: {answer.text}"

    async def look(self, view: View) -> str:
        """Reason why the scale command failed, given once; empty if it has not."""
        wish = self._wish
        if wish is None or has_size(view, wish.size):
            self._wish = None
            return ""
        try:
            answer = await self._command(wish)
        except TimeoutError:
            return ""
        if answer.status != FAILED:
            return ""
        self._wish = None
        return f"there are not {wish.size} instances: {answer.text}"


def seen_in(view: View, ttft: float | None) -> MeshSnapshot:
    """Figures of a view of the mesh that the decision needs."""
    staying = [member for member in view.members if member.state.stays]
    return MeshSnapshot(
        staying=len(staying),
        ready=sum(member.state is State.READY for member in staying),
        leaving=len(view.members) - len(staying),
        running=sum(member.load.running for member in view.members),
        waiting=sum(member.load.waiting for member in view.members),
        ttft=ttft,
    )


def signal_text(verdict: SizeDecision, seen: MeshSnapshot, path: str) -> str:
    """Contents of the signal file."""
    if path.endswith(".prom"):
        return (
            "# HELP lockstep_autoscale_wanted_instances Instances that the load needs.\n"
            "# TYPE lockstep_autoscale_wanted_instances gauge\n"
            f"lockstep_autoscale_wanted_instances {verdict.size}\n"
        )
    told = {"wanted": verdict.size, "instances": seen.staying, "ready": seen.ready, "why": verdict.why}
    return msgspec.json.encode(told).decode() + "\n"


def write_signal(verdict: SizeDecision, seen: MeshSnapshot, path: str) -> None:
    """Replace the signal file: a reader never finds half of it."""
    new = Path(f"{path}.new")
    new.write_text(signal_text(verdict, seen, path))
    os.replace(new, path)


def main(argv: list[str] | None = None) -> int:
    config = parse(
        AutoscaleConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep autoscale",
        description="Follow the load of a mesh, and start or drain instances of its serve command.",
        shares_file=True,
    )
    keys = process.mesh_keys(config.mesh, "lockstep autoscale")
    try:
        asyncio.run(_run(config, keys))
    except (KeyRefused, OtherProtocol) as error:
        print(f"lockstep autoscale: error: {error}", file=sys.stderr)
        return process.EXIT_REFUSED
    except OSError as error:
        print(f"lockstep autoscale: error: --signal-file: {error}", file=sys.stderr)
        return process.EXIT_FAILED
    return 0


async def _run(config: AutoscaleConfig, keys: MeshKeys | None) -> None:
    """Follow the mesh until interrupted; one that does not answer is left as it is."""
    scaler, meter, last = Autoscaler(config.goals), TtftMeter(), ""
    endpoint = config.mesh.coordinator_endpoint
    change = PendingScale(partial(ask, endpoint, timeout=ASK_TIMEOUT, keys=keys))
    while True:
        try:
            view = await fetch_view(endpoint, ASK_TIMEOUT, keys)
        except TimeoutError:
            view, line = None, f"no answer from the coordinator at {endpoint}"
        if view is not None and view.complete:
            seen = seen_in(view, await _ttft(config, meter))
            verdict = scaler.look(seen, time.monotonic())
            if config.signal_file is not None:
                write_signal(verdict, seen, config.signal_file)
            line = f"{seen.ready} of {seen.staying} ready, {verdict.size} wanted: {verdict.why}"
            if failure := await change.look(view):
                line += f"; {failure}"
            if config.act and verdict.size != seen.staying:
                line += f"; {await change.begin(verdict.size)}"
        elif view is not None:
            line = "the coordinator has just started, and may not know of all instances"
        if line != last:
            print(line, flush=True)
        last = line
        await asyncio.sleep(config.interval)


async def _ttft(config: AutoscaleConfig, meter: TtftMeter) -> float | None:
    if config.metrics_url is None:
        return None
    try:
        return meter.read(await asyncio.to_thread(_fetch, config.metrics_url))
    except (OSError, ValueError):
        return None  # the other targets decide


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=METRICS_TIMEOUT) as answer:
        text: bytes = answer.read(MAX_METRICS_BYTES)
        return text.decode()
