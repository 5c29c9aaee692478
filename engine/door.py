"""Which jobs an engine takes: those that fit its context and vocabulary and were not cancelled before they came."""

from __future__ import annotations

from collections import OrderedDict

from protocol.errors import Cancelled, ContextLengthExceeded, InvalidRequest, KvferryError
from protocol.messages import Job

REMEMBERED_CANCELS = 8192


class Door:
    """Refuses jobs by name. longest: tokens of a prompt and its output."""

    def __init__(self, longest: int, vocab_size: int) -> None:
        self._longest = longest
        self._vocab_size = vocab_size
        self._cancelled: OrderedDict[str, int] = OrderedDict()

    def close(self, request_id: str, attempt: int) -> None:
        """Refuse all attempts of the request up to `attempt` from now on."""
        self._cancelled[request_id] = max(attempt, self._cancelled.pop(request_id, -1))
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    def refusal(self, job: Job) -> KvferryError | None:
        """Why the job may not come in; None: it may."""
        if self._cancelled.get(job.request_id, -1) >= job.attempt:
            return Cancelled("the request was cancelled before it arrived")
        if not 0 < len(job.token_ids) < self._longest:
            return ContextLengthExceeded(
                f"the prompt has {len(job.token_ids)} tokens; this node takes 1 to {self._longest - 1}", param="prompt"
            )
        return self._out_of_range(job)

    def _out_of_range(self, job: Job) -> KvferryError | None:
        """Ids that the model does not have would break the step for everybody in it."""
        if min(job.token_ids) < 0 or max(job.token_ids) >= self._vocab_size:
            return InvalidRequest(f"token ids must be at least 0 and below {self._vocab_size}", param="prompt")
        try:
            job.params.validate(self._vocab_size)
        except InvalidRequest as error:
            return error
        return None
