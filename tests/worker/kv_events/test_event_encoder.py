"""Encoding of a pool's changes: runs of blocks, blocks whose tokens come late, blocks that are gone."""

from __future__ import annotations

from kvferry.engine.block_contents import BlockContents
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.worker.kv_events.event_encoder import EventEncoder, short

SIZE = 2
TOKENS = tuple(range(10))
HASHES = chain(root_hash("f"), TOKENS, SIZE)


def noted(contents: BlockContents, tokens: tuple[int, ...], hashes: list[bytes], adapter: str = "") -> None:
    """Note a chain as if a request had computed it."""
    job = Job("r", 0, tokens, len(tokens), Generate(SamplingParams()), "router", adapter=adapter)
    contents.note(job, tokens, hashes, SIZE)


def encoder() -> tuple[BlockContents, EventEncoder]:
    """An encoder and the contents that it reads."""
    contents = BlockContents()
    return contents, EventEncoder(contents, SIZE, lambda adapter_id: f"named {adapter_id}")


def test_blocks_with_media_tell_their_hashes_and_places() -> None:
    contents, events = encoder()
    media = (MediaItem("image", "picture", 3, 2, b""), MediaItem("image", "other", 5, 1, b""))
    job = Job("r", 0, TOKENS, len(TOKENS), Generate(SamplingParams()), "router", media=media)
    contents.note(job, TOKENS, HASHES, SIZE)
    (event,) = events.changed(HASHES, ())
    assert event["extra_keys"] == [None, [("picture", 1)], [("picture", -1), ("other", 1)], None, None]


def test_consecutive_blocks_are_one_event() -> None:
    contents, events = encoder()
    noted(contents, TOKENS, HASHES)
    (event,) = events.changed(HASHES, ())
    assert event["block_hashes"] == [short(each) for each in HASHES]
    assert event["token_ids"] == list(TOKENS)
    assert event["parent_block_hash"] is None
    assert events.changed(HASHES, ()) == [], "told once"


def test_a_fork_begins_another_event() -> None:
    contents, events = encoder()
    noted(contents, TOKENS, HASHES)
    other = chain(root_hash("f"), (0, 1, 8, 9), SIZE)
    noted(contents, (0, 1, 8, 9), other)
    first, second = events.changed([*HASHES, other[1]], ())
    assert len(first["block_hashes"]) == 5
    assert (second["parent_block_hash"], second["token_ids"]) == (short(HASHES[0]), [8, 9])


def test_blocks_that_came_by_their_hash_are_told_with_the_first_computed_one_behind_them() -> None:
    contents, events = encoder()
    assert events.changed(HASHES[:3], ()) == []
    noted(contents, TOKENS[:8], HASHES[:4])
    (event,) = events.changed([HASHES[3]], ())
    assert event["token_ids"] == list(TOKENS[:8])


def test_only_told_blocks_are_removed() -> None:
    contents, events = encoder()
    noted(contents, TOKENS[:4], HASHES[:2])
    events.changed(HASHES[:2], ())
    (event,) = events.changed((), [HASHES[4], HASHES[1]])
    assert event["type"] == "BlockRemoved"
    assert event["block_hashes"] == [short(HASHES[1])]
    contents.forget(HASHES[1])
    assert events.changed([HASHES[1]], ()) == [], "gone again before it was told"


def test_after_a_clearing_all_blocks_are_told_anew() -> None:
    contents, events = encoder()
    noted(contents, TOKENS, HASHES)
    events.changed(HASHES, ())
    assert events.cleared() == {"type": "AllBlocksCleared"}
    (event,) = events.changed(contents.hashes(), ())
    assert event["token_ids"] == list(TOKENS)


def test_an_adapter_is_told_by_its_name_with_each_block() -> None:
    contents, events = encoder()
    noted(contents, TOKENS[:4], HASHES[:2], adapter="id")
    (event,) = events.changed(HASHES[:2], ())
    assert event["lora_name"] == "named id"
    assert event["extra_keys"] == [["named id"], ["named id"]]
