"""Messages as bytes: every decoder fuzzed; other versions are named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.messages import FromCoordinator, Register, ToCoordinator
from coordinator.rpc.codec import PROTOCOL, Decoder, Malformed, OtherProtocol, encode
from engine.messages import Abort, Attach, Submit, ToInstance, ToRouter
from engine.sampling import SamplingParams
from tests.nightly import examples

UNIONS: dict[str, Any] = {
    "to coordinator": ToCoordinator,
    "from coordinator": FromCoordinator,
    "to instance": ToInstance,
    "to router": ToRouter,
}

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def tags_of(union: Any) -> list[str]:
    return [kind.__struct_config__.tag for kind in union.__args__]


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS.keys())
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_decoders_take_any_bytes_without_harm(union: Any, data: st.DataObject) -> None:
    tagged = st.builds(
        lambda tag, fields: msgspec.msgpack.encode({**fields, "type": tag}),
        st.sampled_from(tags_of(union)),
        st.dictionaries(
            st.sampled_from(["instance", "rank", "deltas", "params", "prompt_ids", "view", "peer"]), json_like
        ),
    )
    body = data.draw(st.binary(max_size=200) | tagged | json_like.map(msgspec.msgpack.encode))
    frame = data.draw(st.sampled_from([b"", bytes([PROTOCOL]), b"\x00", b"\xff"])) + body
    try:
        message = Decoder(union).decode(frame)
    except Malformed:
        return
    assert isinstance(message, union)


@settings(max_examples=examples(200), deadline=None)
@given(cut=st.integers(0, 200), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_damaged_messages_are_malformed_or_well_typed(cut: int, at: int, byte: int) -> None:
    frame = bytearray(
        encode(Submit(request=3, request_id="r", prompt_ids=[1, 2], params=SamplingParams(), seed=5))
    )
    frame[at % len(frame)] = byte
    try:
        message = Decoder[ToInstance](ToInstance).decode(bytes(frame[: cut or None]))
    except Malformed:
        return
    assert isinstance(message, Submit | Attach | Abort)


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(Malformed):
        Decoder(ToInstance).decode(bytes([PROTOCOL]) + b"\x91" * 100_000)


def test_another_protocol_is_named() -> None:
    with pytest.raises(OtherProtocol, match=f"protocol version {PROTOCOL + 1}, ours is {PROTOCOL}"):
        Decoder(ToInstance).decode(bytes([PROTOCOL + 1]))


def test_large_numbers_and_unknown_fields_are_refused_where_they_matter() -> None:
    register = {"type": "register", "instance": "i", "rank": "two", "size": None, "settings": None}
    with pytest.raises(Malformed, match="rank"):
        Decoder[Register](ToCoordinator).decode(bytes([PROTOCOL]) + msgspec.msgpack.encode(register))
