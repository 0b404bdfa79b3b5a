"""The handshake of a link: its purpose, and proof of the mesh's key (pure).

There are four messages. The side that connects sends what the link is for, and a nonce. The other side
answers with a nonce of its own, as soon as it has seen version and flags. The first proves the key, by an
HMAC over both messages. Only then does the other judge what the link is for, and it proves the key, too, with
its verdict. So a process without the key learns the version, and whether there is a key, but not which groups
exist. Both nonces are in each proof, and each side has a label of its own: neither a recorded handshake nor a
reflected message proves anything.

Whatever follows these messages on the stream is the link's. Each side reads no more than :attr:`Side.wanted`
bytes at a time.

A process on the way between two members can pass their handshake on and then change what they send, unless
the link is encrypted (:mod:`parallel.links.encryption`).
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from parallel.links.keys import NO_KEY, LinkKey

HANDSHAKE_SECONDS = 5.0
"""Seconds that a handshake may take, on either side."""
VERSION = 1
"""Version of the handshake and of the messages on a link that follow."""
LONGEST_PURPOSE = 512
"""Maximum bytes of a purpose, and of a use."""

_MAGIC = b"LKSTEP"
_HEAD = struct.Struct(">6sHBH")  # magic, version, flags, bytes that follow; the same in all versions
_BODY = struct.Struct(">32siiiHH")  # nonce, ranks, size, lengths of two texts
_ANSWER = struct.Struct(">6sHBB32s")  # magic, version, flags, verdict, nonce; the same in all versions
_VERDICT = struct.Struct(">B32s")
_NONCE_BYTES = _PROOF_BYTES = 32
FULL_BYTES = 9216
"""Bytes of the first messages on a link for tensors: more than any packet.

So a network that loses large packets is noticed here, and not when the first tensor does not come.
"""
_HAS_KEY, _ENCRYPTS, _IS_LARGE = 1, 2, 4  # flags


class HandshakeVerdict(IntEnum):
    """Result that the accepting side sends: admitted, or why not."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    NO_KEY_HERE = 2
    KEY_NEEDED = 3
    WRONG_KEY = 4
    OTHER_PURPOSE = 5
    OTHER_SIZE = 6
    OTHER_RANK = 7


_SAME_KEY = "give all processes the same --mesh-key-file"
_SEEN_BY_CONNECTING = {
    HandshakeVerdict.OTHER_VERSION: (
        "it speaks another version of the protocol: install the same version everywhere"
    ),
    HandshakeVerdict.NO_KEY_HERE: f"it has no mesh key and this process has one: {_SAME_KEY}",
    HandshakeVerdict.KEY_NEEDED: f"it has a mesh key and this process has none: {_SAME_KEY}",
    HandshakeVerdict.WRONG_KEY: f"it has another mesh key: {_SAME_KEY}",
    HandshakeVerdict.OTHER_PURPOSE: "it is in another group or epoch",
    HandshakeVerdict.OTHER_SIZE: "its group has another number of members",
    HandshakeVerdict.OTHER_RANK: "it expects another member there, or has this one already",
}
_SEEN_BY_ACCEPTING = {
    HandshakeVerdict.OTHER_VERSION: "it speaks another version of the protocol",
    HandshakeVerdict.NO_KEY_HERE: "it has a mesh key and this process has none",
    HandshakeVerdict.KEY_NEEDED: "it has no mesh key and this process has one",
    HandshakeVerdict.WRONG_KEY: "it has another mesh key",
    HandshakeVerdict.OTHER_PURPOSE: "it means another group or epoch",
    HandshakeVerdict.OTHER_SIZE: "its group has another number of members",
    HandshakeVerdict.OTHER_RANK: "another member is expected, or this one is here already",
}


class Offer(NamedTuple):
    """Purpose, use and ranks that the connecting side offers for a link."""

    purpose: str
    """A meeting place, or the name of a group with its epoch and token."""
    use: str = ""
    """Name of one of several links between the same two members."""
    rank: int = 0
    """Rank of the side that connects."""
    to: int = 0
    """Rank of the side that accepts."""
    size: int = 0
    """Number of members."""


class HandshakeRefused(Exception):
    """Error: a handshake failed; the text has the reason."""

    def __init__(self, reason: str, verdict: HandshakeVerdict | None = None) -> None:
        super().__init__(reason)
        self.verdict = verdict


Admit = Callable[[Offer], HandshakeVerdict]
"""Callback that accepts or refuses an authenticated link by its offer."""


class Side:
    """Common state machine of both sides of the handshake."""

    def __init__(self, key: LinkKey | None, can_encrypt: bool, nonce: bytes | None, needed: int) -> None:
        self._key = key or NO_KEY
        self._flags = (_HAS_KEY if key is not None else 0) | (
            _ENCRYPTS if can_encrypt and key is not None else 0
        )
        self._nonce = nonce or secrets.token_bytes(_NONCE_BYTES)
        self._transcript: list[bytes] = []
        self._other_flags = 0
        self._needed = needed  # bytes of the next message; 0: none comes
        self._incoming = b""
        self.last_word = b""
        """Final message to the other side before a refused link is closed."""

    @property
    def wanted(self) -> int:
        """Most bytes to read next; 0: the handshake is over."""
        return self._needed - len(self._incoming)

    @property
    def is_done(self) -> bool:
        """Whether both have proven the key and agree on what the link is for."""
        return not self._needed

    def feed(self, content: bytes) -> bytes:
        """Take in at most :attr:`wanted` bytes of the other side; returns what to send.

        Raises:
            HandshakeRefused: the link is not to be used; :attr:`last_word` is to be sent before it is closed.
        """
        if len(content) > self.wanted:
            raise ValueError(f"{len(content)} bytes were read where {self.wanted} were wanted")
        self._incoming += content
        if self.wanted or not content:
            return b""
        message, self._incoming = self._incoming, b""
        return self._take(message)

    @property
    def is_encrypted(self) -> bool:
        """Whether the link is encrypted, since both sides can."""
        return bool(self._flags & self._other_flags & _ENCRYPTS)

    def secret(self, label: bytes, num_bytes: int) -> bytes:
        """Secret bytes that only the two sides know, and no other link has."""
        return self._key.expand(label, b"".join(self._transcript), num_bytes)

    def _take(self, message: bytes) -> bytes:
        raise NotImplementedError

    def _proves(self, label: bytes, proof: bytes, *more: bytes) -> bool:
        return hmac.compare_digest(proof, self._key.proof(label, *self._transcript, *more))


class Connecting(Side):
    """Handshake of the connecting side; begins with :attr:`hello`."""

    def __init__(
        self,
        offer: Offer,
        key: LinkKey | None,
        *,
        can_encrypt: bool = False,
        is_large: bool = False,
        nonce: bytes | None = None,
    ) -> None:
        """``is_large``: the first messages have :data:`FULL_BYTES`.

        ``nonce``: 32 bytes in place of random ones, for tests.

        Raises:
            ValueError: a text of the offer is too long.
        """
        super().__init__(key, can_encrypt, nonce, _ANSWER.size)
        self._flags |= _IS_LARGE if is_large else 0
        purpose, use = offer.purpose.encode(), offer.use.encode()
        if max(len(purpose), len(use)) > LONGEST_PURPOSE:
            longest = max(len(purpose), len(use))
            raise ValueError(f"a purpose of {longest} bytes is too long: {LONGEST_PURPOSE} are allowed")
        head = _BODY.pack(self._nonce, offer.rank, offer.to, offer.size, len(purpose), len(use))
        body = head + purpose + use
        if is_large:
            body = body.ljust(FULL_BYTES - _HEAD.size, b"\0")
        self.hello = _HEAD.pack(_MAGIC, VERSION, self._flags, len(body)) + body
        """The first message, sent as soon as the connection is there."""
        self._transcript.append(self.hello)
        self._answer = b""
        self._step = self._take_answer
        self.has_answer = False
        """Whether the small part of the other side's first message has come."""

    def _take(self, message: bytes) -> bytes:
        return self._step(message)

    def _take_answer(self, message: bytes) -> bytes:
        magic, version, self._other_flags, verdict, _ = _ANSWER.unpack(message)
        if magic != _MAGIC:
            raise HandshakeRefused("what answers is no process of a mesh")
        if version != VERSION:
            raise _seen(HandshakeVerdict.OTHER_VERSION)
        if verdict != HandshakeVerdict.ACCEPTED:
            raise _seen(verdict)
        if (self._flags ^ self._other_flags) & _HAS_KEY:
            raise _seen(
                HandshakeVerdict.KEY_NEEDED if self._other_flags & _HAS_KEY else HandshakeVerdict.NO_KEY_HERE
            )
        self._answer, self.has_answer = message, True
        if not self._flags & _IS_LARGE:
            return self._take_rest(b"")
        self._step, self._needed = self._take_rest, FULL_BYTES - _ANSWER.size
        return b""

    def _take_rest(self, message: bytes) -> bytes:
        self._transcript.append(self._answer + message)
        proof = self._key.proof(b"connects", *self._transcript)
        self._transcript.append(proof)
        self._step, self._needed = self._take_verdict, _VERDICT.size
        return proof

    def _take_verdict(self, message: bytes) -> bytes:
        verdict, proof = _VERDICT.unpack(message)
        if not self._proves(b"accepts", proof, message[:1]):
            raise _seen(HandshakeVerdict.WRONG_KEY)
        if verdict != HandshakeVerdict.ACCEPTED:
            raise _seen(verdict)
        self._needed = 0
        return b""


class Accepting(Side):
    """Handshake of the accepting side; ``admit`` judges the offer of an authenticated link."""

    def __init__(
        self, admit: Admit, key: LinkKey | None, *, can_encrypt: bool = False, nonce: bytes | None = None
    ) -> None:
        """``nonce``: 32 bytes in place of random ones, for tests."""
        super().__init__(key, can_encrypt, nonce, _HEAD.size)
        self._admit = admit
        self._step = self._take_head
        self._head = self._answer = b""
        self.offer = Offer("")
        """Purpose according to the other side, proven when this side is done."""

    def _take(self, message: bytes) -> bytes:
        return self._step(message)

    def _take_head(self, message: bytes) -> bytes:
        magic, version, self._other_flags, num_bytes = _HEAD.unpack(message)
        if magic != _MAGIC:
            raise HandshakeRefused("what it sends is no handshake")
        if version != VERSION:
            raise self._refusal(HandshakeVerdict.OTHER_VERSION)
        if (self._flags ^ self._other_flags) & _HAS_KEY:
            raise self._refusal(
                HandshakeVerdict.KEY_NEEDED if self._flags & _HAS_KEY else HandshakeVerdict.NO_KEY_HERE
            )
        if not _BODY.size <= num_bytes <= FULL_BYTES - _HEAD.size:
            raise HandshakeRefused(f"it announces a handshake of {num_bytes} bytes")
        self._head, self._step, self._needed = message, self._take_body, num_bytes
        self._answer = _ANSWER.pack(_MAGIC, VERSION, self._flags, HandshakeVerdict.ACCEPTED, self._nonce)
        return self._answer

    def _take_body(self, message: bytes) -> bytes:
        _, rank, to, size, purpose_bytes, use_bytes = _BODY.unpack_from(message)
        if max(purpose_bytes, use_bytes) > LONGEST_PURPOSE:
            raise HandshakeRefused(f"it announces a purpose of {max(purpose_bytes, use_bytes)} bytes")
        middle = _BODY.size + purpose_bytes
        if middle + use_bytes > len(message):
            raise HandshakeRefused("the lengths in its handshake do not fit each other")
        try:
            purpose, use = (
                message[_BODY.size : middle].decode(),
                message[middle : middle + use_bytes].decode(),
            )
        except UnicodeDecodeError:
            raise HandshakeRefused("its handshake is no text where it should be") from None
        self.offer = Offer(purpose, use, rank, to, size)
        rest = bytes(FULL_BYTES - _ANSWER.size) if self._other_flags & _IS_LARGE else b""
        self._transcript += [self._head + message, self._answer + rest]
        self._step, self._needed = self._take_proof, _PROOF_BYTES
        return rest

    def _take_proof(self, message: bytes) -> bytes:
        if not self._proves(b"connects", message):
            no_proof = bytes(_PROOF_BYTES)  # a stranger gets none
            self.last_word = _VERDICT.pack(HandshakeVerdict.WRONG_KEY, no_proof)
            raise HandshakeRefused(_SEEN_BY_ACCEPTING[HandshakeVerdict.WRONG_KEY], HandshakeVerdict.WRONG_KEY)
        self._transcript.append(message)
        verdict = self._admit(self.offer)
        code = bytes([verdict])
        answer = code + self._key.proof(b"accepts", *self._transcript, code)
        if verdict is not HandshakeVerdict.ACCEPTED:
            self.last_word = answer
            raise HandshakeRefused(f"{_SEEN_BY_ACCEPTING[verdict]} ({_named(self.offer)})", verdict)
        self._needed = 0
        return answer

    def _refusal(self, verdict: HandshakeVerdict) -> HandshakeRefused:
        self.last_word = _ANSWER.pack(_MAGIC, VERSION, self._flags, verdict, self._nonce)
        return HandshakeRefused(_SEEN_BY_ACCEPTING[verdict], verdict)


def _named(offer: Offer) -> str:
    return f"{offer.purpose!r}, {offer.use!r} from rank {offer.rank} to {offer.to} of {offer.size}"


def _seen(verdict: int) -> HandshakeRefused:
    """Error for the connecting side, from the accepting side's verdict."""
    if verdict in list(HandshakeVerdict):
        return HandshakeRefused(_SEEN_BY_CONNECTING[HandshakeVerdict(verdict)], HandshakeVerdict(verdict))
    return HandshakeRefused(f"it refuses for a reason of number {verdict}, which this version does not know")
