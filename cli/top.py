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

from kvferry.cli.top_view import picture
from kvferry.protocol.errors import KvferryError
from kvferry.router.dashboard.state import State
from kvferry.router.dashboard.units import seconds

ANSWER_S = 5.0
LEAVING, GONE = frozenset(b"qQ\x03"), b"q"
"""Keys that quit, and the key that stands for a closed terminal."""
PIPE_WIDTH = 160
"""Width of the output if it is not a terminal, in columns."""


@dataclass(frozen=True, slots=True)
class Watching:
    """Target of `kvferry top`: a router's URL without /v1, its API key and the refresh interval."""

    url: str
    api_key: str
    interval: float


class Unseen(KvferryError):
    """The state of the cluster could not be fetched; the message says why."""


def fetch(client: httpx.Client, watching: Watching) -> State:
    """Fetch the current state from the router. Raises Unseen."""
    headers = {"authorization": f"Bearer {watching.api_key}"} if watching.api_key else {}
    try:
        answer = client.get(f"{watching.url.rstrip('/')}/dashboard/state", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise Unseen(f"no answer from {watching.url}: {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise Unseen(f"{watching.url} requires an API key: set --api-key or KVFERRY_API_KEY")
    try:
        answer.raise_for_status()
        return State.model_validate_json(answer.content)
    except (httpx.HTTPStatusError, ValidationError) as error:
        raise Unseen(f"{watching.url} is not a router of this version: status {answer.status_code}") from error


def run_top(watching: Watching, *, once: bool, console: Console | None = None) -> int:
    """Show the cluster until a key quits; print one snapshot if `once`, or if the output is not a terminal.

    Raises Unseen if the first fetch fails."""
    console = console or Console()
    with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
        state = fetch(client, watching)
        if once or not console.is_terminal:
            if not console.is_terminal and "COLUMNS" not in os.environ:
                console.width = PIPE_WIDTH
            console.print(picture(state, console.width))
            return 0
        with keys() as pressed:
            _show(console, client, watching, state, pressed)
    return 0


def _show(
    console: Console, client: httpx.Client, watching: Watching, state: State, pressed: Callable[[float], bytes]
) -> None:
    """Draw the state every interval until a key quits; if the router does not answer, keep the last state."""
    trouble, heard = "", time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = picture(state, console.width, console.height - 1, trouble)
            live.update(shown, refresh=True)
            if LEAVING & {*pressed(watching.interval)}:
                return
            try:
                state, trouble, heard = fetch(client, watching), "", time.monotonic()
            except Unseen as error:
                trouble = f"as of {seconds(time.monotonic() - heard)} ago: {error.message}"


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
        return (os.read(terminal, 64) or GONE) if ready else b""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_keys(wait_s: float) -> bytes:
    time.sleep(wait_s)
    return b""
