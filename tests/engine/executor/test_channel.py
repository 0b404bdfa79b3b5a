"""Messages between an engine and its workers, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from engine.executor.channel import HEADER, Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = socket.socketpair()
    with first, second:
        yield Channel(first), Channel(second)


def test_messages_come_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert other.take() is None
    messages = [b"", b"a", b"b" * 1000]
    for message in messages:
        one.send(message)
    assert [other.receive(0.0) for _ in messages] == messages
    assert other.take() is None


def test_a_message_larger_than_any_buffer_arrives(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    large = bytes(range(256)) * (1 << 15)  # 8 MiB
    sender = threading.Thread(target=one.send, args=(large,))
    sender.start()
    assert other.receive(0.0) == large
    sender.join(5)


def test_a_sleeping_receiver_is_woken(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    timer = threading.Timer(0.05, one.send, (b"now",))
    timer.start()
    assert other.receive(look=0.001) == b"now"
    timer.join(5)


def test_the_end_of_the_other_side_comes_after_what_it_said(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(b"last words")
    one.close()
    assert other.receive(0.0) == b"last words"
    with pytest.raises(ChannelClosed):
        other.receive(0.0)
    with pytest.raises(ChannelClosed):
        other.send(b"hello?")


def test_nobody_waits_for_ever_to_send(ends: tuple[Channel, Channel]) -> None:
    ends[0].send_timeout = 0.05
    with pytest.raises(ChannelClosed, match=r"took nothing for 0\.05 s"):
        ends[0].send(b"x" * (1 << 24))


def test_what_there_is_no_room_for_goes_later_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    messages = [b"small", b"x" * (1 << 22), b"after it"]
    assert one.offer(messages[0]) == 0
    assert 0 < one.offer(messages[1]) < one.offer(messages[2])
    found = []
    while len(found) < len(messages):
        one.flush()
        message = other.take()
        if message is not None:
            found.append(message)
    assert found == messages
    assert one.flush() == 0


def test_an_absurd_length_is_refused() -> None:
    raw, end = socket.socketpair()
    with raw, end:
        raw.sendall(HEADER.pack(1 << 30))
        with pytest.raises(ChannelClosed, match="announces"):
            Channel(end).take()
