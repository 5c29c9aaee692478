"""FamilyEncoder, a MediaEncoder for one model family: renders chats to token ids and media, and runs the tower."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from kvferry.engine.media.chat import ChatRenderer
from kvferry.engine.media.embedding_rows import EmbeddingRows
from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.media_family import Grid, MediaFamily
from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.media import MediaItem, RenderedPrompt, RenderRequest


@dataclass(frozen=True, slots=True)
class _Medium:
    """Content of an item's data: the medium's grid, and text tokens among its own, by their place."""

    grid: Grid
    texts: tuple[tuple[int, int], ...] = ()

    def packed(self) -> bytes:
        found: bytes = msgpack.packb([self.grid, self.texts])
        return found

    @classmethod
    def of(cls, item: MediaItem) -> _Medium:
        """Unpack an item's data. Raises InvalidRequest if they are damaged."""
        try:
            grid, texts = msgpack.unpackb(item.data, use_list=False)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            problem = f"the data of the {item.modality} {item.hash} are damaged: {error}"
            raise InvalidRequest(problem, param="messages") from error
        return cls(grid, texts)


class FamilyEncoder(MediaEncoder):
    """Implements `MediaEncoder` for the modality of a family.

    embeddings: rows of text tokens among a medium's own; None for a family without any. An item's rows depend on the
    item alone, so media are encoded one by one."""

    def __init__(
        self,
        family: MediaFamily,
        chats: ChatRenderer,
        tokenizer: TextTokenizer,
        hidden: int,
        embeddings: EmbeddingRows | None,
    ) -> None:
        self.modalities = frozenset((family.modality,))
        self.width = hidden * (1 + family.levels)
        self.bidirectional = family.bidirectional
        self._family, self._chats, self._embeddings = family, chats, embeddings
        self._library = tokenizer.library
        self._token_id = self._library.token_to_id(family.token)

    def render(self, request: RenderRequest) -> RenderedPrompt:
        rendered = self._chats.of(request.template).render(request.chat)
        if len(request.files) != len(rendered.media):
            counts = f"{len(rendered.media)} images and audios, and {len(request.files)} files came with it"
            raise InvalidRequest(f"the chat has {counts}", param="messages")
        for medium in rendered.media:
            if medium.modality not in self.modalities:
                raise InvalidRequest(f"{medium.field}: the model takes no {medium.modality}", param=medium.field)
        fields = [medium.field for medium in rendered.media]
        grids = self._family.grids(zip(request.files, fields, strict=True))
        text, spans = rendered.texts[0], []
        for grid, behind in zip(grids, rendered.texts[1:], strict=True):
            shown = self._family.placeholders(grid)
            text += shown.before
            spans.append((len(text), len(text) + len(shown.own)))
            text += f"{shown.own}{shown.behind}{behind}"
        (found,) = self._library.encode_batch([text], add_special_tokens=False)  # the plain `encode` keeps the GIL
        items = [self._item(*each, found) for each in zip(request.files, grids, spans, strict=True)]
        return RenderedPrompt(tuple(found.ids), tuple(items))

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        return [self._encoded(item) for item in items]

    def rope_positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        parts: list[torch.Tensor] = []
        place = position = 0
        for item in media:
            own = self._family.positions(_Medium.of(item).grid)
            if own is None:
                return None
            parts += [_line(position, item.offset - place), own + position + item.offset - place]
            position, place = int(parts[-1].max()) + 1, item.offset + item.length
        return torch.cat((*parts, _line(position, len(token_ids) - place)), 1) if media else None

    def _item(self, file: bytes, grid: Grid, span: tuple[int, int], found: Any) -> MediaItem:
        """Return the item of a medium whose own text is this range of the encoded text."""
        offset, end = found.char_to_token(span[0]), found.char_to_token(span[1] - 1) + 1
        ids, modality = found.ids[offset:end], self._family.modality
        texts = tuple((place, each) for place, each in enumerate(ids) if each != self._token_id)
        data = _Medium(grid, texts).packed()
        name = hashlib.sha256(b"%b%b%b" % (modality.encode(), hashlib.sha256(file).digest(), data)).hexdigest()
        return MediaItem(modality, name, offset, len(ids), data, file)

    def _encoded(self, item: MediaItem) -> torch.Tensor:
        medium = _Medium.of(item)
        rows = self._family.encoded(item.file)
        if len(rows) + len(medium.texts) != item.length:
            raise InvalidRequest(
                f"the {item.modality} {item.hash} does not have {item.length} tokens", param="messages"
            )
        if not medium.texts or self._embeddings is None:
            return rows
        places = torch.tensor([place for place, _ in medium.texts], device=rows.device)
        whole = rows.new_empty(item.length, self.width)
        whole[places] = torch.stack([self._embeddings[token_id] for _, token_id in medium.texts])
        own = torch.ones(item.length, dtype=torch.bool, device=rows.device).index_fill_(0, places, False)
        whole[own] = rows
        return whole


def _line(start: int, count: int) -> torch.Tensor:
    """Return int64 [3, count], positions of text from `start` on."""
    return torch.arange(start, start + count).expand(3, -1)
