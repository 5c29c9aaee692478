"""Batch: state of one batch as the API shows it and as it is stored."""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.protocol.errors import NotFound

ENDED = ("completed", "failed", "cancelled", "expired")
"""Final states of a batch."""
WINDOW_S = 24 * 3600
"""Time within which a batch must end, in seconds."""
_ID = re.compile(r"batch_[0-9a-f]{32}")


@dataclass(slots=True)
class Batch:
    """Batch as the API shows it, with its `tenant`; times are seconds since 1970.

    After creation only its holder changes it."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: str = "validating"
    metadata: dict[str, str] | None = None
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    tenant: str = ""

    @classmethod
    def new(cls, endpoint: str, file_id: str, tenant: str, metadata: dict[str, str] | None) -> Batch:
        """Return a new batch, whose input is not validated yet."""
        now = int(time.time())
        return cls(
            f"batch_{uuid.uuid4().hex}", endpoint, file_id, now, now + WINDOW_S, metadata=metadata, tenant=tenant
        )

    def move(self, status: str) -> None:
        """Change the state and record the time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def fail(self, errors: list[dict[str, Any]]) -> None:
        """Change to the state failed, with these errors."""
        self.move("failed")
        self.errors = {"object": "list", "data": errors}

    def shown(self) -> dict[str, Any]:
        """Return the batch as the API shows it."""
        fields = {"object": "batch", **asdict(self)}
        del fields["tenant"]
        return fields

    def record(self) -> str:
        """Return the batch as JSON, as it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def of_record(cls, record: bytes) -> Batch:
        """Return the batch of a record; raise ValueError or TypeError if it is not one."""
        return cls(**json.loads(record))

    def file_id(self, *, ok: bool) -> str:
        """Return the id of the output file if `ok`, else of the error file; it is the same for each holder."""
        return "file-" + hashlib.sha256(f"{self.id}/{'output' if ok else 'errors'}".encode()).hexdigest()[:32]

    def file_name(self, *, ok: bool) -> str:
        """Return the name of the output file if `ok`, else of the error file."""
        return f"{self.id}_{'output' if ok else 'error'}.jsonl"


def check_batch_id(batch_id: str) -> None:
    """Raise NotFound unless this can be the id of a batch."""
    if not _ID.fullmatch(batch_id):
        raise no_batch(batch_id)


def no_batch(batch_id: str) -> NotFound:
    """Return the API's error for an unknown batch."""
    return NotFound(f"there is no batch {batch_id!r}", param="batch_id")
