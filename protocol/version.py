"""The version of the installed package, as every process reports it."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("kvferry")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
