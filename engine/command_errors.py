"""Context manager `answering`: turns any exception of an engine command into an error for the command's caller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.protocol.errors import KvferryError, NodeLost

log = logging.getLogger("kvferry.engine")


@contextmanager
def answering(answer: Callable[[KvferryError], None]) -> Iterator[None]:
    """Turn any exception inside into an answer."""
    try:
        yield
    except KvferryError as error:
        answer(error)
    except Exception as error:
        log.exception("engine command failed")
        answer(NodeLost(f"engine command failed: {error}"))
