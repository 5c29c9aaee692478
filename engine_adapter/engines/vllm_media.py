"""Media of vLLM's token interface: its render endpoint, and the features that it makes of images, audio and video."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.protocol.errors import InvalidRequest, StepFailed
from kvferry.protocol.media import MAX_ITEM_BYTES, MediaItem, RenderedPrompt, RenderRequest
from kvferry.protocol.speech import SpeechRequest

CHAT = "/v1/chat/completions"
TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"


class VllmMedia:
    """Media of one vLLM server. Implements `MeasurableMedia`. model: returns the name of its base model."""

    def __init__(self, http: EngineHttp, model: Callable[[], str]) -> None:
        self._http, self._model = http, model

    async def render(self, request: RenderRequest, adapter: str = "") -> RenderedPrompt:
        """Return the prompt that vLLM makes of a chat, with the template that it was started with.

        Raises InvalidRequest if its media become too large."""
        chat = await with_files(request.chat, request.files) if request.files else request.chat
        rendered = with_fields(chat, model=adapter or self._model(), max_tokens=1)
        reported = await self._http.post(f"{CHAT}/render", rendered, None)
        try:
            return RenderedPrompt(tuple(reported["token_ids"]), await items_of(reported.get("features")))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise StepFailed(f"the engine's prompt cannot be read: {type(error).__name__} {error}") from error

    async def answer(self, chat: bytes, tokens: int, cache_salt: str) -> tuple[int, ...]:
        """Return greedy tokens of the answer to a chat."""
        request = with_fields(
            chat, model=self._model(), max_tokens=tokens, temperature=0.0, ignore_eos=True, cache_salt=cache_salt,
            return_token_ids=True,
        )  # fmt: skip
        reported = await self._http.post(CHAT, request, None)
        return tuple(reported["choices"][0].get("token_ids") or ())

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Ask vLLM's endpoint for audio."""
        body, kind = form_data((*request.fields, ("model", self._model())), request.filename, request.audio)
        await self._http.upload(TRANSLATE if request.translate else TRANSCRIBE, body, kind, begun, deliver)


async def with_files(chat: bytes, files: Sequence[bytes]) -> bytes:
    """Return the JSON of a chat with its files' data behind its data URLs; other work runs in between.

    The data need no escapes and are inserted after JSON encoding, which would read each character.
    Raises InvalidRequest unless there is one file for each URL."""
    given, gap = json.loads(chat), secrets.token_hex(16)
    for message in given["messages"]:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] != "text":
                part[part["type"]]["url"] += gap
    pieces = json.dumps(given, separators=(",", ":")).encode().split(gap.encode())
    if len(pieces) - 1 != len(files):
        raise InvalidRequest(f"the chat names {len(pieces) - 1} media, and {len(files)} files came with it")
    found = [pieces[0]]
    for file, behind in zip(files, pieces[1:], strict=True):
        found += (base64.b64encode(file), behind)
        await asyncio.sleep(0)
    return b"".join(found)


def with_fields(chat: bytes, **fields: Any) -> bytes:
    """Return the JSON of a chat with further fields, without reading its media again."""
    return json.dumps(fields, separators=(",", ":")).encode()[:-1] + b"," + chat[1:]


async def items_of(features: dict[str, Any] | None) -> tuple[MediaItem, ...]:
    """Return vLLM's features as media in order. Raises InvalidRequest if they are too large to travel."""
    items: list[MediaItem] = []
    for modality, hashes in ((features or {}).get("mm_hashes") or {}).items():
        assert features
        ranges, datas = features["mm_placeholders"][modality], features["kwargs_data"][modality]
        if sum(len(data) for data in datas) * 3 // 4 > MAX_ITEM_BYTES:
            raise InvalidRequest(f"the {modality} parts become more than {MAX_ITEM_BYTES} bytes of tensors; send less")
        for name, place, data in zip(hashes, ranges, datas, strict=True):
            items.append(MediaItem(modality, name, place["offset"], place["length"], base64.b64decode(data)))
            await asyncio.sleep(0)  # a large item takes a tenth of a second; heartbeats are sent in between
    return tuple(sorted(items, key=lambda item: item.offset))


async def with_features(body: bytes, items: Sequence[MediaItem]) -> bytes:
    """Return the JSON of a request with the features that vLLM takes for these media; other work runs in between."""
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[dict[str, int]]] = {}
    datas: dict[str, list[bytes]] = {}
    for item in items:
        hashes.setdefault(item.modality, []).append(item.hash)
        ranges.setdefault(item.modality, []).append({"offset": item.offset, "length": item.length})
        datas.setdefault(item.modality, []).append(base64.b64encode(item.data))
        await asyncio.sleep(0)
    tensors = b",".join(b'"%s":["%s"]' % (name.encode(), b'","'.join(each)) for name, each in datas.items())
    features = json.dumps({"mm_hashes": hashes, "mm_placeholders": ranges}).encode()
    return b'%s,"features":%s,"kwargs_data":{%s}}}' % (body[:-1], features[:-1], tensors)


def form_data(fields: Iterable[tuple[str, str]], filename: str, file: bytes) -> tuple[bytes, str]:
    """Return the body of a form with these fields and a file named `file`, and its content type."""
    boundary = secrets.token_hex(16)
    parts = [f'--{boundary}\r\ncontent-disposition: form-data; name="{_quoted(name)}"\r\n\r\n{value}\r\n'
             for name, value in fields]  # fmt: skip
    parts.append(
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{_quoted(filename)}"\r\n'
        "content-type: application/octet-stream\r\n\r\n"
    )
    body = b"".join(("".join(parts).encode(), file, f"\r\n--{boundary}--\r\n".encode()))
    return body, f"multipart/form-data; boundary={boundary}"


def _quoted(text: str) -> str:
    """Return a text for a header, as browsers write it."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
