"""A toy model that sees: rows of media and rotary positions change its output. And its encoder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.media.encoder import Ready
from kvferry.engine.media.local_embeddings import LocalEmbeddings
from kvferry.engine.models.base import KeepGoing, SuspendedPass
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.media import MediaItem, RenderedPrompt, RenderRequest
from kvferry.protocol.messages import DecodeTarget, Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.toy import VOCAB, ToyModel, make_engine, toy_next

PLACEHOLDER = 100
"""Token that stands for a part of an image."""


def value_of(token: int, places: Sequence[int]) -> int:
    """What the cache holds of a token, or of a row, at these rotary positions."""
    time, height, width = places
    return token + 1000 * (time + 2 * height + 3 * width)


class SeeingToy(ToyModel):
    """Keeps ids, or rows in their place, with their rotary positions, in the cache. plans: of all steps."""

    def __init__(self) -> None:
        self.plans: list[BatchPlan] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        self.plans.append(plan)
        values = token_ids.clone()
        if plan.media is not None:
            values[plan.media.tokens] = plan.media.rows[:, 0].long()
        places = plan.positions.tile(3, 1) if plan.rope_positions is None else plan.rope_positions
        return super().forward(values + 1000 * (places[0] + 2 * places[1] + 3 * places[2]), kv, plan)


class FakeEncoder:
    """Implements `MediaEncoder`: rows follow from the bytes of an item.

    encoded: hashes of the items so far. gate: what `encode` waits for. rope: whether positions are two-dimensional."""

    modalities = frozenset(("image",))
    width = 1

    def __init__(self, *, rope: bool = False, bidirectional: bool = False) -> None:
        self.rope, self.bidirectional = rope, bidirectional
        self.encoded: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def render(self, request: RenderRequest) -> RenderedPrompt:
        """Each character of a text is a token, each image five."""
        tokens, files = list[int](), iter(request.files)
        media: list[MediaItem] = []
        for message in json.loads(request.chat)["messages"]:
            content = message["content"]
            parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                if part["type"] == "text":
                    tokens += [ord(letter) % PLACEHOLDER for letter in part["text"]]
                else:
                    item = image(next(files), len(tokens))
                    media.append(item)
                    tokens += [PLACEHOLDER] * item.length
        return RenderedPrompt(tuple(tokens), tuple(media))

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        assert torch.is_inference_mode_enabled()
        assert self.gate.wait(20)
        self.encoded += [item.hash for item in items]
        if b"broken" in items[0].data:
            raise InvalidRequest("the image is broken", param="messages")
        return [torch.tensor(rows_of(item))[:, None] for item in items]

    def rope_positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        return torch.tensor(places_of(len(token_ids), media)).T.contiguous() if self.rope else None


def rows_of(item: MediaItem) -> list[float]:
    digest = hashlib.sha256(item.data).digest()
    return [200.0 + digest[at % 32] + at for at in range(item.length)]


def places_of(length: int, media: Sequence[MediaItem]) -> list[tuple[int, int, int]]:
    """Rotary positions: images are rows of two tokens, and later tokens go on behind the largest position."""
    places: list[tuple[int, int, int]] = []
    following = 0
    for token in range(length):
        item = next((each for each in media if each.offset <= token < each.offset + each.length), None)
        if item is None:
            places.append((following,) * 3)
            following += 1
            continue
        at = token - item.offset
        places.append((following, following + at // 2, following + at % 2))
        if at == item.length - 1:
            following += at // 2 + 1
    return places


def image(data: bytes, offset: int, length: int = 5) -> MediaItem:
    return MediaItem("image", hashlib.sha256(data).hexdigest(), offset, length, data)


def prompt_of(*parts: Sequence[int] | bytes, length: int = 5) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Tokens and media of a prompt of texts and images."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, bytes):
            media.append(image(part, len(tokens), length))
            tokens += [PLACEHOLDER] * length
        else:
            tokens += part
    return tokens, tuple(media)


def media_job(
    name: str, prompt: tuple[list[int], tuple[MediaItem, ...]], max_tokens: int = 8, *, rope: bool = False, **more: Any
) -> Job:
    """A greedy job."""
    tokens, media = prompt
    offset = places_of(len(tokens) + 1, media)[-1][0] - len(tokens) if rope else 0
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    own: dict[str, Any] = {"attempt": 0, "namespace": ""} | more
    return Job(
        name, token_ids=tuple(tokens), prompt_len=len(tokens), work=Generate(sampling), router_id="router",
        media=media, rope_offset=offset, **own,
    )  # fmt: skip


def seen(prompt: tuple[list[int], tuple[MediaItem, ...]], count: int, *, rope: bool = False) -> list[int]:
    """The greedy continuation of a prompt with images."""
    tokens, media = prompt
    values = [float(token) for token in tokens]
    for item in media:
        values[item.offset : item.offset + item.length] = rows_of(item)
    shown = places_of if rope else lambda length, media: [(at,) * 3 for at in range(length)]
    made: list[int] = []
    for _ in range(count):
        known = [*values, *made]
        places = shown(len(known), media)
        made.append(toy_next([value_of(int(value), at) for value, at in zip(known, places, strict=True)]))
    return made


class HeldSource:
    """An `EmbeddingSource` whose answers a test gives: `calls` are its open calls, `cancelled` counts those left."""

    def __init__(self) -> None:
        self.calls: list[tuple[Sequence[MediaItem], Ready]] = []
        self.cancelled = 0

    def submit(
        self,
        root: bytes,
        items: Sequence[MediaItem],
        ready: Ready,
        deadline_s: float,
        encoder: DecodeTarget | None = None,
    ) -> Callable[[], None]:
        self.calls.append((items, ready))

        def cancel() -> None:
            self.cancelled += 1

        return cancel

    def answer(self, outcome: Exception | None = None) -> None:
        """Give rows to the oldest call, or this error."""
        items, ready = self.calls.pop(0)
        ready(outcome or [torch.tensor(rows_of(item))[:, None] for item in items])


def seeing_engine(encoder: FakeEncoder | None = None, source: Any = None, **sizes: Any) -> Engine:
    """An engine around the toy model that sees; source: by default one whose rows are here at once."""
    own = encoder or FakeEncoder()
    return make_engine(model=SeeingToy(), encoder=own, embeddings=source or Here(own), **sizes)


class Here:
    """An `EmbeddingSource` that makes rows at once."""

    def __init__(self, encoder: FakeEncoder) -> None:
        self._encoder = encoder

    def submit(
        self,
        root: bytes,
        items: Sequence[MediaItem],
        ready: Ready,
        deadline_s: float,
        encoder: DecodeTarget | None = None,
    ) -> Callable[[], None]:
        with torch.inference_mode():
            ready(self._encoder.encode(items))
        return lambda: None


def local(encoder: FakeEncoder, cache_bytes: int = 2**20) -> LocalEmbeddings:
    return LocalEmbeddings(encoder, cache_bytes, torch.device("cpu"))


assert PLACEHOLDER < VOCAB
