"""`kvferry top`: live view of a cluster in a terminal, or one snapshot for a pipe."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from kvferry.cli.top_view import render
from kvferry.protocol.errors import KvferryError
from kvferry.router.dashboard.state import State
from kvferry.router.dashboard.units import seconds

ANSWER_S = 5.0
QUIT_KEYS, CLOSED = frozenset(b"qQ\x03"), b"q"
"""Keys that quit, and the key that represents a closed terminal."""
PIPE_WIDTH = 160
"""Width of the output if it is not a terminal, in columns."""


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Target of `kvferry top`: a router's URL without /v1, its API key and the refresh interval."""

    url: str
    api_key: str
    interval: float


class StateUnavailable(KvferryError):
    """The state of the cluster could not be fetched; the message has the reason."""


def fetch(client: httpx.Client, options: TopOptions) -> State:
    """Fetch the current state from the router. Raises Unseen."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        answer = client.get(f"{options.url.rstrip('/')}/dashboard/state", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise StateUnavailable(f"no answer from {options.url}: {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise StateUnavailable(f"{options.url} requires an API key: set --api-key or KVFERRY_API_KEY")
    try:
        answer.raise_for_status()
        return State.model_validate_json(answer.content)
    except (httpx.HTTPStatusError, ValidationError) as error:
        raise StateUnavailable(f"{options.url} is not a router of this version: status {answer.status_code}") from error


def run_top(options: TopOptions, *, once: bool, console: Console | None = None) -> int:
    """Show the cluster until a key quits; print one snapshot if `once`, or if the output is not a terminal.

    Raises Unseen if the first fetch fails."""
    console = console or Console()
    with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
        state = fetch(client, options)
        if once or not console.is_terminal:
            if not console.is_terminal and "COLUMNS" not in os.environ:
                console.width = PIPE_WIDTH
            console.print(render(state, console.width))
            return 0
        with keys() as pressed:
            _show(console, client, options, state, pressed)
    return 0


def _show(
    console: Console, client: httpx.Client, options: TopOptions, state: State, pressed: Callable[[float], bytes]
) -> None:
    """Draw the state every interval until a key quits; if the router does not answer, keep the last state."""
    problem, fetched_at = "", time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = render(state, console.width, console.height - 1, problem)
            live.update(shown, refresh=True)
            if QUIT_KEYS & {*pressed(options.interval)}:
                return
            try:
                state, problem, fetched_at = fetch(client, options), "", time.monotonic()
            except StateUnavailable as error:
                problem = f"as of {seconds(time.monotonic() - fetched_at)} ago: {error.message}"


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that waits for keys up to a number of seconds and returns those pressed.

    Keys arrive at once and are not echoed. If standard input is not a terminal, the function never returns a key."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(wait_s: float) -> bytes:
        ready, _, _ = select.select([terminal], [], [], wait_s)
        return (os.read(terminal, 64) or CLOSED) if ready else b""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_keys(wait_s: float) -> bytes:
    time.sleep(wait_s)
    return b""
