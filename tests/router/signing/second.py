"""A second implementation of signed capsules: plain Python, by docs/use/capsules.md alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
Point = tuple[int, int]


def ecmascript(number: float) -> str:
    """A number as JavaScript's ``String`` writes it."""
    text = repr(float(number))
    if number == int(number) and abs(number) < 1e21:
        digits, _, power = text.partition("e+")
        whole, _, fraction = digits.partition(".")
        return whole + fraction.ljust(int(power), "0") if power else str(int(number))
    if 1e-6 <= abs(number) < 1e-4:
        digits = re.sub(r"e-.*|\.|-", "", text)
        return f"{'-' * (number < 0)}0.{'0' * (int(text.partition('e-')[2]) - 1)}{digits}"
    return re.sub(r"\.0(?=e|$)", "", re.sub(r"e([+-])0", r"e\1", text))


def canonical(value: Any) -> str:
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(name)}:{canonical(each)}" for name, each in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ecmascript(value)
    return json.dumps(value, ensure_ascii=False)


def added(one: Point, two: Point) -> Point:
    (a, b), (c, d) = one, two
    k = D * a * b * c * d
    return (a * d + b * c) * pow(1 + k, P - 2, P) % P, (b * d + a * c) * pow(1 - k, P - 2, P) % P


def times(count: int, point: Point) -> Point:
    found = (0, 1)
    for bit in f"{count:b}":
        found = added(found, found)
        found = added(found, point) if bit == "1" else found
    return found


def point_of(data: bytes) -> Point:
    number = int.from_bytes(data, "little")
    y, sign = number % 2**255, number >> 255
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if x * x % P == square else x * pow(2, (P - 1) // 4, P) % P
    assert x * x % P == square
    return (x if x % 2 == sign else P - x), y


def is_signed(capsule: dict[str, Any], x: str) -> bool:
    """Whether a capsule has its digest, and the signature of a public key."""
    key, value = (base64.urlsafe_b64decode(t + "==") for t in (x, capsule["signature"]["value"]))
    rest = {name: each for name, each in capsule.items() if name not in ("signature", "digest")}
    digest = "sha256:" + hashlib.sha256(canonical(rest).encode()).hexdigest()
    message = canonical(rest | {"digest": capsule["digest"]}).encode()
    hashed = int.from_bytes(hashlib.sha512(value[:32] + key + message).digest(), "little") % ORDER
    base = point_of((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))
    left = times(int.from_bytes(value[32:], "little"), base)
    return digest == capsule["digest"] and left == added(point_of(value[:32]), times(hashed, point_of(key)))
