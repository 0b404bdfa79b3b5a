"""The name and the version under which Lockstep is installed.

On PyPI ``lockstep`` is another project; commands and imports keep that name.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lockstep-mesh"
NOT_INSTALLED = "not installed"


def install_extra(name: str) -> str:
    """The command that installs an extra, of a wheel as of a clone."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


def installed_version(package: str = DISTRIBUTION) -> str:
    """The version of a distribution here, :data:`NOT_INSTALLED` if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED
