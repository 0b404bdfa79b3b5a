"""Images found in messages, and their places in a prompt."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from engine.prompt_images import ImageTensor
from router.api.anthropic_messages.request import _result
from router.api.responses.history import history
from router.errors import ApiError
from router.images.messages import Prepared
from router.images.parts import PLACED, has_images, take_images
from router.images.placing import images_in, with_images

ONE = base64.b64encode(b"first").decode()
TEXT = {"type": "text", "text": "What is this?"}


def part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | more}


def messages(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": list(parts)}]


def test_images_are_taken_in_their_order() -> None:
    two = base64.encodebytes(b"second" * 20).decode()  # with ends of lines
    given = messages(TEXT, part(f"data:image/png;base64,{ONE}"), part(f"data:;base64,{two}", detail="high"))
    assert has_images(given)
    taken, sent = take_images(given, 2)
    assert [each.data for each in sent] == [b"first", b"second" * 20]
    assert [each.path for each in sent] == ["messages[1].content[1]", "messages[1].content[2]"]
    assert taken[1]["content"] == [TEXT, PLACED, PLACED]
    assert given[1]["content"][1] == part(f"data:image/png;base64,{ONE}"), "what was sent is changed"


def test_a_response_names_its_image_in_short() -> None:
    taken, sent = take_images(
        messages({"type": "input_image", "image_url": f"data:image/png;base64,{ONE}"}), 1
    )
    assert [each.data for each in sent] == [b"first"]
    assert taken[1]["content"] == [PLACED]


@pytest.mark.parametrize("given", [[], messages(TEXT), [{"role": "user", "content": "text"}], [7]])
def test_text_has_none(given: list[Any]) -> None:
    assert not has_images(given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (part("data:image/png,abc"), "no data URL in base64"),
        (part("a.png"), "is no URL, and no data URL"),
        ({"type": "input_audio", "input_audio": {"data": ONE}}, "is audio, which is not supported"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aa"}}, "is video, which is not"),
        (part("data:image/png;base64,a*b="), "whose base64 is not valid"),
        (part("data:image/png;base64,"), "is an empty image"),
        (part(None), "has no URL of an image"),
        (part(f"data:image/png;base64,{ONE}", detail="low"), 'asks for the detail "low"'),
        (part(f"data:image/png;base64,{ONE}", detail="huge"), "has the detail 'huge'"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ApiError) as caught:
        take_images(messages(TEXT, given), 4)
    assert (caught.value.status, caught.value.param) == (400, "messages[1].content[1]")
    assert problem in str(caught.value)


def test_urls_are_left_to_be_fetched() -> None:
    given = messages(part("https://example.com/a.png"), part("file:///a.png"))
    assert [each.url for each in take_images(given, 2)[1]] == ["https://example.com/a.png", "file:///a.png"]


def test_results_of_tools_have_images() -> None:
    given = [{"role": "tool", "tool_call_id": "1", "content": [TEXT, part(f"data:;base64,{ONE}")]}]
    taken, sent = take_images(given, 1)
    assert (taken[0]["content"], sent[0].path) == ([TEXT, PLACED], "messages[0].content[1]")


def test_results_of_anthropic_tools_keep_their_order() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": ONE}
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "image", "source": source},
        {"type": "text", "text": "b"},
    ]
    parts: Any = _result(0, blocks)
    assert [each["type"] for each in parts] == ["text", "image_url", "text"]
    assert take_images([{"role": "tool", "content": parts}], 1)[1][0].data == b"first"
    assert _result(0, blocks[:1]) == "a"


def test_outputs_of_functions_keep_their_images() -> None:
    """As Codex sends a screenshot: in the output of a call, beside text."""
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{ONE}", "detail": "auto"}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "1",
        "output": [{"type": "input_text", "text": "a"}, image],
    }
    read = history(None, [call, output]).messages
    taken, sent = take_images(read, 1)
    assert [(each.data, each.path) for each in sent] == [(b"first", "input[1].output[1]")]
    assert taken[1] == {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "input_text", "text": "a"}, PLACED],
    }


def test_one_image_too_many() -> None:
    with pytest.raises(ApiError, match=r"content\[1\] is one image more than the 1 that a request may have"):
        take_images(messages(*[part(f"data:image/png;base64,{ONE}")] * 2), 1)


def prepared(rows: int, digest: bytes) -> Prepared:
    return Prepared("[" + "<im>" * rows + "]", (ImageTensor("pixels", "float32", (0,), b""),), digest * 16)


def test_each_image_is_where_its_mark_was() -> None:
    both = [prepared(2, b"a"), prepared(3, b"b")]
    assert with_images("x<im>y<im>", "<im>", both) == "x[<im><im>]y[<im><im><im>]"
    found = images_in([1, 9, 9, 2, 3, 9, 9, 9, 2], 9, "<im>", both)
    assert [(each.first, each.end, each.digest) for each in found] == [(1, 3, b"a" * 16), (5, 8, b"b" * 16)]


@pytest.mark.parametrize("text", ["no place", "<im> and <im>"])
def test_marks_that_messages_spell_out_are_refused(text: str) -> None:
    with pytest.raises(ApiError, match="places for images"):
        with_images(text, "<im>", [prepared(1, b"a")])


def test_a_prompt_that_lost_placeholders_is_refused() -> None:
    with pytest.raises(ApiError, match="1 placeholders of images where 2 are needed"):
        images_in([9, 1], 9, "<im>", [prepared(2, b"a")])
