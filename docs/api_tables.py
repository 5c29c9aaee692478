"""Makes the reference tables of HTTP API, errors and wire version from the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from docs.markdown import markdown_table
from kvferry.protocol import errors, layout
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.version import VERSION
from kvferry.router.api.app import create_app
from kvferry.router.api.documentation import Application
from kvferry.router.api.served_models import ServedModels
from kvferry.router.dashboard.snapshot import SnapshotBuilder

_TREE_LINE = re.compile(r"^[│ ├└─]*(?P<name>[A-Z]\w+)\s+(?P<rest>\S.*)$")
_MEANING = re.compile(r"^(?:\d{3} \w+)?[ :]*\(?(?P<text>.*?)\)?$")


def openapi() -> dict[str, Any]:
    """Returns the OpenAPI description of a router; the routes need no model until a request arrives."""
    pools, board = cast(ServedModels, object()), cast(SnapshotBuilder, object())
    app = create_app(RouterSettings(), pools, RouterMetrics(), board=board)
    return cast(Application, vars(app)["_app"]).openapi()


def endpoints_table() -> str:
    """Returns a row for each method and path."""
    rows = [
        (f"`{method.upper()} {re.sub(r'{[^}]*}', '{id}', path)}`", operation.get("summary", ""), _statuses(operation))
        for path, methods in sorted(openapi()["paths"].items())
        for method, operation in methods.items()
    ]
    return markdown_table(("endpoint", "summary", "statuses"), rows)


def errors_table() -> str:
    """Returns a row for each error class, in the order of the tree."""
    meanings = dict(_meanings())
    rows = [
        (
            f"`{cls.code}`",
            str(cls.status),
            "yes" if cls.retryable else "no",
            f"`{cls.__name__}`",
            meanings[cls.__name__],
        )
        for cls in _classes(errors.KvferryError)
    ]
    return markdown_table(("code", "status", "a retry can help", "class", "meaning"), rows)


def wire_table() -> str:
    """Returns the versions and constants that processes of one cluster must share."""
    rows = [
        ("release", f"`{VERSION}`"),
        ("wire version", f"`{layout.WIRE_VERSION}`"),
        ("blocks in one object of a shared store", f"`{layout.STORE_GROUP}`"),
        ("number formats of a KV block", ", ".join(f"`{name}`" for name in layout.DTYPE_BYTES)),
        ("bytes of the scale behind each 8-bit vector", f"`{layout.SCALE_BYTES}`"),
    ]
    return markdown_table(("constant", "value"), rows)


def _statuses(operation: dict[str, Any]) -> str:
    return ", ".join(sorted(operation.get("responses", {})))


def _classes(cls: type[errors.KvferryError]) -> Iterator[type[errors.KvferryError]]:
    yield cls
    for each in cls.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _classes(each)


def _meanings() -> Iterator[tuple[str, str]]:
    """Yields each class's name with the remark that the module's docstring makes about it."""
    for line in (errors.__doc__ or "").splitlines():
        if found := _TREE_LINE.match(line):
            remark = _MEANING.match(found["rest"].strip())
            yield found["name"], remark["text"] if remark else ""
