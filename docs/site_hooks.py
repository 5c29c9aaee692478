"""MkDocs hook: adds the Markdown files outside docs/ to the site and rewrites the links between them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "deploy/**/*.md")
"""Patterns of the pages outside docs/ that the site shows under repository/."""
FOLDER = "repository"
_LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^()\s]+)\)")
_EXTERNAL = re.compile(r"[a-z][a-z+.-]*:|#")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, f"{FOLDER}/{name}", content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points a page's links at the site's pages; a link to a file that the site lacks becomes its text."""
    uri = page.file.src_uri
    source = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"

    def moved(found: re.Match[str]) -> str:
        image, text, link = found.groups()
        if _EXTERNAL.match(link):
            return found[0]
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = target.removeprefix("docs/") if target.startswith("docs/") else f"{FOLDER}/{target}"
        if files.get_file_from_path(inside) is None:
            return str(text)
        relative = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(moved, markdown)
