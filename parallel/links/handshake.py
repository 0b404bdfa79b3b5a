"""The handshake of a link: its purpose, and proof of the mesh's key (pure).

There are four messages. The side that connects sends what the link is for, and a nonce. The other side
answers with a nonce of its own. The first proves the key, by an HMAC over both messages. Only then does the other
judge what the link is for, and it proves the key, too, with its verdict. So a process without the key learns the
version, and whether there is a key, but not which groups exist. Both nonces are in each proof, and each side
has a label of its own: neither a recorded handshake nor a reflected message proves anything.

Whatever follows these messages on the stream is the link's. Each side reads no more than :attr:`Side.wanted`
bytes at a time.
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
LONGEST_PURPOSE = 512
"""Bytes of a purpose, and of a use."""

_MAGIC = b"LKSTEP"
_HEAD = struct.Struct(">6sHBH")  # magic, version, flags, bytes that follow
_BODY = struct.Struct(">32siiiHH")  # nonce, ranks, size, lengths of two texts
_ANSWER = struct.Struct(">6sHBB32s")  # magic, version, flags, verdict, nonce
_VERDICT = struct.Struct(">B32s")
_NONCE_BYTES = _PROOF_BYTES = 32
_HAS_KEY, _ENCRYPTS = 1, 2  # flags


class Verdict(IntEnum):
    """What the side that accepts thinks of the other."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    NO_KEY_HERE = 2
    KEY_NEEDED = 3
    WRONG_KEY = 4
    OTHER_PURPOSE = 5
    OTHER_SIZE = 6
    OTHER_RANK = 7


_REASONS = {
    Verdict.OTHER_VERSION: "it speaks another version of the protocol: install the same version everywhere",
    Verdict.NO_KEY_HERE: "it has no mesh key and this process has one: give all the same --mesh-key-file",
    Verdict.KEY_NEEDED: "it has a mesh key and this process has none: give all the same --mesh-key-file",
    Verdict.WRONG_KEY: "it has another mesh key: give all the same --mesh-key-file",
    Verdict.OTHER_PURPOSE: "it is in another group or epoch",
    Verdict.OTHER_SIZE: "its group has another number of members",
    Verdict.OTHER_RANK: "it expects another member, or has this one already",
}


class Offer(NamedTuple):
    """What a link is for."""

    purpose: str
    """A meeting place, or the name of a group with its epoch and token."""
    use: str = ""
    """Which of several links between the two."""
    rank: int = 0
    """Rank of the side that connects."""
    to: int = 0
    """Rank of the side that accepts."""
    size: int = 0
    """Number of members."""


class Refused(Exception):
    """A handshake that came to nothing; the text says why."""

    def __init__(self, reason: str, verdict: Verdict | None = None) -> None:
        super().__init__(reason)
        self.verdict = verdict


Admit = Callable[[Offer], Verdict]


class Side:
    """What both sides have."""

    def __init__(self, key: LinkKey | None, can_encrypt: bool, nonce: bytes | None) -> None:
        self._key = key or NO_KEY
        self._flags = (_HAS_KEY if key is not None else 0) | (
            _ENCRYPTS if can_encrypt and key is not None else 0
        )
        self._nonce = nonce or secrets.token_bytes(_NONCE_BYTES)
        self._transcript: list[bytes] = []
        self._other_flags = 0
        self.wanted = 0
        """Bytes that :meth:`take` needs next; 0: none any more."""
        self.is_done = False
        """Whether both have proven the key and agree on what the link is for."""

    def take(self, content: bytes) -> bytes:
        """The next message, from exactly :attr:`wanted` bytes of the other side.

        Raises:
            Refused: the link is not to be used. :attr:`Accepting.last_word` is sent before it is closed.
        """
        raise NotImplementedError

    @property
    def is_encrypted(self) -> bool:
        """Whether both can encrypt, so that both do."""
        return bool(self._flags & self._other_flags & _ENCRYPTS)

    def secret(self, label: bytes, num_bytes: int) -> bytes:
        """Secret bytes that only the two sides know, and no other link has."""
        return self._key.expand(label, b"".join(self._transcript), num_bytes)

    def _proves(self, label: bytes, proof: bytes, *more: bytes) -> bool:
        return hmac.compare_digest(proof, self._key.proof(label, *self._transcript, *more))


class Connecting(Side):
    """The side that connects; begins with :attr:`hello`."""

    def __init__(
        self, offer: Offer, key: LinkKey | None, *, can_encrypt: bool = False, nonce: bytes | None = None
    ) -> None:
        super().__init__(key, can_encrypt, nonce)
        purpose, use = offer.purpose.encode(), offer.use.encode()
        if max(len(purpose), len(use)) > LONGEST_PURPOSE:
            raise ValueError(f"a purpose of {len(purpose)} bytes is too long: {LONGEST_PURPOSE} are allowed")
        body = (
            _BODY.pack(self._nonce, offer.rank, offer.to, offer.size, len(purpose), len(use)) + purpose + use
        )
        self.hello = _HEAD.pack(_MAGIC, VERSION, self._flags, len(body)) + body
        self._transcript.append(self.hello)
        self._has_proven = False
        self.wanted = _ANSWER.size

    def take(self, content: bytes) -> bytes:
        """See :class:`Side`."""
        assert len(content) == self.wanted
        return self._take_verdict(content) if self._has_proven else self._take_answer(content)

    def _take_answer(self, content: bytes) -> bytes:
        magic, version, self._other_flags, verdict, _ = _ANSWER.unpack(content)
        if magic != _MAGIC:
            raise Refused("it is no process of a mesh, or another version")
        if version != VERSION:
            raise Refused(_REASONS[Verdict.OTHER_VERSION], Verdict.OTHER_VERSION)
        _judge(verdict)
        if (self._flags ^ self._other_flags) & _HAS_KEY:
            _judge(Verdict.KEY_NEEDED if self._other_flags & _HAS_KEY else Verdict.NO_KEY_HERE)
        self._transcript.append(content)
        self._has_proven, self.wanted = True, _VERDICT.size
        proof = self._key.proof(b"connects", *self._transcript)
        self._transcript.append(proof)
        return proof

    def _take_verdict(self, content: bytes) -> bytes:
        verdict, proof = _VERDICT.unpack(content)
        if verdict == Verdict.WRONG_KEY or not self._proves(b"accepts", proof, content[:1]):
            raise Refused(_REASONS[Verdict.WRONG_KEY], Verdict.WRONG_KEY)
        _judge(verdict)
        self.is_done, self.wanted = True, 0
        return b""


class Accepting(Side):
    """The side that accepts; ``admit`` judges what an authenticated link is for."""

    def __init__(
        self, admit: Admit, key: LinkKey | None, *, can_encrypt: bool = False, nonce: bytes | None = None
    ) -> None:
        super().__init__(key, can_encrypt, nonce)
        self._admit = admit
        self._step = self._take_head
        self._head = b""
        self.offer = Offer("")
        """What the other side wants the link for; proven when this side is done."""
        self.last_word = b""
        """What a refused side is sent before the link is closed."""
        self.wanted = _HEAD.size

    def take(self, content: bytes) -> bytes:
        """See :class:`Side`."""
        assert len(content) == self.wanted
        return self._step(content)

    def _take_head(self, content: bytes) -> bytes:
        magic, version, self._other_flags, num_bytes = _HEAD.unpack(content)
        if magic != _MAGIC:
            raise Refused("what it sends is no handshake")
        if version != VERSION:
            self._refuse_at_once(Verdict.OTHER_VERSION)
        if (self._flags ^ self._other_flags) & _HAS_KEY:
            self._refuse_at_once(Verdict.KEY_NEEDED if self._flags & _HAS_KEY else Verdict.NO_KEY_HERE)
        if not _BODY.size <= num_bytes <= _BODY.size + 2 * LONGEST_PURPOSE:
            raise Refused(f"it announces a handshake of {num_bytes} bytes")
        self._head, self._step, self.wanted = content, self._take_body, num_bytes
        return b""

    def _take_body(self, content: bytes) -> bytes:
        _, rank, to, size, purpose_bytes, use_bytes = _BODY.unpack_from(content)
        texts = content[_BODY.size :]
        if purpose_bytes + use_bytes != len(texts):
            raise Refused("the lengths in its handshake do not fit each other")
        try:
            purpose, use = texts[:purpose_bytes].decode(), texts[purpose_bytes:].decode()
        except UnicodeDecodeError:
            raise Refused("its handshake is no text where it should be") from None
        self.offer = Offer(purpose, use, rank, to, size)
        answer = _ANSWER.pack(_MAGIC, VERSION, self._flags, Verdict.ACCEPTED, self._nonce)
        self._transcript += [self._head + content, answer]
        self._step, self.wanted = self._take_proof, _PROOF_BYTES
        return answer

    def _take_proof(self, content: bytes) -> bytes:
        if not self._proves(b"connects", content):
            self.last_word = _VERDICT.pack(Verdict.WRONG_KEY, bytes(_PROOF_BYTES))
            raise Refused("it has another mesh key", Verdict.WRONG_KEY)
        self._transcript.append(content)
        verdict = self._admit(self.offer)
        code = bytes([verdict])
        message = code + self._key.proof(b"accepts", *self._transcript, code)
        if verdict is not Verdict.ACCEPTED:
            self.last_word = message
            raise Refused(f"{verdict.name.lower().replace('_', ' ')}: {self.offer}", verdict)
        self.is_done, self.wanted = True, 0
        return message

    def _refuse_at_once(self, verdict: Verdict) -> None:
        self.last_word = _ANSWER.pack(_MAGIC, VERSION, self._flags, verdict, self._nonce)
        raise Refused(verdict.name.lower().replace("_", " "), verdict)


def _judge(verdict: int) -> None:
    if verdict != Verdict.ACCEPTED:
        reason = _REASONS.get(Verdict(verdict)) if verdict in list(Verdict) else None
        raise Refused(reason or f"it refuses, for reason {verdict}", Verdict(verdict) if reason else None)
