"""Reader of the YAML settings file of ``--config``, which keeps texts as written.

Knows of a setting no more than whether it is text.

:mod:`coordinator.settings.flags`, the only caller, loads this only where there is a file: PyYAML takes a
tenth of a coordinator's start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import yaml

from coordinator.settings.errors import FlagError

NULL = "tag:yaml.org,2002:null"


def read_settings(file: str, is_text: Callable[[str], bool]) -> dict[str, Any]:
    """Read a YAML settings file; names and text values stay as written.

    Those that are text are taken as written, too: to YAML 0123 is 83, 1.10 is 1.1, ``no`` is false and
    2024-01-02 a day.

    Raises:
        FlagError: it cannot be read, or holds no settings.
    """
    try:
        with open(os.path.expanduser(file), encoding="utf-8") as opened:
            loader = yaml.SafeLoader(opened.read())
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            loader.flatten_mapping(root)
            return {
                str(name.value): _written(loader, node)
                if is_text(str(name.value))
                else loader.construct_object(node, deep=True)
                for name, node in root.value
            }
    except OSError as error:
        raise FlagError(f"--config {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # also text that is none, and days that no month has
        raise FlagError(f"--config {file} is not valid YAML: {error}") from error
    raise FlagError(f"--config {file} must hold settings as 'name: value' lines")


def _written(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Text or list of texts as written; other nodes as YAML converts them."""

    def of_one(node: yaml.Node) -> Any:
        is_text = isinstance(node, yaml.ScalarNode) and node.tag != NULL
        return node.value if is_text else loader.construct_object(node, deep=True)

    return [of_one(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else of_one(node)
