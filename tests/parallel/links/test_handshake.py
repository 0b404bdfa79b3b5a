"""The handshake of a link, message by message."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest

from parallel.links.handshake import (
    FULL_BYTES,
    LONGEST_PURPOSE,
    Accepting,
    Connecting,
    HandshakeRefused,
    HandshakeVerdict,
    Offer,
    Side,
)
from parallel.links.keys import LinkKey, expand

KEY, OTHER_KEY = LinkKey.derive(b"one"), LinkKey.derive(b"another")
OFFER = Offer("group/epoch/3/all/token", "data/0", 1, 0, 2)


def admit(offer: Offer) -> HandshakeVerdict:
    """As rank 0 of two does in epoch 3."""
    if offer.purpose != OFFER.purpose:
        return HandshakeVerdict.OTHER_PURPOSE
    if offer.size != OFFER.size:
        return HandshakeVerdict.OTHER_SIZE
    return HandshakeVerdict.ACCEPTED if (offer.rank, offer.to) == (1, 0) else HandshakeVerdict.OTHER_RANK


def give(side: Side, content: bytes) -> bytes:
    """Give a side all these bytes, as far as it wants them; returns its answers."""
    answers = b""
    while content and side.wanted:
        piece, content = content[: side.wanted], content[side.wanted :]
        answers += side.feed(piece)
    return answers


def meet(connecting: Connecting, accepting: Accepting) -> list[bytes]:
    """All messages of a handshake."""
    messages = [connecting.hello]
    messages.append(give(accepting, messages[-1]))
    messages.append(give(connecting, messages[-1]))
    messages.append(give(accepting, messages[-1]))
    assert give(connecting, messages[-1]) == b""
    return messages


@pytest.mark.parametrize("key", [KEY, None])
def test_both_sides_agree(key: LinkKey | None) -> None:
    connecting, accepting = Connecting(OFFER, key), Accepting(admit, key)
    meet(connecting, accepting)
    assert connecting.is_done
    assert accepting.is_done
    assert accepting.offer == OFFER
    assert connecting.wanted == accepting.wanted == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (KEY, OTHER_KEY, HandshakeVerdict.WRONG_KEY),
        (KEY, None, HandshakeVerdict.KEY_NEEDED),
        (None, KEY, HandshakeVerdict.NO_KEY_HERE),
    ],
)
def test_another_key_or_none_is_refused_on_both_sides(
    ours: LinkKey | None, theirs: LinkKey | None, verdict: HandshakeVerdict
) -> None:
    connecting, accepting = Connecting(OFFER, theirs), Accepting(admit, ours)
    with pytest.raises(HandshakeRefused) as refused:
        meet(connecting, accepting)
    assert refused.value.verdict is verdict
    with pytest.raises(HandshakeRefused, match="--mesh-key-file") as refused:
        give(connecting, accepting.last_word)
    assert refused.value.verdict is verdict
    assert not connecting.is_done
    assert not accepting.is_done


@pytest.mark.parametrize(
    ("offer", "verdict"),
    [
        (OFFER._replace(purpose="group/epoch/2/all/token"), HandshakeVerdict.OTHER_PURPOSE),
        (OFFER._replace(purpose="meeting"), HandshakeVerdict.OTHER_PURPOSE),
        (OFFER._replace(size=3), HandshakeVerdict.OTHER_SIZE),
        (OFFER._replace(rank=0), HandshakeVerdict.OTHER_RANK),
        (OFFER._replace(to=1), HandshakeVerdict.OTHER_RANK),
        (OFFER._replace(rank=-1), HandshakeVerdict.OTHER_RANK),
    ],
)
def test_a_link_for_something_else_is_refused_after_the_key_is_proven(
    offer: Offer, verdict: HandshakeVerdict
) -> None:
    connecting, accepting = Connecting(offer, KEY), Accepting(admit, KEY)
    with pytest.raises(HandshakeRefused) as refused:
        meet(connecting, accepting)
    assert refused.value.verdict is verdict
    with pytest.raises(HandshakeRefused) as refused:
        give(connecting, accepting.last_word)
    assert refused.value.verdict is verdict
    stranger, accepting = Connecting(offer, OTHER_KEY), Accepting(admit, KEY)
    with pytest.raises(HandshakeRefused) as refused:
        meet(stranger, accepting)
    assert refused.value.verdict is HandshakeVerdict.WRONG_KEY  # and nothing about what there is


def test_a_recording_of_one_side_does_not_get_in() -> None:
    recorded = meet(Connecting(OFFER, KEY), Accepting(admit, KEY))
    accepting = Accepting(admit, KEY)
    give(accepting, recorded[0])
    with pytest.raises(HandshakeRefused) as refused:
        give(accepting, recorded[2])
    assert refused.value.verdict is HandshakeVerdict.WRONG_KEY
    connecting = Connecting(OFFER, KEY)
    give(connecting, recorded[1])
    with pytest.raises(HandshakeRefused, match="another mesh key"):
        give(connecting, recorded[3])


def test_what_a_side_says_proves_nothing_when_it_is_sent_back() -> None:
    """Somebody between two members cannot answer one with what the same one said."""
    connecting, accepting = Connecting(OFFER, KEY), Accepting(admit, KEY)
    answer = give(accepting, connecting.hello)
    proof = give(connecting, answer)
    with pytest.raises(HandshakeRefused):
        give(connecting, bytes([HandshakeVerdict.ACCEPTED]) + proof)
    verdict = give(accepting, proof)
    other = Accepting(admit, KEY)
    give(other, connecting.hello)
    with pytest.raises(HandshakeRefused):
        give(other, verdict[1:])


def test_a_proof_for_another_offer_does_not_count() -> None:
    """What the link is for is part of what is proven."""
    connecting, accepting = Connecting(OFFER._replace(purpose="group/old"), KEY), Accepting(admit, KEY)
    changed = connecting.hello.replace(b"group/old", b"group/new")
    answer = give(accepting, changed)
    with pytest.raises(HandshakeRefused) as refused:
        give(accepting, give(connecting, answer))
    assert refused.value.verdict is HandshakeVerdict.WRONG_KEY


def test_a_changed_verdict_is_noticed() -> None:
    connecting, accepting = Connecting(OFFER._replace(size=9), KEY), Accepting(admit, KEY)
    with pytest.raises(HandshakeRefused):
        meet(connecting, accepting)
    with pytest.raises(HandshakeRefused, match="another mesh key"):
        give(connecting, bytes([HandshakeVerdict.ACCEPTED]) + accepting.last_word[1:])


def test_another_version_is_named() -> None:
    hello = bytearray(Connecting(OFFER, KEY).hello)
    struct.pack_into(">H", hello, 6, 99)
    accepting = Accepting(admit, KEY)
    with pytest.raises(HandshakeRefused) as refused:
        give(accepting, bytes(hello))
    assert refused.value.verdict is HandshakeVerdict.OTHER_VERSION
    with pytest.raises(HandshakeRefused, match="install the same version"):
        give(Connecting(OFFER, KEY), accepting.last_word)


@pytest.mark.parametrize("announced", [0, 1, 2**16 - 1])
def test_a_length_that_cannot_be_is_refused_before_anything_is_kept(announced: int) -> None:
    hello = bytearray(Connecting(OFFER, KEY).hello[:11])
    struct.pack_into(">H", hello, 9, announced)
    with pytest.raises(HandshakeRefused, match="announces"):
        give(Accepting(admit, KEY), bytes(hello))


def test_names_beyond_their_bound_are_refused() -> None:
    hello = bytearray(Connecting(OFFER, KEY).hello)
    struct.pack_into(">H", hello, 11 + 44, LONGEST_PURPOSE + 1)
    with pytest.raises(HandshakeRefused, match="a purpose of 513 bytes"):
        give(Accepting(admit, KEY), bytes(hello))


def test_names_that_are_no_text_are_refused() -> None:
    hello = Connecting(OFFER, KEY).hello.replace(b"token", b"\xff\xfe\xff\xff\xff")
    with pytest.raises(HandshakeRefused, match="no text"):
        give(Accepting(admit, KEY), hello)


def test_messages_may_come_byte_by_byte() -> None:
    connecting, accepting = Connecting(OFFER, KEY), Accepting(admit, KEY)
    sides: list[Side] = [accepting, connecting]
    message = connecting.hello
    while message:
        answers = [sides[0].feed(message[at : at + 1]) for at in range(len(message))]
        assert sum(bool(answer) for answer in answers) <= 1
        message = b"".join(answers)
        sides.reverse()
    assert connecting.is_done
    assert accepting.is_done


def test_first_messages_may_be_larger_than_the_largest_packets() -> None:
    """A network that loses large packets is noticed in the handshake."""
    large = meet(Connecting(OFFER, KEY, is_large=True), Accepting(admit, KEY))
    assert [len(message) for message in large] == [FULL_BYTES, FULL_BYTES, 32, 33]
    small = meet(Connecting(OFFER, KEY), Accepting(admit, KEY))
    assert sum(map(len, small)) < 300


def test_a_side_cut_short_anywhere_is_not_done() -> None:
    whole = meet(Connecting(OFFER, KEY, nonce=bytes(32)), Accepting(admit, KEY, nonce=bytes(32)))
    for cut in range(len(whole[0] + whole[2])):
        accepting = Accepting(admit, KEY, nonce=bytes(32))
        give(accepting, (whole[0] + whole[2])[:cut])
        assert not accepting.is_done
        assert accepting.wanted


def test_a_side_never_reads_what_follows_its_handshake() -> None:
    connecting, accepting = Connecting(OFFER, KEY), Accepting(admit, KEY)
    answer = give(accepting, connecting.hello)
    with pytest.raises(ValueError, match="were wanted"):
        connecting.feed(answer + b"x")
    with pytest.raises(ValueError, match="were wanted"):
        accepting.feed(bytes(33))
    give(connecting, give(accepting, give(connecting, answer)))
    for side in (connecting, accepting):
        with pytest.raises(ValueError, match="0 were wanted"):
            side.feed(b"x")


def test_messages_out_of_their_order_are_refused() -> None:
    hello, answer, proof, verdict = meet(Connecting(OFFER, KEY), Accepting(admit, KEY))
    for first in (answer, proof, verdict):
        accepting = Accepting(admit, KEY)
        with contextlib.suppress(HandshakeRefused):  # the nonce of an answer may look like a length
            give(accepting, first + hello)
        assert not accepting.is_done
    for first in (hello, proof + verdict, verdict + answer):
        with pytest.raises(HandshakeRefused):
            give(Connecting(OFFER, KEY), first)
    accepting = Accepting(admit, KEY)
    give(accepting, hello)
    with pytest.raises(HandshakeRefused):
        give(accepting, hello)


def test_flags_cannot_be_changed_on_the_way() -> None:
    """Nobody between two members keeps them from encrypting without their noticing."""
    connecting = Connecting(OFFER, KEY, can_encrypt=True)
    accepting = Accepting(admit, KEY, can_encrypt=True)
    hello = bytearray(connecting.hello)
    hello[8] &= ~2
    answer = give(accepting, bytes(hello))
    with pytest.raises(HandshakeRefused) as refused:
        give(accepting, give(connecting, answer))
    assert refused.value.verdict is HandshakeVerdict.WRONG_KEY
    connecting, accepting = Connecting(OFFER, KEY, can_encrypt=True), Accepting(admit, KEY, can_encrypt=True)
    answer = bytearray(give(accepting, connecting.hello))
    answer[8] &= ~2
    with pytest.raises(HandshakeRefused):
        give(accepting, give(connecting, bytes(answer)))


def test_a_stranger_that_answers_learns_no_proof_that_serves_it_elsewhere() -> None:
    """It chooses its own nonce, but not that of the side it turns to next."""
    victim, target = Connecting(OFFER, KEY), Accepting(admit, KEY)
    stranger = Accepting(admit, OTHER_KEY, nonce=bytes(32))
    proof = give(victim, give(stranger, victim.hello))
    give(target, victim.hello)
    with pytest.raises(HandshakeRefused) as refused:
        give(target, proof)
    assert refused.value.verdict is HandshakeVerdict.WRONG_KEY


def test_garbage_is_refused_whatever_it_is() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        accepting, connecting = Accepting(admit, KEY), Connecting(OFFER, KEY)
        content = bytearray(Connecting(OFFER, KEY).hello if draw.random() < 0.7 else draw.randbytes(80))
        for _ in range(draw.randrange(1, 5)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        content += draw.randbytes(100)
        with contextlib.suppress(HandshakeRefused):  # or it waits for more, of a longer hello
            give(accepting, bytes(content))
        assert not accepting.is_done
        with pytest.raises(HandshakeRefused):
            give(connecting, draw.randbytes(connecting.wanted))


def test_purposes_are_bounded() -> None:
    with pytest.raises(ValueError, match="too long"):
        Connecting(OFFER._replace(purpose="x" * (LONGEST_PURPOSE + 1)), KEY)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("key", [KEY, None])
def test_links_are_encrypted_where_both_can_and_there_is_a_key(
    one: bool, other: bool, key: LinkKey | None
) -> None:
    connecting, accepting = (
        Connecting(OFFER, key, can_encrypt=one),
        Accepting(admit, key, can_encrypt=other),
    )
    meet(connecting, accepting)
    assert connecting.is_encrypted is accepting.is_encrypted is (one and other and key is not None)
    assert connecting.secret(b"x", 28) == accepting.secret(b"x", 28) != accepting.secret(b"y", 28)
    again = Connecting(OFFER, key), Accepting(admit, key)
    meet(*again)
    assert again[0].secret(b"x", 28) != connecting.secret(b"x", 28)  # for each link another


@pytest.mark.parametrize(
    ("secret", "salt", "info", "num_bytes", "expected"),
    [
        (
            "0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9", 42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            "".join(f"{byte:02x}" for byte in range(0x50)),
            "".join(f"{byte:02x}" for byte in range(0x60, 0xB0)),
            "".join(f"{byte:02x}" for byte in range(0xB0, 0x100)), 82,
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22, "", "", 42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)  # fmt: skip
def test_secrets_are_those_of_rfc_5869(
    secret: str, salt: str, info: str, num_bytes: int, expected: str
) -> None:
    """Its test cases 1 to 3."""
    found = expand(bytes.fromhex(secret), bytes.fromhex(info), bytes.fromhex(salt), num_bytes)
    assert found.hex() == expected


def test_secrets_differ_by_label_and_salt() -> None:
    secret = KEY.expand(b"label", b"salt", 70)
    assert len(secret) == 70
    assert KEY.expand(b"label", b"salt", 28) == secret[:28]
    others = {KEY.expand(b"other", b"salt", 70), KEY.expand(b"label", b"other", 70)}
    assert secret not in others | {OTHER_KEY.expand(b"label", b"salt", 70)}
    assert len(others) == 2


def test_a_key_is_never_shown() -> None:
    assert repr(KEY) == "<LinkKey>"
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        LinkKey(b"abc")
