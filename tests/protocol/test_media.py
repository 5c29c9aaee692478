"""Media in block hashes: each block names what lies in it and where; and what of a node's answer is believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.hashing import chain
from kvferry.protocol.media import (
    MAX_ITEM_BYTES,
    MAX_ITEMS,
    MediaItem,
    RenderedPrompt,
    block_extras,
    extras_of,
    joined,
    media_within,
    with_data,
    with_files,
    without_data,
)
from kvferry.protocol.wire import FrameReader, WireError, pack, unpack


def item(offset: int, length: int, name: str = "a", data: bytes = b"") -> MediaItem:
    return MediaItem("image", name, offset, length, data)


def test_every_block_in_which_a_part_lies_names_it_with_its_place() -> None:
    found = block_extras([item(3, 6, "one"), item(9, 1, "two"), item(16, 4, "three")], 4)
    assert found == {
        0: extras_of([("one", 3)]),
        1: extras_of([("one", -1)]),
        2: extras_of([("one", -5), ("two", 1)]),
        4: extras_of([("three", 0)]),
    }
    assert block_extras([], 4) == {}


def test_other_media_other_places_and_other_orders_have_other_extras() -> None:
    several = [[("a", 1)], [("a", 2)], [("b", 1)], [("a", 1), ("b", 2)], [("b", 2), ("a", 1)], [("a@1;1:b", 1)], []]
    assert len({extras_of(keys) for keys in several}) == len(several)


def test_the_same_text_with_another_picture_shares_only_what_is_before_it() -> None:
    tokens = [7] * 20
    one, other = (chain(b"root", tokens, 4, extras=block_extras([item(9, 4, name)], 4)) for name in "ab")
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


@pytest.mark.parametrize(
    ("media", "sound"),
    [
        ((), True),
        ((item(0, 4), item(4, 6)), True),
        ((item(0, 5), item(4, 6)), False),
        ((item(4, 2), item(0, 2)), False),
        ((item(8, 3),), False),
        ((item(-1, 3),), False),
        ((item(0, 0),), False),
        ((item(0, 1, ""),), False),
        ((replace(item(0, 1), modality="smell"),), False),
        ((item(0, 1, data=b"x" * MAX_ITEM_BYTES), item(1, 1, data=b"x")), False),
    ],
)
def test_what_a_node_tells_of_media_is_checked(media: tuple[MediaItem, ...], sound: bool) -> None:
    assert RenderedPrompt((1,) * 10, media).sound is sound


@pytest.mark.parametrize(("offset", "sound"), [(0, True), (-6, True), (-7, False), (1, False)])
def test_later_tokens_are_placed_at_most_as_far_back_as_media_are_long(offset: int, sound: bool) -> None:
    assert RenderedPrompt((1,) * 10, (item(2, 4),), offset).sound is sound


def test_the_first_tokens_of_a_prompt_have_its_blocks() -> None:
    media = [item(1, 6, "a", b"data"), item(9, 2, "b", b"data")]
    whole = block_extras(media, 4)
    for length in range(0, 16, 4):
        within = media_within(media, length)
        assert block_extras(within, 4) == {number: each for number, each in whole.items() if number < length // 4}
        assert RenderedPrompt((1,) * length, within).sound
        assert not any(each.data for each in within)


def test_data_travel_behind_a_message_and_are_put_back() -> None:
    items = (item(0, 1, data=b"x" * 300), replace(item(1, 1, "b"), file=b"file"))
    pieces = with_data(pack(RenderedPrompt((1, 2), without_data(items))), items)
    assert any(piece is items[0].data for piece in pieces), "data are not copied"
    message, *datas = FrameReader().feed(b"".join(pieces))
    assert message.media == without_data(items)
    assert joined(message.media, datas) == items
    for wrong in ([], datas[:1], [*datas, b""], ["text", b""]):
        with pytest.raises(WireError):
            joined(message.media, wrong)
    assert with_files(message.media, (b"", b"file")) == tuple(replace(each, data=b"") for each in items)
    with pytest.raises(WireError):
        with_files(message.media, (b"",))


def test_too_many_media_are_not_sound() -> None:
    many = tuple(item(at, 1) for at in range(MAX_ITEMS + 1))
    assert RenderedPrompt((1,) * 100, many[:-1]).sound
    assert not RenderedPrompt((1,) * 100, many).sound


def test_an_item_of_another_type_is_refused_by_the_wire() -> None:
    assert unpack(pack(RenderedPrompt((1,), (item(0, 1),)))) == RenderedPrompt((1,), (item(0, 1),))
    with pytest.raises(WireError):
        unpack(pack(RenderedPrompt((1,), (("image", "a", 0, 1, b""),))))  # type: ignore[arg-type]
    with pytest.raises(WireError):
        unpack(pack(item(0, "1")))  # type: ignore[arg-type]
