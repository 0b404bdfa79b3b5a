"""Encryption of links: keys, their layout, and the agreement to use it.

The kernel's part runs where there is a kernel with TLS, and nowhere else.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from parallel.links import connecting, encryption
from parallel.links.encryption import SECRET_BYTES, can_encrypt, crypto_info, directions, encrypt, why_not
from parallel.links.handshake import Accepting, Connecting, HandshakeVerdict, Offer
from parallel.links.meeting import MeetingHost
from tests.parallel.links.forming import HOST, KEY, Settings, form, formed

ULPS = Path("/proc/sys/net/ipv4/tcp_available_ulp")
KERNEL_HAS_TLS = ULPS.exists() and "tls" in ULPS.read_text().split()


def sides() -> tuple[Connecting, Accepting]:
    """Both sides after a handshake; their nonces are all zeros and all ones."""
    connecting_side = Connecting(Offer("group/x"), KEY, can_encrypt=True, nonce=bytes(32))
    accepting_side = Accepting(lambda _: HandshakeVerdict.ACCEPTED, KEY, can_encrypt=True, nonce=b"\xff" * 32)
    answer = accepting_side.feed(connecting_side.hello[: accepting_side.wanted])
    accepting_side.feed(connecting_side.hello[-accepting_side.wanted :])
    connecting_side.feed(accepting_side.feed(connecting_side.feed(answer)))
    return connecting_side, accepting_side


def test_the_kernel_gets_each_part_of_a_secret_in_its_place() -> None:
    """The layout of ``struct tls12_crypto_info_aes_gcm_128`` in linux/tls.h, 40 bytes without padding."""
    info = crypto_info(bytes(range(SECRET_BYTES)))
    assert len(info) == 40
    assert struct.unpack_from("=HH", info) == (0x0304, 51)
    assert info[4:12] == bytes(range(20, 28))  # iv
    assert info[12:28] == bytes(range(16))  # key
    assert info[28:32] == bytes(range(16, 20))  # salt
    assert info[32:] == bytes(8)  # number of the first record


def test_each_side_receives_with_the_key_that_the_other_sends_with() -> None:
    connecting_side, accepting_side = sides()
    sends, receives = directions(connecting_side, connects=True)
    assert directions(accepting_side, connects=False) == (receives, sends)
    assert sends != receives
    again = sides()  # the same nonces, so the same keys: there is nothing else in them
    assert directions(again[0], connects=True) == (sends, receives)


def test_keys_do_not_change_between_versions() -> None:
    """If they have to, VERSION of the handshake rises, too."""
    connecting_side, _ = sides()
    assert [part[4:32].hex() for part in directions(connecting_side, connects=True)] == [
        "f41faf38ca55364a06dc5ec69ae9977f469acd106967198e87f24914",
        "3ab45de3820eb794e1660dc3ffb44f126a5207238bff6440359469fe",
    ]


def test_a_kernel_without_tls_is_found_to_have_none() -> None:
    assert can_encrypt() is KERNEL_HAS_TLS
    assert (why_not() == "") is KERNEL_HAS_TLS
    if not KERNEL_HAS_TLS:
        assert "modprobe tls" in why_not()
        with (
            socket.create_server((HOST, 0)) as listener,
            socket.create_connection(listener.getsockname()) as one,
            pytest.raises(FileNotFoundError),
        ):
            encrypt(one, sides()[0], connects=True)


@pytest.mark.skipif(not KERNEL_HAS_TLS, reason="this kernel has no TLS")
def test_what_is_encrypted_comes_out_and_is_no_plain_text_between() -> None:
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two = listener.accept()[0]
        with one, two:
            encrypt(one, sides()[0], connects=True)
            one.sendall(b"activations")
            between = two.recv(4096, socket.MSG_PEEK)
            assert between[:3] == b"\x17\x03\x03"  # a record of TLS
            assert b"activations" not in between
            encrypt(two, sides()[1], connects=False)
            assert two.recv(100) == b"activations"


def test_members_encrypt_if_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end of each link is given to the kernel once, with its own keys."""
    given = []
    monkeypatch.setattr(connecting, "can_encrypt", lambda: True)
    monkeypatch.setattr(
        connecting,
        "encrypt",
        lambda _, handshake, *, connects: given.append(directions(handshake, connects=connects)),
    )
    meeting = MeetingHost(HOST)
    members = formed(meeting, 2, Settings(streams=2))
    assert all(each.is_encrypted for each in members)
    assert len(given) == len(set(given)) == 6
    assert {(receives, sends) for sends, receives in given} == set(given)
    for each in members:
        each.close()
    meeting.close()


def test_a_group_whose_tensors_another_transport_carries_is_not_called_encrypted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "can_encrypt", lambda: True)
    monkeypatch.setattr(connecting, "encrypt", lambda *_, **__: None)
    meeting = MeetingHost(HOST)
    for each in formed(meeting, 2, Settings(streams=0)):
        assert not each.is_encrypted
        assert each.data in ({0: []}, {1: []})
        each.close()
    meeting.close()


def test_a_kernel_that_fails_after_its_trial_ends_the_forming(monkeypatch: pytest.MonkeyPatch) -> None:
    if KERNEL_HAS_TLS:
        pytest.skip("this kernel does not fail")
    monkeypatch.setattr(connecting, "can_encrypt", lambda: True)
    meeting = MeetingHost(HOST)
    for error in form(meeting, 2, Settings()):
        assert "forming the group: " in str(error)
        assert "cannot be encrypted" in str(error) or "is gone, or gave up" in str(error)
    meeting.close()


@pytest.mark.parametrize(
    ("has_key", "is_encrypted", "expected"),
    [
        (False, False, "neither authenticated nor encrypted"),
        (True, True, "prove the mesh's key and are encrypted"),
        (True, False, "prove the mesh's key; they are not encrypted: the kernel of "),
    ],
)
def test_the_log_tells_what_is_protected(has_key: bool, is_encrypted: bool, expected: str) -> None:
    assert expected in connecting._protection(has_key, is_encrypted, True)
    assert "proves no key, and encrypts nothing" in connecting._protection(has_key, is_encrypted, False)


def test_a_trial_that_fails_in_any_way_means_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the keys, but loses what is sent, cannot."""
    monkeypatch.setattr(encryption, "_switch_on", lambda *_: None)
    why_not.cache_clear()
    assert why_not() == ""  # plain sockets give back what was sent
    monkeypatch.setattr(encryption, "_switch_on", lambda connection, *_: connection.shutdown(socket.SHUT_WR))
    why_not.cache_clear()
    assert "has no TLS" in why_not()
    monkeypatch.undo()
    why_not.cache_clear()
    assert can_encrypt() is KERNEL_HAS_TLS
