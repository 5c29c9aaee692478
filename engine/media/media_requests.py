"""MediaRequests: checks an engine's requests with media, and asks for the embeddings that they will compute with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from kvferry.engine.media.encoder import EmbeddingSource, MediaEncoder
from kvferry.engine.request import Key, Request
from kvferry.protocol.errors import GrantRefused, InvalidRequest, KvferryError, StepFailed, reason
from kvferry.protocol.media import RenderedPrompt
from kvferry.protocol.messages import Job

log = logging.getLogger("kvferry.engine")

Call = Callable[[], None]


class MediaRequests:
    """Media of an engine's requests. Owned by the engine thread.

    A request asks for rows when it is about to get blocks, so it never asks for those of media whose K/V is cached.

    encoder: of the model; None: it reads text alone. source: of rows. `arrived` and `failed` are called once the rows
    of a request are here or cannot come: at once, on any thread, until `attach`."""

    def __init__(
        self,
        encoder: MediaEncoder | None = None,
        source: EmbeddingSource | None = None,
        arrived: Callable[[Key], None] = lambda key: None,
        failed: Callable[[Key, KvferryError], None] = lambda key, error: None,
    ) -> None:
        self.encoder, self.source = encoder, source
        self._arrived, self._failed = arrived, failed
        self._post: Callable[[Call], None] = lambda call: call()

    def attach(self, post: Callable[[Call], None]) -> None:
        """Run these calls through `post` from now on: on the thread that owns the engine, before its next step."""
        self._post = post

    def check(self, job: Job) -> None:
        """Raise InvalidRequest unless this engine can compute with the job's media."""
        if not job.media and not job.rope_offset:
            return
        if self.encoder is None:
            raise InvalidRequest("this node's model takes no images, audio or video", param="messages")
        if not RenderedPrompt(job.token_ids[: job.prompt_len], job.media, job.rope_offset).sound:
            raise InvalidRequest("the media must lie in the prompt one after the other", param="messages")
        for item in job.media:
            if item.modality not in self.encoder.modalities:
                raise InvalidRequest(f"this node's model takes no {item.modality}", param="messages")

    def enter(self, request: Request) -> None:
        """Prepare a new request."""
        if request.media is not None and self.encoder is not None:
            request.media.bidirectional = self.encoder.bidirectional

    def request_rows(self, request: Request, start: int) -> None:
        """Ask for the rows that the tokens from `start` on need; the request awaits them.

        Its media have no data if its prompt was computed elsewhere. It then fails, and the router retries with them."""
        media, key = request.media, request.key
        assert media is not None
        places = media.missing(start)
        items = [media.items[place] for place in places]

        def ready(outcome: Sequence[torch.Tensor] | Exception) -> None:
            self._post(lambda: self._ready(request, places, outcome))

        try:
            if not all(item.data for item in items):
                raise GrantRefused("embeddings of the prompt's media are missing, and their blocks no longer cached")
            self._place(request)
            assert self.source is not None
            left_s = request.job.deadline_s - (time.monotonic() - request.arrived)
            media.cancel = self.source.submit(request.root, items, ready, left_s, request.job.encoder)
        except Exception as error:
            known = _known(error)
            self._post(lambda: self._failed(key, known))

    def _place(self, request: Request) -> None:
        """Set the rotary positions of a request's tokens up to the last medium's end."""
        media, job = request.media, request.job
        assert media is not None
        assert self.encoder is not None
        if media.rope is None:
            found = self.encoder.rope_positions(job.token_ids[: job.prompt_len], media.items)
            media.rope = None if found is None else found[:, : media.end].numpy()

    def _ready(self, request: Request, places: Sequence[int], outcome: Sequence[torch.Tensor] | Exception) -> None:
        """Take rows, unless the request has ended meanwhile: another one of the same key has media of its own."""
        if isinstance(outcome, Exception):
            self._failed(request.key, _known(outcome))
            return
        assert request.media is not None
        request.media.rows.update(zip(places, outcome, strict=True))
        request.media.cancel = None
        self._arrived(request.key)


def _known(error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error
    log.error("the media of a request cannot be encoded", exc_info=error)
    return StepFailed(f"the media cannot be encoded: {reason(error)}")
