"""A subscriber of KV events that knows no more than their documentation."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

END = 2**64 - 1


def spread(tokens: list[int], count: int) -> list[tuple[int, ...]]:
    """The tokens of each of so many blocks."""
    size, rest = divmod(len(tokens), count)
    assert rest == 0
    return [tuple(tokens[start : start + size]) for start in range(0, len(tokens), size)]


class Follower:
    """Blocks of one instance, by its events; each with the tokens of its whole context."""

    def __init__(self, endpoint: str, replay: str, *, topic: str = "") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._replay = replay
        self._topic = topic.encode()
        self.next = 0
        self.contexts: dict[int, tuple[int, ...]] = {}
        self.ranks: set[int] = set()
        self.kinds: list[str] = []
        self.salts: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def catch_up(self, timeout: float = 5.0) -> None:
        """Ask for all batches from the next one on."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(self._replay)
            dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
            while True:
                assert dealer.poll(round(1000 * timeout)), "the replay did not end"
                empty, topic, number, payload = dealer.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big") == END:
                    break
                assert topic == self._topic
                self._take(int.from_bytes(number, "big"), payload)
        finally:
            dealer.close(linger=0)

    def follow(self, seconds: float) -> int:
        """Take in what was published, until nothing comes for so long; returns how many batches."""
        count = 0
        while self._socket.poll(round(1000 * seconds)):
            topic, number, payload = self._socket.recv_multipart()
            assert topic == self._topic
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            else:
                self._take(int.from_bytes(number, "big"), payload)
            count += 1
        return count

    def _take(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        assert number == self.next, f"batch {self.next} is missing"
        self.next += 1
        written_at, events, rank = msgspec.msgpack.decode(payload)
        assert written_at > 1e9
        self.ranks.add(rank)
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        self.kinds.append(event["type"])
        match event["type"]:
            case "BlockStored":
                assert event["lora_id"] is event["lora_name"] is None
                assert event["medium"] == "GPU"
                parent, names = event["parent_block_hash"], event["block_hashes"]
                self.salts += [key for keys in event.get("extra_keys", ()) if keys for key in keys]
                for name, tokens in zip(names, spread(event["token_ids"], len(names)), strict=True):
                    assert len(tokens) == event["block_size"]
                    assert name not in self.contexts, "it is stored already"
                    before = () if parent is None else self.contexts.get(parent, (-1,))
                    self.contexts[name] = before + tokens
                    parent = name
            case "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.contexts[name]
            case "AllBlocksCleared":
                self.contexts.clear()
            case other:
                raise AssertionError(f"an unknown event {other}")
