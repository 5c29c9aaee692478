"""Which files a request walks through: those whose functions run on its behalf, in its own tasks."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
_WALKING: ContextVar[Walk | None] = ContextVar("walking", default=None)


class Walk:
    """Follows what is called inside `with`, and what tasks begun there call, until `stop` or the end of it. `files`:
    in order of first call, relative to the repository. What runs beside it (polls, other requests) does not count."""

    def __init__(self, *folders: str) -> None:
        self._roots = tuple(f"{ROOT / folder}/" for folder in folders)
        self._seen: dict[str, None] = {}

    @property
    def files(self) -> list[str]:
        return [str(Path(path).relative_to(ROOT)) for path in self._seen]

    def __enter__(self) -> Walk:
        self._token = _WALKING.set(self)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        _WALKING.reset(self._token)

    def stop(self) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        # A file that is newer than the installation is imported through its package's link.
        path = frame.f_code.co_filename.replace(f"{ROOT}/kvferry/", f"{ROOT}/")
        if event == "call" and path.startswith(self._roots) and _WALKING.get() is self:
            self._seen.setdefault(path)
