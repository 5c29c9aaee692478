"""Result rows of the GPU benchmark, each written as soon as its figure is known, and the table of all rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

WRONG = "wrong: "
"""Prefix of the figure of a wrong result, or of none."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    share: of the limit that `limit` names, measured in the same run; against: ratio to PyTorch's or the CPU's. None:
    there is no such comparison."""

    phase: str
    what: str
    figure: str
    share: float | None = None
    limit: str = ""
    against: float | None = None

    @property
    def failed(self) -> bool:
        """Return whether the row reports a failure."""
        return self.what == "not whole" or self.figure.startswith(WRONG)


class Rows:
    """Appends rows to a file of JSON lines; does nothing without a path."""

    def __init__(self, phase: str, path: Path | None) -> None:
        self._phase, self._path = phase, path

    def put(
        self, what: str, figure: str, share: float | None = None, limit: str = "", against: float | None = None
    ) -> None:
        row = Row(self._phase, what, figure, share, limit, against)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def wrong(self, what: str, error: BaseException | str) -> None:
        """Write a row for a failure: the error's kind and the beginning of its text, on one line."""
        text = error if isinstance(error, str) else f"{type(error).__name__} {error}"
        self.put(what, WRONG + " ".join(text.split())[:300].replace("|", "/"))


def read(path: Path) -> list[Row]:
    """Read the complete rows; a phase may have been killed in a line."""
    return list(_whole(path.read_text().splitlines())) if path.exists() else []


def _whole(lines: Iterable[str]) -> Iterator[Row]:
    for line in lines:
        try:
            yield Row(**json.loads(line))
        except (ValueError, TypeError):
            continue


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    lines = ["| phase | what | measured | of the limit | against |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        share = "" if row.share is None else f"{row.share:.0%} of {row.limit}"
        against = "" if row.against is None else f"{row.against:.2f} x"
        lines.append(f"| {row.phase} | {row.what} | {row.figure} | {share} | {against} |")
    return "\n".join(lines)
