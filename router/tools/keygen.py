"""``lockstep keygen``: makes the key of a mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec

from coordinator.process import process
from coordinator.rpc import keys
from coordinator.settings.flags import flag, parse


class KeygenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keygen."""

    file: Annotated[
        str, flag(positional=True, path=True, help="File to write, readable by its owner only.")
    ] = "lockstep.key"
    force: Annotated[bool, flag(help="Replace an existing file.")] = False


def main(argv: list[str] | None = None) -> int:
    config = parse(
        KeygenConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep keygen",
        description="Make the key of a mesh; any process that can read the file can join.",
    )
    path = Path(config.file)
    try:
        keys.write(keys.generate(), path, force=config.force)
    except keys.KeyFileError as error:
        print(f"lockstep keygen: error: {error}", file=sys.stderr)
        return process.EXIT_USAGE
    print(
        f"{path}: a new mesh key. Copy it to every host (scp keeps it private) and give all processes "
        f"--mesh-key-file {path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
