"""Which messages of a gateway are answered when, in each of its modes."""

from __future__ import annotations

import pytest

from router.epp.exchange import (
    AnswerBody,
    AnswerHead,
    AnswerTrailers,
    Body,
    BodyMode,
    Choose,
    Exchange,
    Head,
    Pick,
    PickerRefusal,
    Reply,
    Trailers,
)

PICK = Pick("10.0.0.1:8000", 1)


def head(mode: BodyMode, *, ends: bool = False) -> Head:
    return Head({":path": "/v1/completions"}, ends, mode)


@pytest.mark.parametrize("mode", BodyMode)
def test_a_request_without_a_body_is_chosen_for_at_its_head(mode: BodyMode) -> None:
    exchange = Exchange(100)
    asked = head(mode, ends=True)
    assert exchange.take(asked) == [Choose(asked, b"")]
    assert exchange.chosen(PICK) == [Reply(Head, PICK)]


def test_without_bodies_the_head_decides_and_pieces_are_let_through() -> None:
    exchange = Exchange(100)
    asked = head(BodyMode.NONE)
    assert exchange.take(asked) == [Choose(asked, b"")]
    assert exchange.chosen(PICK) == [Reply(Head, PICK)]
    assert exchange.take(Body(b"{}", True)) == [Reply(Body)]


def test_a_whole_body_is_chosen_for_when_it_is_there() -> None:
    exchange = Exchange(100)
    asked = head(BodyMode.WHOLE)
    assert exchange.take(asked) == [Reply(Head)], "else the gateway sends no body"
    assert exchange.take(Body(b"{}", True)) == [Choose(asked, b"{}")]
    assert exchange.chosen(PICK) == [Reply(Body, PICK)]


def test_a_body_in_pieces_is_held_and_sent_back_behind_the_head() -> None:
    exchange = Exchange(100)
    asked = head(BodyMode.DUPLEX)
    assert exchange.take(asked) == []
    assert exchange.take(Body(b"ab")) == []
    assert exchange.take(Body(b"cd", True)) == [Choose(asked, b"abcd")]
    assert exchange.chosen(PICK) == [
        Reply(Head, PICK),
        Reply(Body, None, b"ab"),
        Reply(Body, None, b"cd", True),
    ]


def test_trailers_end_a_body_in_pieces() -> None:
    exchange = Exchange(100)
    asked = head(BodyMode.DUPLEX)
    exchange.take(asked)
    exchange.take(Body(b"ab"))
    assert exchange.take(Trailers()) == [Choose(asked, b"ab")]
    assert exchange.chosen(PICK) == [Reply(Head, PICK), Reply(Body, None, b"ab"), Reply(Trailers)]


def test_a_body_that_is_too_long_is_not_read_and_goes_through() -> None:
    exchange = Exchange(3)
    asked = head(BodyMode.DUPLEX)
    exchange.take(asked)
    exchange.take(Body(b"ab"))
    assert exchange.take(Body(b"cd")) == [Choose(asked, b"")]
    assert exchange.chosen(PICK) == [Reply(Head, PICK), Reply(Body, None, b"ab"), Reply(Body, None, b"cd")]
    assert exchange.take(Body(b"ef", True)) == [Reply(Body, None, b"ef", True)]


def test_without_an_endpoint_the_request_ends() -> None:
    exchange = Exchange(100)
    exchange.take(head(BodyMode.DUPLEX))
    exchange.take(Body(b"ab", True))
    assert exchange.chosen(None, "none is ready") == [PickerRefusal(503, "none is ready")]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_answers_pass_through(in_pieces: bool) -> None:
    exchange = Exchange(100, answers_in_pieces=in_pieces)
    exchange.take(head(BodyMode.NONE, ends=True))
    exchange.chosen(PICK)
    assert exchange.take(AnswerHead("10.0.0.1:8000")) == [Reply(AnswerHead)]
    body = Reply(AnswerBody, None, b"token", True) if in_pieces else Reply(AnswerBody)
    assert exchange.take(AnswerBody(b"token", True)) == [body]
    assert exchange.take(AnswerTrailers()) == [Reply(AnswerTrailers)]
