"""Changed tensors of the served model, in a file, as a trainer writes them."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path


def trained(scale: float) -> Path:
    """A file with the first query projection of the served model, scaled.

    It stays: instances that wake up, or join, read it.

    Needs nothing but Python: a bfloat16 is the upper half of a float32.
    """
    found = sorted(Path(os.environ["LOCKSTEP_MODEL_DIR"]).glob("*.safetensors"))
    for source in found:
        data = source.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        names = sorted(name for name in header if name.endswith("0.self_attn.q_proj.weight"))
        if not names:
            continue
        entry = header[names[0]]
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        numbers = _scaled(data[begin:end], entry["dtype"], scale)
        head = json.dumps({names[0]: entry | {"data_offsets": [0, len(numbers)]}}).encode()
        path = Path(tempfile.mkdtemp(prefix="trained-"), "part.safetensors")
        path.write_bytes(struct.pack("<Q", len(head)) + head + numbers)
        return path
    raise AssertionError(f"{found} have no such projection")


def _scaled(data: bytes, kind: str, scale: float) -> bytes:
    if kind == "F32":
        count = len(data) // 4
        return struct.pack(f"<{count}f", *(scale * each for each in struct.unpack(f"<{count}f", data)))
    assert kind == "BF16", kind
    wide = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    scaled = _scaled(wide, "F32", scale)
    return b"".join(scaled[at + 2 : at + 4] for at in range(0, len(scaled), 4))
