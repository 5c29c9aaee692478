"""Normalisation of an HTTP request's path, under the prefix that a reverse proxy adds to it (--root-path)."""

from __future__ import annotations

from starlette.types import Scope


class Root:
    """Path prefix under which a reverse proxy exposes this server; empty: none."""

    def __init__(self, root_path: str) -> None:
        inner = root_path.strip("/")
        self._root = f"/{inner}" if inner else ""

    def local(self, scope: Scope) -> tuple[str, Scope]:
        """Return the path below the root, and the request's scope with a normalised path.

        The scope's path starts with the root, whether or not the proxy removed it, and has no trailing slash: proxies
        may mislead a redirect. The scope turns HEAD into GET, since the server omits the body of a HEAD itself."""
        path: str = scope["path"]
        local = path.removeprefix(self._root) if self._root and path.startswith(f"{self._root}/") else path
        if local.endswith("/"):
            local = local.rstrip("/") or "/"
        if self._root:
            scope["root_path"] = self._root
        scope["path"] = self._root + local
        return local, {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
