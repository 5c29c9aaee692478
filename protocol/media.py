"""Messages about a prompt's images, audio and video: items as prepared by an engine, rendering, encoding, hashes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.protocol.hashing import NO_EXTRAS
from kvferry.protocol.wire import WireError, message

MODALITIES = ("image", "audio", "video")
"""Kinds of media that a prompt may hold."""
TRANSCRIPTION = "transcription"
"""Entry in a lease's modalities: the engine transcribes speech."""
COMPRESSED_AUDIO = "compressed_audio"
"""Entry in a lease's modalities: the engine bounds the length of FLAC and Ogg in chats while it decodes them."""
MAX_ITEMS, MAX_ITEM_BYTES = 64, 48 * 2**20
"""Maximum number of media of a prompt, and of their total bytes, which travel in one message."""
MAX_PIXELS = 2**25
"""Maximum number of pixels of one image: 33.5 million."""


_BYTES, _BIN_32 = struct.Struct(">BI"), 0xC6
"""Head of bytes in msgpack: their type and length."""


@message(64, checked=True)
@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, audio or video of a prompt, prepared by an engine for engines of the same fingerprint.

    hash            engine's name of its content
    offset, length  range of the prompt's tokens that stand for it
    data            what the engine needs to encode it, in the engine's own form; it is passed on unread
    file            the medium's file if the engine needs it, too

    Both travel after the message, see `with_data`."""

    modality: str
    hash: str
    offset: int
    length: int
    data: bytes
    file: bytes = b""

    @property
    def size(self) -> int:
        """Return the bytes of `data` and `file`."""
        return len(self.data) + len(self.file)


@message(65, checked=True)
@dataclass(frozen=True, slots=True)
class RenderRequest:
    """Router → node, `POST /attempts/render`: make the prompt of a chat with media. Answered by a RenderedPrompt.

    chat        JSON of messages, tools and variables of the template; each medium is a data URL that ends before its
                data
    adapter     id of the LoRA adapter; empty: none
    deadline_s  seconds left for the request when the message was sent
    template    chat template in place of the model's own; empty: the model's
    files       the media's files, in order; they travel after the message, see `followed_by`
    """

    chat: bytes
    adapter: str = ""
    deadline_s: float = 600.0
    template: str = ""
    files: tuple[bytes, ...] = ()


@message(66, checked=True)
@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Node → router: a prompt's tokens and its media in order of their offsets.

    rope_offset: what is added to the places of tokens after the last medium to get their rotary positions; 0 unless
    media take fewer positions than tokens. needs_files: each item's file is that of its place in the RenderRequest, and
    is not sent back."""

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...]
    rope_offset: int = 0
    needs_files: bool = False

    @property
    def sound(self) -> bool:
        """Return whether the media lie in the prompt one after the other, within the bounds of a message."""
        end = 0
        for item in self.media:
            if item.modality not in MODALITIES or not item.hash or item.offset < end or item.length < 1:
                return False
            end = item.offset + item.length
        size = sum(item.size for item in self.media)
        within = end <= len(self.token_ids) and -end <= self.rope_offset <= 0
        return within and len(self.media) <= MAX_ITEMS and size <= MAX_ITEM_BYTES


@message(76, checked=True)
@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Router → encode node, `POST /attempts/encode`: encode these media; other nodes fetch the rows.

    Answered by Encoded. Their data follow as in a job, see `with_data`.

    root        of the block hashes of the request, see `hashing.root_hash`
    deadline_s  seconds left for the request when the message was sent
    """

    root: bytes
    media: tuple[MediaItem, ...]
    deadline_s: float = 600.0


@message(77, checked=True)
@dataclass(frozen=True, slots=True)
class Encoded:
    """Encode node → router: the embeddings of all media are in its blocks; it computed those of `computed` media."""

    computed: int


def without_data(items: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Return the media as they are inside a message."""
    return tuple(replace(item, data=b"", file=b"") for item in items)


def media_within(items: Sequence[MediaItem], length: int) -> tuple[MediaItem, ...]:
    """Return the parts of media that lie in a prompt's first `length` tokens, without data.

    Extras of its blocks are the same: they depend on where media begin."""
    inside = (item for item in items if item.offset < length)
    return tuple(replace(each, length=min(each.length, length - each.offset), data=b"", file=b"") for each in inside)


def followed_by(message: bytes, datas: Iterable[bytes]) -> list[bytes]:
    """Return the pieces of a packed message with data after it, each as a message of bytes.

    Inside the message each level of nesting would copy the data, which takes a tenth of a second for 16 MiB."""
    pieces = [message]
    for data in datas:
        pieces += (_BYTES.pack(_BIN_32, len(data)), data)
    return pieces


def with_data(message: bytes, items: Sequence[MediaItem]) -> list[bytes]:
    """Return the pieces of a packed message with the data and files of its media after it, see `followed_by`."""
    return followed_by(message, (part for item in items for part in (item.data, item.file)))


def joined(items: Sequence[MediaItem], parts: Sequence[Any]) -> tuple[MediaItem, ...]:
    """Return the media of a message with the data and files that came after it. Raises WireError unless they fit."""
    if len(parts) != 2 * len(items) or not all(isinstance(part, bytes) for part in parts):
        raise WireError(f"{len(parts)} messages after one with {len(items)} media")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return tuple(replace(item, data=data, file=file) for item, (data, file) in zip(items, pairs, strict=True))


def with_files(items: Sequence[MediaItem], files: Sequence[bytes]) -> tuple[MediaItem, ...]:
    """Return media with these files, one for each. Raises WireError unless they fit."""
    if len(files) != len(items):
        raise WireError(f"{len(items)} media of {len(files)} files")
    return tuple(replace(item, file=file) for item, file in zip(items, files, strict=True))


def extras_of(keys: Iterable[tuple[str, int]]) -> bytes:
    """Return the extras of a block in which these media lie.

    keys: for each in order its hash, and its first token's place relative to the block's."""
    return b"".join(b"%d:%s@%d;" % (len(name), name, place) for name, place in ((h.encode(), at) for h, at in keys))


def block_extras(media: Sequence[MediaItem], block_size: int) -> Mapping[int, bytes]:
    """Return the extras of all blocks in which media of a prompt lie, by the blocks' numbers."""
    if not media:
        return NO_EXTRAS
    keys: dict[int, list[tuple[str, int]]] = {}
    for item in media:
        for number in range(item.offset // block_size, (item.offset + item.length - 1) // block_size + 1):
            keys.setdefault(number, []).append((item.hash, item.offset - number * block_size))
    return {number: extras_of(each) for number, each in keys.items()}


def media_in(media: Sequence[MediaItem], start: int, count: int) -> list[tuple[str, int]]:
    """Return hash and place, relative to `start`, of the media that have a part in `count` tokens from `start` on."""
    inside = (item for item in media if item.offset < start + count and start < item.offset + item.length)
    return [(item.hash, item.offset - start) for item in inside]
