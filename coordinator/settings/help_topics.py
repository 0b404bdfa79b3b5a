"""Selection of flags and groups for ``--help=TOPIC``, with vLLM's group names, too.

A topic is ``all``, ``page`` (all of it in a pager), ``listgroup``, a group of flags by the name of its config
or its title, or any part of flags' names. :mod:`coordinator.settings.command_line` is the only caller.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence

Group = argparse._ArgumentGroup

HINT = (
    "--help=listgroup lists the groups of flags, --help=GROUP and --help=FLAG show one of them, and "
    "--help=page shows all in a pager."
)
VLLM_GROUPS: Mapping[str, tuple[str, ...]] = {
    "frontend": ("HttpConfig", "ServeConfig"),
    "parallelconfig": ("MeshConfig", "DeviceConfig", "NodesConfig"),
    "loadconfig": ("ModelConfig",),
    "speculativeconfig": ("SchedulerConfig",),
}
"""Groups that vLLM has and Lockstep has under other names, in lower case."""


def listed(groups: Mapping[str, Group]) -> str:
    """Help text that lists all flag groups by name, with their titles."""
    width = max(map(len, groups), default=0)
    lines = [f"  {name:<{width}}  {group.title}" for name, group in groups.items()]
    return "\n".join(["Groups of flags, for --help=GROUP:", *lines]) + "\n"


def groups_of(topic: str, groups: Mapping[str, Group]) -> list[Group]:
    """The groups that a topic names; none if it names a flag, or nothing."""
    wanted = _plain(topic)
    names = VLLM_GROUPS.get(wanted, ())
    if found := [groups[name] for name in names if name in groups]:
        return found
    return [
        group
        for name, group in groups.items()
        if wanted in (_plain(name), _plain(name).removesuffix("config"), _plain(group.title or ""))
    ]


def actions_of(topic: str, actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    """Flags with this name; else those whose name contains it."""
    shown = [action for action in actions if action.help is not argparse.SUPPRESS]
    wanted = topic.strip().lower().replace("_", "-").lstrip("-")
    exact = [action for action in shown if wanted in (name.lstrip("-") for name in _names(action))]
    return exact or [action for action in shown if wanted and any(wanted in name for name in _names(action))]


def text_of(
    formatter: argparse.HelpFormatter, sections: Iterable[tuple[str, Sequence[argparse.Action]]]
) -> str:
    """Format help sections: each a title, and the help of its flags."""
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _names(action: argparse.Action) -> Sequence[str]:
    return action.option_strings or [action.dest.lower().replace("_", "-")]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "").replace("-", "")
