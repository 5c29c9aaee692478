"""`kvferry health`: probes the kvferry process of this container, at the address in that process's own flags."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import click

from kvferry.cli.bootstrap import print_error
from kvferry.cli.options import flag
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.address import dialable, host_port

TIMEOUT_S = 4.0
"""Maximum time for the answer, in seconds."""


def ask(group: click.Group, pid: int, path: str) -> int:
    """Return exit status 0 if the process answers 200 at this path, else 1 after one line on stderr with the reason."""
    url = url_of(group, command_line(pid)) + path
    # The probe does not authenticate the server: certificates do not cover the loopback address.
    unchecked = ssl._create_unverified_context()  # noqa: S323
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=unchecked) as answer:  # noqa: S310 - url_of makes http and https
            answer.read()
        return 0
    except urllib.error.HTTPError as error:
        print_error(f"{url} answers {error.code}: {error.read(500).decode(errors='replace')}")
    except OSError as error:
        print_error(f"{url} does not answer: {getattr(error, 'reason', error)}")
    return 1


def command_line(pid: int) -> list[str]:
    """Return the arguments after `kvferry` in a process's command line, which may start with an init such as tini.

    Raises ConfigError if the process does not run kvferry."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError as error:
        raise ConfigError(f"cannot read the command line of process {pid}: {error.strerror}") from error
    for at, word in enumerate(arguments):
        if Path(word).name == "kvferry":
            return arguments[at + 1 :]
    raise ConfigError(f"process {pid} is not kvferry: {' '.join(arguments)}")


def url_of(group: click.Group, argv: Sequence[str]) -> str:
    """Return the URL at which this command line listens for HTTP, parsed as the command itself does."""
    command = group.commands[argv[0]]
    settings = command.make_context(argv[0], list(argv[1:])).params
    name = "metrics_port" if "metrics_port" in settings else "port"
    if not settings[name]:
        raise ConfigError(f"kvferry {argv[0]} listens on a port chosen by the kernel; set one with {flag(name)}")
    scheme = "https" if settings.get("ssl_certfile") and name == "port" else "http"
    return f"{scheme}://{host_port(dialable(settings['host']), settings[name])}"


def answers_health(host: str, port: int) -> bool:
    """Return whether a server at this address answers GET /health with 200."""
    import httpx

    try:
        return httpx.get(f"http://{host_port(host, port)}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
