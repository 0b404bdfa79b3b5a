"""Reader of R's databases of objects, as far as the novels need it.

It runs no R.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any


class RReader:
    """Reader of R's XDR serialisation: lists, and vectors of strings and numbers."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.references: list[Any] = []
        if self.take(2) != b"X\n":
            raise ValueError("not an XDR serialisation of R")
        version, _writer, _oldest_reader = self.integer(), self.integer(), self.integer()
        if version == 3:
            self.take(self.integer())  # the writer's native encoding
        elif version != 2:
            raise ValueError(f"serialisation version {version} is not supported")

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError("the serialised object ends early")
        self.at += count
        return piece

    def integer(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def item(self) -> Any:
        """One object, as list, dict, str or None.

        A generic vector is a list or dict, an atomic one a list, a string a str or None.
        """
        flags = self.integer() & 0xFFFFFFFF
        kind, has_attributes, has_tag = flags & 0xFF, bool(flags & 0x200), bool(flags & 0x400)
        if kind in (0xFE, 0xFD, 0xFB, 0xF2, 0xF1):  # NULL, the global, missing, empty and base environments
            return None
        if kind == 0xFF:  # a reference to an object seen before
            return self.references[(flags >> 8 or self.integer()) - 1]
        if kind == 1:  # symbol
            self.references.append(self.item())
            return self.references[-1]
        if kind == 2:  # pairlist: only attributes use it here
            pairs: dict[str, Any] = {}
            while kind == 2:
                if has_attributes:
                    self.item()
                name = self.item() if has_tag else ""
                pairs[name] = self.item()
                flags = self.integer() & 0xFFFFFFFF
                kind, has_attributes, has_tag = flags & 0xFF, bool(flags & 0x200), bool(flags & 0x400)
            return pairs
        if kind == 9:  # one string
            length = self.integer()
            if length == -1:
                return None
            raw = self.take(length)
            return raw.decode("latin-1" if flags >> 12 & 0x04 else "utf-8")
        value: list[Any]
        if kind in (10, 13):  # logical, integer
            length = self.integer()
            value = list(struct.unpack(f">{length}i", self.take(4 * length)))
        elif kind == 14:  # double
            length = self.integer()
            value = list(struct.unpack(f">{length}d", self.take(8 * length)))
        elif kind in (16, 19):  # character vector, generic vector
            value = [self.item() for _ in range(self.integer())]
        else:
            raise ValueError(f"R object of kind {kind} is not supported")
        attributes = self.item() if has_attributes else None
        if kind == 19 and attributes and attributes.get("names"):
            return dict(zip(attributes["names"], value, strict=True))
        return value


def read_lazy_database(base: Path) -> dict[str, Any]:
    """All objects of an R lazy-load database (``base``.rdx is the index, ``base``.rdb the data)."""
    index_bytes = base.with_suffix(".rdx").read_bytes()
    gzipped = index_bytes.startswith(b"\x1f\x8b")
    index = RReader(gzip.decompress(index_bytes) if gzipped else zlib.decompress(index_bytes)).item()
    data = base.with_suffix(".rdb").read_bytes()
    objects = {}
    for name, (offset, length) in index["variables"].items():
        chunk = data[offset : offset + length]
        (size,) = struct.unpack(">I", chunk[:4])
        plain = zlib.decompress(chunk[4:])
        if len(plain) != size:
            raise ValueError(f"{name}: {len(plain)} bytes instead of {size}")
        objects[name] = RReader(plain).item()
    return objects
