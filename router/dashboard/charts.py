"""Geometry of the dashboard's charts: bars and stacked columns as numbers and SVG paths for the templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvferry.router.dashboard.state import Blocks, Counts

CHART, COLUMNS = (600.0, 120.0), 120
"""Width and height of a chart, and its largest number of points."""


@dataclass(frozen=True, slots=True)
class BarPart:
    """Part of a bar; `at` and `width` are in percent."""

    kind: str
    count: int
    at: float
    width: float


def bar(blocks: Blocks) -> list[BarPart]:
    """Return the bar of a block pool, blocks in use first.

    A node whose counts exceed its total gets a bar for the counted sum."""
    kinds = {"active": blocks.active, "granted": blocks.granted, "cached": blocks.cached, "free": blocks.free}
    scale = 100 / max(1, blocks.total, sum(kinds.values()))
    ends = accumulate(kinds.values())
    return [
        BarPart(kind, count, round((end - count) * scale, 2), round(count * scale, 2))
        for (kind, count), end in zip(kinds.items(), ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Series:
    """One kind of a stacked chart: the path of its columns, and their sum."""

    kind: str
    total: int
    path: str


def stacked(columns: Sequence[Mapping[str, int]]) -> tuple[list[Series], int]:
    """Return a stacked chart with the latest column at the right edge, and the highest column's sum."""
    columns = columns[-COLUMNS:]
    highest = max((sum(column.values()) for column in columns), default=0)
    width, height = CHART[0] / COLUMNS, CHART[1] / max(1, highest)
    kinds = list(dict.fromkeys(kind for column in columns for kind in column))
    paths, sums = {kind: "" for kind in kinds}, dict.fromkeys(kinds, 0)
    for number, column in enumerate(columns):
        x, below = CHART[0] - (len(columns) - number) * width, 0
        for kind in kinds:
            if tokens := column.get(kind, 0):
                top, bar_height = CHART[1] - (below + tokens) * height, tokens * height
                paths[kind] += f"M{x:.1f} {top:.1f}h{width:.1f}v{bar_height:.1f}h-{width:.1f}z"
                below, sums[kind] = below + tokens, sums[kind] + tokens
    return [Series(kind, sums[kind], paths[kind]) for kind in kinds], highest


def hit_line(points: Sequence[Counts]) -> str:
    """Return the hit rate as a path over a chart, for the points with prompts."""
    points, path, drawn = points[-COLUMNS:], "", False
    width = CHART[0] / COLUMNS
    for number, point in enumerate(points):
        if point.hit_rate is not None:
            x = CHART[0] - (len(points) - number - 0.5) * width
            path += f"{'L' if drawn else 'M'}{x:.1f} {CHART[1] * (1 - point.hit_rate):.1f}"
            drawn = True
    return path
