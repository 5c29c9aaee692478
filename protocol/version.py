"""Version of the installed kvferry package."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("kvferry")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
