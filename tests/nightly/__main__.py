"""Runner of the night's parts: ``python -m tests.nightly [PART ...] [--minutes N] [--status]``.

All parts run if none is named. Every test runs at full size (``LOCKSTEP_NIGHTLY=1``). A part that takes longer
than 25 minutes is ended and has failed (``--minutes``, for a machine that does other work as well). A part that
passes on a checkout without changes goes to ``passed.json``, which is committed; ``--status`` compares it with
the history. The status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time

from tests.nightly.parts import ROOT, Part, command_line, commands_of, read_parts, value_of
from tests.nightly.passes import Pass, git, read_passes, status, write_pass

LIMIT = 25.0
"""Minutes that one part may take on two cores of its own."""


def run_command(command: list[str], environment: dict[str, str], deadline: float) -> bool:
    """Whether a command ends with status 0 before the deadline.

    At the deadline it is ended, and what it started.
    """
    print("+", *command, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(max(deadline - time.monotonic(), 1)) == 0
    except subprocess.TimeoutExpired:
        print("+ ended: the part has taken its minutes; cut it into two", flush=True)
        return False
    finally:
        if process.poll() is None:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children by SIGINT, after 20 seconds by SIGKILL.

    SIGINT is what Ctrl-C sends: tests end their meshes then.
    """
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_part(part: Part, parts: dict[str, Part], minutes: float) -> bool:
    """Whether all commands of a part pass in time."""
    deadline = time.monotonic() + 60 * minutes
    environment = os.environ | {"LOCKSTEP_NIGHTLY": "1"}
    for each in part.prepare:
        run_command(command_line(each), environment, deadline)
    environment |= {name: value_of(text) for name, text in part.environment.items()}
    return all(run_command(each, environment, deadline) for each in commands_of(part, parts))


def machine() -> str:
    """The processor's name, and how many cores this process may use."""
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown CPU'}, {len(os.sched_getaffinity(0))} cores"


def main(arguments: list[str] | None = None) -> int:
    parts = read_parts()
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--status", action="store_true", help="what has not run since which change")
    parser.add_argument("--minutes", type=float, default=LIMIT, help="limit of a part (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in parts:
            parser.error(f"there is no part {name!r}; there are {', '.join(parts)}")
    if options.status:
        print("\n".join(status(parts, read_passes())))
        return 0
    failed = []
    for name in options.parts or parts:
        commit, changed = (
            git("rev-parse", "HEAD"),
            git("status", "--porcelain", "--", ".", ":!tests/nightly/passed.json"),
        )
        began = time.monotonic()
        passed = run_part(parts[name], parts, options.minutes)
        took = round(time.monotonic() - began)
        print(f"{'passed' if passed else 'FAILED'} {name} in {took} s", flush=True)
        if not passed:
            failed.append(name)
        elif commit and not changed:
            write_pass(name, Pass(commit, datetime.date.today().isoformat(), took, machine()))
        else:
            print(f"not recorded: {'the checkout has changes' if commit else 'no git checkout'}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
