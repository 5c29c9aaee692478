"""Check that each relative link of the Markdown files leads to a file and, where it names one, to a heading.

`python -m docs.links` prints each broken link with its document and ends with status 1 if it finds any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")
EXTERNAL = re.compile(r"[a-z][a-z+.-]*:")


def documents() -> list[Path]:
    """List the Markdown files that Git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in found.stdout.split() if (path := ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, spelled as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Return the targets of a document's links, without those inside code."""
    return LINK.findall(CODE_SPAN.sub("``", FENCED.sub("", text)))


def broken(document: Path, text: str) -> list[str]:
    """Return the relative links of a document that lead nowhere."""
    wrong = []
    for link in links(text):
        if EXTERNAL.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


def main() -> int:
    """Print the broken links of all documents and return the exit status."""
    found = [(path, link) for path in documents() for link in broken(path, path.read_text())]
    for path, link in found:
        print(f"{path.relative_to(ROOT)}: the link {link} leads nowhere", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
