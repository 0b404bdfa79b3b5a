"""``lockstep drain``, ``scale`` and ``role``: send a command, then wait for its result."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct

from coordinator.commands import ask, find_view, has_size
from coordinator.config import MeshAddressConfig
from coordinator.member_connection import fetch_view
from coordinator.membership.operations import ACCEPTED, FAILED
from coordinator.messages import Drain, Member, Role, Scale, SetRole, View
from coordinator.process import process
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.settings.flags import Count, Natural, flag, parse

ASK_TIMEOUT = 10.0
"""Seconds to wait for the coordinator's answer."""
LOOK_INTERVAL = 0.3
"""Seconds between two looks at the world while the command waits."""
WAIT_TIMEOUT = 600.0
"""Seconds that a command waits by default, where nothing gives a duration.

Much more than any instance needs by default.
"""
LEAVE_TIMEOUT = 60.0
"""Seconds that an instance may take to leave when its requests have moved."""
STALLED = 5.0
"""Seconds without a step, though there is work, after which an instance counts as stalled."""


class DrainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drain."""

    mesh: MeshAddressConfig = MeshAddressConfig()
    rank: Annotated[
        Natural | None, flag(positional=True, help="Rank of the instance, as in lockstep status.")
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        flag(help="Seconds for its requests to finish before they move; unset: its --drain-timeout."),
    ] = None
    force: Annotated[bool, flag(help="Drain it even if no instance serves then.")] = False
    wait: Annotated[bool, flag(help="Wait until it has left; --no-wait: return when the drain begins.")] = (
        True
    )
    wait_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        flag(
            help=f"Most seconds to wait until it has left; unset: {LEAVE_TIMEOUT:g} more than --timeout, "
            f"{WAIT_TIMEOUT:g} without one."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.rank is None:
            raise ValueError("give the RANK of an instance (lockstep status lists them)")
        if not self.wait and self.wait_timeout is not None:
            raise ValueError("--no-wait waits for nothing: drop it, or --wait-timeout")

    @property
    def patience(self) -> float:
        """Most seconds to wait for the drain."""
        if self.wait_timeout is not None:
            return self.wait_timeout
        return WAIT_TIMEOUT if self.timeout is None else self.timeout + LEAVE_TIMEOUT


class ScaleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scale."""

    mesh: MeshAddressConfig = MeshAddressConfig()
    size: Annotated[Count | None, flag(positional=True, help="Total number of instances in the mesh.")] = None
    force: Annotated[bool, flag(help="Drain instances even if none serves then.")] = False
    wait: Annotated[
        bool, flag(help="Wait for the number of instances; --no-wait: return when starts and drains begin.")
    ] = True
    timeout: Annotated[float, Meta(gt=0), flag(help="Most seconds to wait for the number of instances.")] = (
        WAIT_TIMEOUT
    )

    def __post_init__(self) -> None:
        if self.size is None:
            raise ValueError("give the number of instances that the mesh is to have in all")


class RoleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Role."""

    mesh: MeshAddressConfig = MeshAddressConfig()
    rank: Annotated[
        Natural | None, flag(positional=True, help="Rank of the instance, as in lockstep status.")
    ] = None
    role: Annotated[
        Literal["prefill", "decode", "mixed"] | None,
        flag(positional=True, help="prefill: long prompts; decode: all but these; mixed: both."),
    ] = None

    def __post_init__(self) -> None:
        if self.rank is None or self.role is None:
            raise ValueError("give the RANK of an instance and its role: prefill, decode or mixed")


def main_drain(argv: list[str] | None = None) -> int:
    config = parse(
        DrainConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep drain",
        description="Have an instance finish its requests, or move them, and leave the mesh.",
        shares_file=True,
    )
    assert config.rank is not None
    wish = Drain(command=uuid.uuid4().hex, rank=config.rank, timeout=config.timeout, force=config.force)
    return asyncio.run(_carry_out("drain", config.mesh, wish, config.wait, config.patience))


def main_scale(argv: list[str] | None = None) -> int:
    config = parse(
        ScaleConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep scale",
        description="Bring a mesh to a number of instances; its serve command starts or drains its own ones.",
        shares_file=True,
    )
    assert config.size is not None
    wish = Scale(command=uuid.uuid4().hex, size=config.size, force=config.force)
    return asyncio.run(_carry_out("scale", config.mesh, wish, config.wait, config.timeout))


def main_role(argv: list[str] | None = None) -> int:
    config = parse(
        RoleConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep role",
        description="Have an instance preferred for long prompts, for all else, or for both.",
        shares_file=True,
    )
    assert config.rank is not None
    assert config.role is not None
    wish = SetRole(command=uuid.uuid4().hex, rank=config.rank, role=Role(config.role))
    return asyncio.run(_carry_out("role", config.mesh, wish, False, ASK_TIMEOUT))


async def _carry_out(
    name: str, mesh: MeshAddressConfig, wish: Drain | Scale | SetRole, wait: bool, timeout: float
) -> int:
    """Send the command, print the answer, and wait for the result.

    A role counts from the moment of the answer.
    """
    endpoint = mesh.coordinator_endpoint
    keys = process.mesh_keys(mesh, f"lockstep {name}")
    began = time.monotonic()
    try:
        before = await find_view(endpoint, ASK_TIMEOUT, keys)
        answer = await ask(endpoint, wish, ASK_TIMEOUT, keys)
    except (KeyRefused, OtherProtocol) as error:
        _fail(name, str(error))
        return process.EXIT_REFUSED
    except TimeoutError:
        return _fail(name, f"no answer from a coordinator at {endpoint}: is it running? see -dpa and -dpp")
    if answer.status != ACCEPTED:
        return _fail(name, answer.text)
    print(answer.text, flush=True)
    if isinstance(wish, SetRole):
        return 0
    done = _is_gone(before, wish.rank) if isinstance(wish, Drain) else partial(has_size, size=wish.size)
    while wait:
        try:
            view = await fetch_view(endpoint, ASK_TIMEOUT, keys)
            if isinstance(wish, Scale) and not done(view):
                answer = await ask(endpoint, wish, ASK_TIMEOUT, keys)
        except (KeyRefused, OtherProtocol) as error:  # of another coordinator at this address
            _fail(name, str(error))
            return process.EXIT_REFUSED
        except TimeoutError:
            return _fail(
                name, f"the coordinator at {endpoint} is away; lockstep status tells when it is back"
            )
        took = time.monotonic() - began
        if done(view):
            print(f"done after {took:.1f} s: {_ranks(view.members)}")
            break
        if answer.status == FAILED:
            return _fail(name, f"not done after {took:.1f} s: {answer.text}")
        if took > timeout:
            stays = (
                _why_it_stays(before, view, wish.rank) if isinstance(wish, Drain) else _ranks(view.members)
            )
            return _fail(name, f"not done after {took:.1f} s: {stays}")
        await asyncio.sleep(LOOK_INTERVAL)
    return 0


def _is_gone(before: View, rank: int) -> Callable[[View], bool]:
    """A check of views for whether an instance has left the mesh.

    One that is missing in the first views of a restarted coordinator need not be gone.
    """
    return lambda view: view.complete and _still(before, view, rank) is None


def _still(before: View, view: View, rank: int) -> Member | None:
    """Newest state of a rank's former holder; the rank may have another by now."""
    names = {member.instance for member in before.members if member.rank == rank}
    return next((member for member in view.members if member.instance in names), None)


def _why_it_stays(before: View, view: View, rank: int) -> str:
    """Why a draining instance is not gone yet, and what helps."""
    member = _still(before, view, rank)
    if member is None and not view.complete:
        return f"the coordinator was started again and has not heard of instance {rank} yet, if it is there"
    if member is None:
        return f"instance {rank} is gone by now"
    load, state = member.load, member.state
    what = f"instance {rank} is {state}, {load.running} requests run and {load.waiting} wait there"
    if load.stalled_for > STALLED:
        return (
            f"{what}, and no step has ended for {load.stalled_for:.0f} s. If it hangs, it ends after its "
            f"--execute-model-timeout; to end it now: kill -9 {member.pid} on {member.host}"
        )
    if load.running + load.waiting:
        return (
            f"{what}. It goes on with them: give more time with --wait-timeout, or have them move to the "
            f"others at once: lockstep drain {rank} --timeout 0"
        )
    place = f"process {member.pid} on {member.host}"
    return f"{what}. It goes on leaving; its log says what it waits for ({place})"


def _ranks(members: list[Member]) -> str:
    return ", ".join(f"instance {member.rank} {member.state}" for member in members) or "no instance is left"


def _fail(name: str, problem: str) -> int:
    print(f"lockstep {name}: error: {problem}", file=sys.stderr)
    return process.EXIT_FAILED
