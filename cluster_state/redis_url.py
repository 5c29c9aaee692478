"""Parser of the Redis URL (one server, a socket, or Sentinels); it never shows a password.

It does not import the redis package.

redis://[user:password@]host[:port][/db]                          one server; rediss:// the same over TLS
unix://[user:password@]/path/of/socket[?db=0]                     one server
redis+sentinel://[user:password@]host[:port],…[/service[/db]]     the master that Sentinels name; rediss+sentinel://

Parameters follow a `?`: those in PARAMETERS, and for Sentinels `sentinel_username` and `sentinel_password`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from kvferry.protocol.errors import ConfigError

PORT, SENTINEL_PORT, SERVICE = 6379, 26379, "mymaster"
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def _yes(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError
    return text.lower() in ("true", "yes", "1")


def _verification(text: str) -> str:
    if text not in ("none", "optional", "required"):
        raise ValueError
    return text


def _database(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _protocol(text: str) -> int:
    if text not in ("2", "3"):
        raise ValueError
    return int(text)


def _client_name(text: str) -> str:
    """Return the client name, which servers restrict to visible ASCII characters."""
    if not all("!" <= letter <= "~" for letter in text):
        raise ValueError
    return text


PARAMETERS: dict[str, Callable[[str], Any]] = {
    "db": _database,
    "username": str,
    "password": str,
    "client_name": _client_name,
    "protocol": _protocol,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_cert_reqs": _verification,
    "ssl_check_hostname": _yes,
}
_CREDENTIALS = ("username", "password", "ssl_certfile", "ssl_keyfile", "ssl_password")
_SENTINELS_OWN = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Parsed Redis URL.

    shown         the URL without password and parameters, for logs and errors
    server        arguments of a connection to the server, as the redis package names them; without host and port if
                  Sentinels provide these
    sentinels     host and port of each Sentinel; empty without Sentinels
    sentinel      arguments of a connection to a Sentinel
    service       name of the master at the Sentinels
    tls           whether connections are encrypted
    """

    shown: str
    server: dict[str, Any] = field(repr=False)
    tls: bool = False
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel: dict[str, Any] = field(default_factory=dict, repr=False)
    service: str = ""


def shown(url: str) -> str:
    """Return the URL without password and parameters, even if it is invalid."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    location = re.split(r"[?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(location) :]:
        return f"{scheme}{separator}***"  # ambiguous: a ? or # in the password, or an @ in a parameter
    secret, at, location = location.rpartition("@")
    user = secret.partition(":")[0] if ":" in secret else ""
    return f"{scheme}{separator}{user + ':***@' if at else ''}{location}"


def has_password(url: str) -> bool:
    """Return whether the URL may contain a password."""
    return "@" in url or "password" in url.partition("?")[2]


def read(url: str) -> RedisUrl:
    """Return the parsed URL. Raises ConfigError, whose text contains no password."""
    try:
        parts = urlsplit(url)
        netloc, path = parts.netloc, unquote(parts.path)
    except ValueError:
        _refuse(url, "it is not a URL")
    given = _parameters(url, parts.query)
    user, _, location = netloc.rpartition("@")
    name, colon, password = user.partition(":")
    given |= {"username": unquote(name)} if name else {}
    given |= {"password": unquote(password)} if colon else {}
    if parts.fragment:
        _refuse(url, "write %23 for a # in the password")
    tls = parts.scheme.startswith("rediss")
    if not tls and (unknown := [each for each in given if each.startswith("ssl_")]):
        _refuse(url, f"{unknown[0]} needs rediss://")
    if tls:
        given.setdefault("ssl_check_hostname", given.get("ssl_cert_reqs", "required") == "required")
    if parts.scheme == "unix":
        if location or not path:
            _refuse(url, "it has the form unix:///path/of/socket")
        return RedisUrl(shown(url), given | {"path": path})
    if parts.scheme in ("redis", "rediss"):
        host, port = _host_port(url, location or "localhost", PORT)
        return RedisUrl(shown(url), _with_db(url, given, path[1:]) | {"host": host, "port": port}, tls)
    if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
        return _of_sentinels(url, given, location, path, tls)
    _refuse(url, "it must begin with redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel://")


def without_credentials(url: RedisUrl) -> RedisUrl:
    """Return the URL without credentials for the server; those for Sentinels, which only name it, stay."""
    return replace(url, server={name: value for name, value in url.server.items() if name not in _CREDENTIALS})


def _of_sentinels(url: str, given: dict[str, Any], location: str, path: str, tls: bool) -> RedisUrl:
    own = {name: given.pop(each) for each, name in _SENTINELS_OWN.items() if each in given}
    own |= {name: value for name, value in given.items() if name.startswith("ssl_")}
    if "@" in path:
        _refuse(url, "write %2F for a / in the password")
    service, _, db = path[1:].partition("/")
    sentinels = tuple(_host_port(url, each, SENTINEL_PORT) for each in location.split(",") if each)
    if not sentinels:
        _refuse(url, "it names no Sentinel")
    return RedisUrl(shown(url), _with_db(url, given, db), tls, sentinels, own, service or SERVICE)


def _parameters(url: str, query: str) -> dict[str, Any]:
    known = PARAMETERS | (dict.fromkeys(_SENTINELS_OWN, str) if "+sentinel://" in url else {})
    found = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            unknown = repr(name[:40]) if name.isidentifier() and "@" not in query else "the part after the ?"
            _refuse(url, f"{unknown} is not one of its parameters: {', '.join(known)}")
        try:
            found[name] = known[name](value)
        except ValueError:
            _refuse(url, f"{name} has an invalid value")
        if name in _FILES and not os.access(value, os.R_OK):
            _refuse(url, f"{name} names no readable file: {value}")
    return found


def _with_db(url: str, given: dict[str, Any], db: str) -> dict[str, Any]:
    if not db:
        return given
    if not db.isdecimal():
        _refuse(url, "after the last / comes the number of a database (write %2F for a / in the password)")
    return {"db": int(db)} | given


def _host_port(url: str, text: str, default: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(default)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        _refuse(url, "after the host come : and a port (in a password write %2F, %23 and %3F for /, # and ?)")
    return unquote(host.removeprefix("[").removesuffix("]")), int(port)


def _refuse(url: str, why: str) -> NoReturn:
    raise ConfigError(f"redis_url {shown(url)} cannot be read: {why}", param="redis_url")
