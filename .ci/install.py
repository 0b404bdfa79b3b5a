"""Install this project and its dev extra for the Python that runs it: ``.venv/bin/python .ci/install.py``.

uv takes a tenth of pip's time, but reads none of pip's settings. They are handed to it by its own names.
Where pip has one that this file does not know, or uv fails, pip installs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable

WANTED = ["-c", "constraints.txt", "-e", ".[dev]"]
BY_TURNS = [
    ["-c", "constraints.txt", "-r", "pyproject.toml", "--extra", "dev"],
    ["-c", "constraints.txt", "--no-deps", "-e", "."],
]
"""The same for uv, which installs in any order.

Ray has a script ``serve``, too, and the last one written stays.
"""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
UV = [sys.executable, "-m", "uv"]

SECTIONS = ("global", "install", ":env:")
"""Sections of pip's settings that concern an installation. Later ones win."""
FLAGS = {
    "constraint": "--constraints",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "index-url": "--default-index",
    "trusted-host": "--allow-insecure-host",
}
"""Setting of pip -> what uv calls it, once for each value."""
VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
"""Setting of pip -> the environment variable of uv."""
NO_MATTER = {
    "break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir",
    "no-color", "no-input", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv",
    "retries", "root-user-action",
}  # fmt: skip
"""Settings that do not change what is installed."""
LIKE_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1"}
"""The best version of all indexes, and the system's certificates."""
LOADED = "import torch, transformers, transformers.modeling_utils, engine.__main__, router.launcher.serve"
"""uv compiles nothing, and who starts a mesh later may not be allowed to write beside the packages."""


def settings_of(listed: Iterable[str]) -> dict[str, str]:
    """pip's settings for an installation, from what ``pip config list`` prints."""
    settings: dict[str, str] = {}
    lines = list(listed)
    for section in SECTIONS:
        for line in lines:
            key, _, value = line.partition("=")
            place, _, name = key.rpartition(".")
            if place == section and name not in NO_MATTER:
                settings[name] = ast.literal_eval(value)
    return settings


def for_uv(settings: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """Flags and variables for uv; None if a setting of pip's is not known here."""
    flags: list[str] = []
    variables = dict(LIKE_PIP)
    for name, value in settings.items():
        if name in FLAGS:
            flags += [part for each in value.split() for part in (FLAGS[name], each)]
        elif name in VARIABLES:
            variables[VARIABLES[name]] = value
        elif name == "no-index":
            flags += ["--no-index"] * (value.lower() in ("1", "true", "yes", "on"))
        else:
            return None
    return flags, variables


def install_with_uv(by_turns: list[list[str]]) -> bool:
    """Whether uv has installed everything."""
    listed = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True).stdout
    given = for_uv(settings_of(listed.splitlines()))
    if given is None:
        return False
    if subprocess.run([*PIP, "install", "--quiet", "-c", "constraints.txt", "uv"], check=False).returncode:
        return False
    flags, variables = given
    command = [*UV, "pip", "install", "--quiet", "--python", sys.executable, *flags]
    environment = {**os.environ, **variables}
    return all(
        subprocess.run([*command, *wanted], env=environment, check=False).returncode == 0
        for wanted in by_turns
    )


def main() -> None:
    if install_with_uv(BY_TURNS):
        writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run([sys.executable, "-c", LOADED], env=writing, check=True)
    else:
        print(
            ".ci/install.py: uv cannot do it with these settings: pip installs, in about a minute", flush=True
        )
        subprocess.run([*PIP, "install", "--quiet", *WANTED], check=True)


if __name__ == "__main__":
    main()
