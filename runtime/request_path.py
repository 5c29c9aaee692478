"""HTTP path of a request, normalised, without the prefix that a reverse proxy adds (--root-path)."""

from __future__ import annotations

from starlette.types import Scope


class Root:
    """The path that a proxy shows in front of all others; empty: none."""

    def __init__(self, root_path: str) -> None:
        inner = root_path.strip("/")
        self._root = f"/{inner}" if inner else ""

    def local(self, scope: Scope) -> tuple[str, Scope]:
        """The path below the root, and the request's scope for anyone who answers: its path has the root in front,
        whether or not the proxy took it away, and no slash behind it, which is not worth a redirect that proxies may
        lead astray. HEAD is GET there: the server leaves out the body."""
        path: str = scope["path"]
        local = path.removeprefix(self._root) if self._root and path.startswith(f"{self._root}/") else path
        if local.endswith("/"):
            local = local.rstrip("/") or "/"
        if self._root:
            scope["root_path"] = self._root
        scope["path"] = self._root + local
        return local, {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
