"""Download of models from the Hugging Face hub into its cache.

The library resumes broken downloads and keeps complete files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvferry.protocol.errors import ConfigError, reason

log = logging.getLogger("kvferry.models")

NO_ROOM = os.strerror(errno.ENOSPC).lower()
LINE_S = 10.0
"""Interval between two progress lines where stderr is not a terminal, in seconds."""


CONSOLIDATED = "consolidated*"
"""Files with the same weights under Mistral's own names, which some repositories have beside transformers' files."""


def download(repo: str, patterns: list[str]) -> Path:
    """Return the folder of the repository's matching files. Downloads what the cache lacks.

    Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.logging import disable_propagation

    disable_propagation()
    bar = None if sys.stderr.isatty() else _lines_about(repo)
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=[CONSOLIDATED], tqdm_class=bar))
    except GatedRepoError as error:
        raise ConfigError(f"{repo} is gated; accept its terms, then run: hf auth login", param="model") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo} is neither a local path nor a model on the Hugging Face hub; check its name or, if private, "
            "run: hf auth login",
            param="model",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{repo} is neither a local path nor in the Hugging Face cache, and the hub is unreachable; give a "
            "local directory or .gguf file, or download the model on a machine with a network",
            param="model",
        ) from error
    except Exception as error:
        if _is_full(error):
            raise ConfigError(_no_room(repo), param="model") from error
        raise ConfigError(
            f"cannot get {repo} from the Hugging Face hub: {reason(error)}; complete files are kept, so try again",
            param="model",
        ) from error


def _is_full(error: BaseException | None) -> bool:
    """Return whether the disk was full; the library reports it in several ways."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or NO_ROOM in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _no_room(repo: str) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    existing = next(path for path in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if path.exists())
    left = shutil.disk_usage(existing).free / 1e6
    return (
        f"{repo} does not fit into {HF_HUB_CACHE}, where {left:.0f} MB are free; mount a larger volume there, or "
        "set HF_HOME"
    )


def _lines_about(repo: str) -> type[Any]:
    """Return a tqdm class that draws no bar, and logs a line every LINE_S seconds if it counts bytes."""
    last = time.monotonic()

    class Lines(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._in_bytes = settings.get("unit") == "B"
            settings.pop("name", None)
            super().__init__(*args, **(settings | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal last
            self.n += n or 0
            now = time.monotonic()
            if self._in_bytes and self.total and now - last >= LINE_S:
                last = now
                done, total = self.n / 1e6, self.total / 1e6
                log.info("downloading %s: %.0f of %.0f MB (%.0f %%)", repo, done, total, 100 * done / total)
            return None

    return Lines
