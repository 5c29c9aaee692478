"""Ids of events, and what a stream that goes on behind one of them leaves out."""

from __future__ import annotations

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.journal.event_ids import EventIds, StreamPosition, parsed_id


def ids(data: bytes) -> list[str]:
    return [line[4:] for line in data.decode().splitlines() if line.startswith("id: ")]


def test_an_id_says_how_many_tokens_of_each_choice_went_into_the_stream() -> None:
    marks = EventIds("chatcmpl-a:b.c", 2)
    assert ids(marks.mark(0, 1, b"data: role\n\ndata: x\n\n")) == ["chatcmpl-a:b.c:1-1,0", "chatcmpl-a:b.c:1,0"]
    assert ids(marks.mark(1, 3, b"data: y\n\n")) == ["chatcmpl-a:b.c:1,3"]
    assert marks.mark(1, 1, b"") == b""
    assert ids(marks.mark(0, 1, b"data: z\n\n")) == ["chatcmpl-a:b.c:2,4"]
    assert ids(marks.close(b"data: {}\n\ndata: [DONE]\n\n")) == ["chatcmpl-a:b.c:2,4+1", "chatcmpl-a:b.c:2,4+2"]


def test_ids_are_read_again() -> None:
    assert parsed_id("chatcmpl-a:b.c:12-1,0+2") == ("chatcmpl-a:b.c", StreamPosition(((12, 1), (0, 0)), 2))
    assert parsed_id("msg_a.b:7") == ("msg_a.b", StreamPosition(((7, 0),)))


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:x", "a:1,", "a:1-", "a:1+", "a:1+x", "a b:1", "a:-1", "a:1" + ",1" * 9000,
             "a:1234567890", "é\n:1", "a::1"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID") as error:
        parsed_id(text)
    assert error.value.param == "Last-Event-ID"


@pytest.mark.parametrize("cut", range(8))
def test_a_stream_goes_on_behind_each_of_its_events(cut: int) -> None:
    def told(marks: EventIds) -> list[bytes]:
        data = marks.mark(0, 1, b"data: role\n\ndata: a\n\n") + marks.mark(0, 1, b"") + marks.mark(0, 1, b"data: c\n\n")
        data += marks.mark(0, 2, b"data: d\n\ndata: e\n\ndata: f\n\n")
        return (data + marks.close(b"data: usage\n\ndata: [DONE]\n\n")).split(b"\n\n")[:-1]

    whole = told(EventIds("n", 1))
    assert len(whole) == 8
    _, place = parsed_id(whole[cut].split(b"\n")[0][4:].decode())
    assert told(EventIds("n", 1, place)) == whole[cut + 1 :]


def test_a_place_must_have_a_count_for_each_choice() -> None:
    with pytest.raises(InvalidRequest, match="2 counts"):
        EventIds("n", 2, StreamPosition(((1, 0),)))
    assert EventIds("n", 1, StreamPosition(((9, 0),))).singly(0) == 9
    assert EventIds("n", 1).singly(0) == 1
