"""Admission check of jobs and of handed-over tokens: length, vocabulary, kind of work, and earlier cancellation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvferry.protocol.errors import Cancelled, ContextLengthExceeded, InvalidRequest, TransferFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.work import Generate

REMEMBERED_CANCELS = 8192
"""Requests whose cancellation is remembered."""


class Admission:
    """Admission check that refuses jobs with a named error.

    longest: limit of a prompt and its output, in tokens. takes: kinds of work that `model` does. check_media: raises
    InvalidRequest for media that the engine does not take."""

    def __init__(
        self,
        longest: int,
        vocab_size: int,
        takes: tuple[type, ...],
        model: str,
        check_media: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._check_media = check_media
        self._longest = longest
        self._takes, self._model = takes, model
        self._vocab_size = vocab_size
        self._cancelled: OrderedDict[str, int] = OrderedDict()

    def close(self, request_id: str, attempt: int) -> None:
        """Refuse all attempts of the request up to `attempt` from now on."""
        self._cancelled[request_id] = max(attempt, self._cancelled.pop(request_id, -1))
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    def check(self, job: Job) -> None:
        """Raise the error that says why the job is refused."""
        if self._cancelled.get(job.request_id, -1) >= job.attempt:
            raise Cancelled("the request was cancelled before it arrived")
        work = job.work
        if not isinstance(work, self._takes):
            raise InvalidRequest(f"the model {self._model} does not {type(work).__name__.lower()}", param="model")
        longest = self._longest - isinstance(work, Generate)
        if not 0 <= job.ahead <= longest - len(job.token_ids) or not job.token_ids:
            raise ContextLengthExceeded(
                f"the prompt has {len(job.token_ids)} tokens; this node takes 1 to {longest}", param="prompt"
            )
        if not 0 < job.prompt_len <= len(job.token_ids):
            raise InvalidRequest(f"prompt_len must be 1 to the number of tokens, got {job.prompt_len}", param="prompt")
        self.check_tokens(job.token_ids)
        self._check_media(job)
        if isinstance(work, Generate):
            work.params.validate(self._vocab_size)
        else:
            work.validate()

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequest for ids outside the vocabulary: they would break the step for the whole batch."""
        if not self._has(token_ids):
            raise InvalidRequest(f"token ids must be at least 0 and below {self._vocab_size}", param="prompt")

    def check_first(self, job: Job, token_ids: Sequence[int], covered: int, room: int) -> None:
        """Raise TransferFailed unless the request can continue after these tokens, the last of them not computed.

        covered: leading tokens whose K/V arrived; 0: those of the job. room: capacity of the arrived blocks, in tokens.
        An error here is the other node's fault, not the client's, and the request may fit elsewhere."""
        if not self._has(token_ids):
            raise TransferFailed("the hand-over has token ids outside the vocabulary")
        known, total = len(job.token_ids), len(job.token_ids) + len(token_ids)
        if not known < total < self._longest or job.work.ends_on_prompt(total - job.prompt_len - 1):
            raise TransferFailed(f"the hand-over of {len(token_ids)} tokens exceeds the request's length limit")
        if covered and not known <= covered <= min(room, total - 1):
            raise TransferFailed(f"the hand-over claims the K/V of {covered} tokens, which is impossible")

    def _has(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or 0 <= min(token_ids) <= max(token_ids) < self._vocab_size
