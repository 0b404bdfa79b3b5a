"""The pages of all limits, made from the constants and flags that set them.

``python -m tests.docs.limits`` writes ``docs/run/limits.md`` (flags, settings, commands), ``limits-router.md``,
``limits-mesh.md`` (engine) and ``limits-groups.md`` (coordinator, parallel).
Modules are parsed, not imported, so torch stays out.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from coordinator.settings.flags import Field, fields_of
from router.config import ServeConfig

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "run"
PACKAGES = ("router", "engine", "coordinator", "parallel")
APART = (
    *(f"engine/{room}/" for room in ("attention", "compute", "kernels", "model", "probe", "speculation")),
    *(f"router/{room}/" for room in ("text", "tools/bench", "tools/doctor", "turns/tool_parsers")),
    "router/turns/harmony.py",
    "parallel/measure.py",
    "coordinator/settings/",
)
"""Modules whose constants are sizes of computations: no operator meets them."""
COMMANDS = (
    "router/launcher/",
    "router/offline/",
    "router/tools/",
    "router/stored/",
    "router/batches/",
    "router/images/",
    "router/pooled/",
    "engine/config/",
)
"""Rooms on the page of flags: settings, and what the commands start."""
INNER = re.compile(
    r"^(_|LOOK|POLL|RECONNECT_INTERVAL|MAX_ERROR|MAX_NAMED$|MOST_AT_ONCE|MOST_PLANS|MOST_COMPARED|MOST$)|COMPARED$"
)
"""Names of constants that only pace a loop, or bound a message's length."""

BOUND = re.compile(
    r"^(MAX|MOST|LARGEST|LONGEST)(_|$)|_(TIMEOUT|INTERVAL|SECONDS|MS|PATIENCE|AFTER|TRIES|GRACE)$"
    r"|^(TIMEOUT|INTERVAL|SILENCE|PATIENCE|FLUSH_MS|TICK|HEAVY|VERY_HEAVY|IDLE|OPEN_FILES|EARLY_STEPS"
    r"|FAREWELL|TAIL_DIVISOR|KEPT_FILES|REMEMBERED_ANSWERS|PROMPT_LOGPROBS_CHUNK|[CG]PU_TOKENS|UNREAD"
    r"|(STACK|CACHED|VIEW|ARENA)_BYTES|IDLE_WAIT|DRAIN_FACTOR|COORDINATOR_FIRST|CPU_KV_SHARE|CPU_KV_LIMIT|LAST_WORDS|QUEUED_PER_RUNNING|QUICKLY_STEADY|RETRY_AFTER)$"
)
"""Names of constants that bound something."""
FLAG = re.compile(r"^--(max-|.*timeout|.*-limit|timeout-)")
"""Names of flags that do."""
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: lambda a, b: int(a) << int(b),
}

MADE = """\
This page is made from the code: `python -m tests.docs.limits` writes it, and a test compares the two.
The names in the tables are `module.CONSTANT`, the headings are folders.
"""
COMMANDS_HEAD = f"""\
# Limits

For operators who look up a bound by its name: each wait, queue and size. This page has those of flags and settings, of `serve`, `LLM` and the tools.
[limits-router.md](limits-router.md) has the router's, [limits-mesh.md](limits-mesh.md) those of instances, and
[limits-groups.md](limits-groups.md) those of the coordinator, communicators and links. {MADE}
[operations.md](operations.md#limits) explains what a client notices at the most important ones;
[bounds.md](../design/bounds.md) lists bounds by what they protect, with what happens beyond them.
"""
ROUTER_HEAD = f"""\
# Limits of the router

For operators: each wait, queue and size that a router bounds. [limits.md](limits.md) lists the other pages. {MADE}"""
MESH_HEAD = f"""\
# Limits inside the mesh

For operators: each wait, queue and size that instances bound. [limits.md](limits.md) lists the other pages. {MADE}"""
GROUPS_HEAD = f"""\
# Limits of the coordinator and of groups

For operators: each wait, queue and size of the coordinator, communicators and links between hosts.
[limits.md](limits.md) lists the other pages. {MADE}"""


class Limit(NamedTuple):
    """One constant that bounds something."""

    module: str
    name: str
    value: float
    meaning: str


def value_of(node: ast.expr, known: dict[str, float]) -> float | None:
    """The number that an expression gives; None for other values.

    ``known`` has the constants before it.
    """
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(name):
            return known.get(name)
        case ast.BinOp(left, op, right):
            a, b = value_of(left, known), value_of(right, known)
            compute = OPERATORS.get(type(op))
            return None if a is None or b is None or compute is None else compute(a, b)
    return None


def meaning_of(name: str, line: str, after: ast.stmt | None) -> str:
    """The docstring behind an assignment, or the comment on its line.

    Without both, the name in words.
    """
    match after:
        case ast.Expr(ast.Constant(str(text))):
            return text
    _, _, comment = line.partition("  # ")
    return comment or name.replace("_", " ").capitalize() + "."


def constants(source: str) -> Iterator[tuple[str, float, str]]:
    """Name, value and meaning of each module constant that is a number.

    A statement may assign several.
    """
    known: dict[str, float] = {}
    lines, body = source.splitlines(), ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.Assign([target], value) | ast.AnnAssign(target, _, value) if value is not None:
                pass
            case _:
                continue
        match target, value:
            case ast.Tuple(names), ast.Tuple(values):
                pairs = list(zip(names, values, strict=False))
            case _:
                pairs = [(target, value)]
        for name, each in pairs:
            number = value_of(each, known)
            if isinstance(name, ast.Name) and name.id.isupper() and number is not None:
                known[name.id] = number
                yield name.id, number, meaning_of(name.id, lines[name.lineno - 1], after)


def rules(source: str, name: str) -> Iterator[tuple[str, float, str]]:
    """Name, default and meaning of each numeric field of a struct."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                match field:
                    case ast.AnnAssign(ast.Name(each), _, ast.Constant(int() | float() as value)) if not (
                        isinstance(value, bool)
                    ):
                        yield f"{name}.{each}", value, meaning_of(each, "", after)


@cache
def limits() -> list[Limit]:
    """All bounds, by room and module."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = path.relative_to(ROOT).as_posix()
            if not module.startswith(APART):
                for name, value, meaning in constants(path.read_text()):
                    if BOUND.search(name) and not INNER.search(name):
                        found.append(Limit(module, name, value, meaning))
    module = "coordinator/membership/records.py"
    found += [Limit(module, *each) for each in rules((ROOT / module).read_text(), "Rules")]
    return sorted(
        found, key=lambda limit: (PACKAGES.index(limit.module.split("/")[0]), room(limit), limit.module)
    )


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line that a table can hold."""
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.][.]) ", line)[0].replace("|", "\\|").replace("``", "`")


def shown(limit: Limit) -> str:
    """The value as a person writes it: sizes in binary units, thousands apart."""
    value, text = limit.value, limit.meaning.lower()
    if (
        isinstance(value, int)
        and value >= 1024
        and ("BYTES" in limit.name or limit.name == "CPU_KV_LIMIT" or "bytes" in re.findall(r"\w+", text)[:6])
    ):
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    number = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if limit.name.endswith("_MS"):
        return f"{number} ms"
    timed = ("seconds", "timeout", "interval", "grace", "reach_patience", "steady_after")
    seconds = limit.name.lower().endswith(timed) or re.search(r"(?<!each )\bseconds?\b", text)
    return f"{number} s" if seconds else number


def room(limit: Limit) -> str:
    return limit.module.rpartition("/")[0]


def flags() -> Iterator[Field]:
    """The flags of ``serve`` that bound something by a number."""
    for field in fields_of(ServeConfig):
        if FLAG.search(field.long_name) and field.kind in (int, float):
            yield field


def default(field: Field) -> str:
    if field.default is None or field.default is msgspec.NODEFAULT:
        return "unset"
    return f"{field.default:,}" if isinstance(field.default, int) else f"{field.default:g}"


def tables(packages: tuple[str, ...], but: tuple[str, ...] = ()) -> Iterator[str]:
    """A heading and a table for each room of some packages, except ``but``."""
    named = (limit for limit in limits() if limit.module.startswith(packages))
    wanted = (limit for limit in named if not limit.module.startswith(but))
    for name, group in groupby(wanted, room):
        yield f"\n## {name}/\n\n| constant | value | meaning |\n|---|---|---|"
        for each in group:
            yield f"| `{Path(each.module).stem}.{each.name}` | {shown(each)} | {first_sentence(each.meaning)} |"


@cache
def pages() -> dict[Path, str]:
    """The text of each page."""
    lines = [COMMANDS_HEAD, "## Flags of `serve`\n", "| flag | default | meaning |", "|---|---|---|"]
    lines += [f"| `{each.long_name}` | {default(each)} | {first_sentence(each.help)} |" for each in flags()]
    texts = {
        "limits.md": [*lines, *tables(COMMANDS)],
        "limits-router.md": [ROUTER_HEAD, *tables(("router/",), COMMANDS)],
        "limits-mesh.md": [MESH_HEAD, *tables(("engine/",), COMMANDS)],
        "limits-groups.md": [GROUPS_HEAD, *tables(("coordinator/", "parallel/"))],
    }
    return {FOLDER / name: "\n".join(text) + "\n" for name, text in texts.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
