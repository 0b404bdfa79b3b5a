"""Canonical form of JSON values, as RFC 8785 (JCS) has it (pure).

Programs that pass JSON on change its layout, the order of fields and the way in which numbers are written.
The canonical form does not change with these, so digests and signatures are of it.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_EXACT = 2**53
"""Largest integer that each program keeps; larger ones are written as the nearest double."""


def canonical(value: Any) -> bytes:
    """A JSON value in canonical form.

    Raises:
        ValueError: it has a number that is not finite, or a lone surrogate.
    """
    return _text(value).encode()


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    names = sorted(value, key=lambda name: name.encode("utf-16-be"))
    return "{" + ",".join(f"{_text(name)}:{_text(value[name])}" for name in names) + "}"


def number(value: float) -> str:
    """A number as ECMAScript writes it: the shortest digits that give the same double."""
    if isinstance(value, int) and abs(value) <= MOST_EXACT:
        return str(value)
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    if value == 0:
        return "0"
    sign = "-" * (value < 0)
    mantissa, _, exponent = f"{abs(value)!r}e0".partition("e")
    whole, _, fraction = mantissa.partition(".")
    power = int(exponent.removesuffix("e0")) + len(whole)
    digits = (whole + fraction).lstrip("0")
    power -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")
    if len(digits) <= power <= 21:
        return sign + digits.ljust(power, "0")
    if 0 < power <= 21:
        return f"{sign}{digits[:power]}.{digits[power:]}"
    if -6 < power <= 0:
        return f"{sign}0.{'0' * -power}{digits}"
    head = digits[0] + ("." + digits[1:]) * (len(digits) > 1)
    return f"{sign}{head}e{'+' * (power > 0)}{power - 1}"
