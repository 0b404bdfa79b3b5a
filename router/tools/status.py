"""Command ``lockstep status``: the instances of a mesh as a table."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from coordinator.commands import find_view
from coordinator.config import MeshAddressConfig
from coordinator.member_connection import fetch_view
from coordinator.messages import ExpertBalance, Member, Role, View
from coordinator.process import process
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.settings.flags import flag, parse

MOST_EXPERTS = 4
"""Busiest experts that are listed."""
MIN_WIDTH = 124
"""Columns that the table needs; a pipe reports 80."""


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Status."""

    mesh: MeshAddressConfig = MeshAddressConfig()
    json: Annotated[bool, flag(help="Print JSON instead of a table.")] = False
    watch: Annotated[bool, flag("-w", help="Refresh the table until Ctrl-C.")] = False
    interval: Annotated[
        float, msgspec.Meta(ge=0.1), flag(help="Seconds between two refreshes with --watch.")
    ] = 1.0
    timeout: Annotated[float, msgspec.Meta(gt=0), flag(help="Seconds to wait for the coordinator.")] = 5.0


def main(argv: list[str] | None = None) -> int:
    config = parse(
        StatusConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep status",
        description="Show the instances of a mesh as its coordinator knows them.",
        shares_file=True,
    )
    if config.watch and config.json:
        print("lockstep status: error: --json is for one look: leave out --watch", file=sys.stderr)
        return process.EXIT_USAGE
    endpoint = config.mesh.coordinator_endpoint
    keys = process.mesh_keys(config.mesh, "lockstep status")
    try:
        view = asyncio.run(find_view(endpoint, config.timeout, keys))
    except (KeyRefused, OtherProtocol) as error:
        print(f"lockstep status: {error}", file=sys.stderr)
        return process.EXIT_REFUSED
    except TimeoutError:
        print(
            f"lockstep status: no coordinator answers at {endpoint}: is it running? see -dpa and -dpp",
            file=sys.stderr,
        )
        return process.EXIT_FAILED
    if config.watch:
        return _watch(endpoint, view, config, keys)
    if config.json:
        print(msgspec.json.format(msgspec.json.encode(view), indent=2).decode())
    else:
        _console().print(as_table(view))
    return 0


def _console() -> Console:
    """A console that prints texts unchanged.

    An address like [fd00::a:1] is no markup, and no emoji either.
    """
    return Console(width=max(Console().width, MIN_WIDTH), markup=False, emoji=False)


def _watch(endpoint: str, view: View, config: StatusConfig, keys: MeshKeys | None) -> int:
    """Show the table, and keep it up to date.

    Says so while the coordinator is away, and goes on when it is back.
    """
    console = _console()
    silent_since: float | None = None
    try:
        with Live(as_table(view), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(config.interval)
                try:
                    view, silent_since = asyncio.run(fetch_view(endpoint, config.timeout, keys)), None
                except TimeoutError:
                    silent_since = silent_since or time.monotonic() - config.timeout
                shown = as_table(view)
                if silent_since is not None:
                    shown.caption = (
                        f"the coordinator has been silent for {time.monotonic() - silent_since:.0f} s"
                    )
                live.update(shown, refresh=True)
    except (KeyRefused, OtherProtocol) as error:  # of another coordinator at this address
        print(f"lockstep status: {error}", file=sys.stderr)
        return process.EXIT_REFUSED
    except KeyboardInterrupt:
        return 0


def as_table(view: View) -> Table:
    """Table with one row per instance."""
    model = view.settings.served_model_name[0] if view.settings else "no model yet"
    missing = f"; waiting for {view.waiting_for}" if view.waiting_for else ""
    count = len(view.members)
    title = f"{model}: epoch {view.epoch}, {count} instance{'s' * (count != 1)}{missing}"
    lines = [_balance(view.balance)] if view.balance is not None else []
    table = Table(title=title, caption="\n".join([*lines, *_checks(view)]) or None)
    experts = ("experts",) if view.balance is not None else ()
    has_roles = any(member.role is not Role.MIXED for member in view.members)
    roles = ("role",) if has_roles else ()
    for name in (
        "rank", "state", *roles, "epoch", "load", *experts, "KV use", "tokens/s", "numerics", "address",
    ):  # fmt: skip
        table.add_column(
            name,
            justify="left" if name in ("state", "role", "load", "numerics", "address") else "right",
            no_wrap=True,
        )
    for member in view.members:
        table.add_row(*_row(member, view.epoch, view.balance, has_roles=has_roles))
    return table


def _balance(balance: ExpertBalance) -> str:
    """How the load of experts is balanced, in one line."""
    measured = f"balancedness {balance.balancedness:.2f}" if balance.windows else "loads not counted yet"
    parts = [f"experts: {measured}", f"{balance.changes} changes moved {balance.moves} copies"]
    if balance.failures:
        parts.append(f"{balance.failures} failed")
    if balance.is_failing:
        parts.append("NOT BALANCED lately: see the coordinator's log for the reason")
    if balance.wanted_copies > 1:
        parts.append(f"at least {balance.copies} of {balance.wanted_copies} copies each")
        if balance.most_copies < balance.wanted_copies:
            parts.append("num_redundant_experts or room do not suffice for more")
    if balance.busiest:
        busiest = [
            f"{each.expert} ({each.share:.0%} of rows, on {' '.join(map(str, each.ranks)) or 'none'})"
            for each in balance.busiest[:MOST_EXPERTS]
        ]
        parts.append(f"busiest: {', '.join(busiest)}")
    return "; ".join(parts)


def _checks(view: View) -> list[str]:
    """Line on answers and cached pieces that were checked in 24 hours, if any."""
    answers, pieces = view.answers.checked, sum(member.load.cache_checked for member in view.members)
    wrong = view.answers.wrong + sum(member.load.cache_wrong for member in view.members)
    if not answers + pieces + wrong:
        return []
    found = f"{wrong:,} wrong (24 h)" + (": see the logs" if wrong else "")
    return [f"checked: {answers:,} answers, {pieces:,} cache pieces, {found}"]


def _row(member: Member, epoch: int, balance: ExpertBalance | None, *, has_roles: bool) -> list[str]:
    load = member.load
    state = (
        str(member.state) if member.phase in ("serving", member.state) else f"{member.state}: {member.phase}"
    )
    if load.stalled_for > 5.0:
        state += f" (no step for {load.stalled_for:.0f} s)"
    if member.odd:
        state += f" (odd in {member.odd} shadow check{'s' * (member.odd > 1)})"
    return [
        str(member.rank),
        state,
        *([str(member.role)] if has_roles else []),
        str(epoch),
        f"{load.running} running, {load.waiting} waiting",
        *([] if balance is None else [str(balance.held.get(member.rank, "-"))]),
        f"{load.blocks_used / load.blocks_total:.1%}" if load.blocks_total else "-",
        f"{load.tokens_per_second:.1f}",
        f"{member.numerics.kernels} {member.numerics.fingerprint}" if member.numerics else "-",
        member.address or "-",
    ]


if __name__ == "__main__":
    sys.exit(main())
