"""Layout of the dashboard's transfer diagram: boxes of nodes (decode nodes at the right) and arrows between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from kvferry.router.dashboard.state import Node, Transfer

SIDE, ROW, BOX, GAP = 8, 54, (150, 38), 250
"""Largest number of nodes on one side, row height, box size, and gap between the sides; sizes in SVG units."""
ARROW_GAP, LABEL, ARROW_WIDTHS = 15, 80, (1.5, 8.0)
"""Distance of arrows at one box, width of a label, and smallest and largest width of an arrow, in SVG units."""
SIDE_MARGIN = 110
"""Margin for arrows between nodes of one role: at the left for prefill nodes, at the right for decode nodes."""
LEFT, RIGHT = -1, 1
"""Edges of a box."""


@dataclass(frozen=True, slots=True)
class Box:
    """Box of a node, by its upper left corner."""

    name: str
    told: str
    trouble: bool
    x: float
    y: float

    def at(self, edge: int) -> float:
        """Return the x position of an edge."""
        return self.x + (BOX[0] if edge == RIGHT else 0)


@dataclass(frozen=True, slots=True)
class Arrow:
    """Arrow from one box to another, with the position of its label."""

    transfer: Transfer
    path: str
    width: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Diagram of transfers; `left_out` is the number of omitted nodes."""

    width: float
    height: float
    boxes: list[Box]
    arrows: list[Arrow]
    left_out: int


@dataclass(frozen=True, slots=True)
class _Line:
    """A transfer with the boxes and edges where it begins and ends."""

    transfer: Transfer
    begins: tuple[str, int]
    ends: tuple[str, int]


def transfers(nodes: Sequence[Node], found: Sequence[Transfer]) -> Picture:
    """Lay out the diagram; if there are too many nodes, those with transfers take precedence."""
    busy = dict.fromkeys(name for each in found for name in (each.source, each.target))
    sides = [_side([node for node in nodes if (node.role == "decode") is decodes], busy) for decodes in (False, True)]
    column = {node.id: number for number, side in enumerate(sides) for node in side}
    lines = [_line(each, column) for each in found if {each.source, each.target} <= column.keys()]
    at: dict[tuple[str, int], int] = {}
    for end in (end for line in lines for end in (line.begins, line.ends)):
        at[end] = at.get(end, 0) + 1
    row_height = max(ROW, ARROW_GAP * max(at.values(), default=0) + 2 * ARROW_GAP)
    rows, margin = max(1, *map(len, sides)), [_margin(lines, column, number) for number in (0, 1)]
    boxes: dict[str, Box] = {}
    for number, side in enumerate(sides):
        above = (rows - len(side)) * row_height / 2
        for row, node in enumerate(side):
            y = above + row * row_height + (row_height - BOX[1]) / 2
            x = 1 + margin[0] + number * (BOX[0] + GAP)
            boxes[node.id] = Box(node.id, _load(node), bool(node.trouble), x, y)
    width = 2 * BOX[0] + GAP + 2 + sum(margin)
    left_out = len(nodes) - sum(map(len, sides))
    return Picture(width, rows * row_height, list(boxes.values()), _arrows(lines, boxes), left_out)


def _side(nodes: Sequence[Node], busy: Mapping[str, None]) -> list[Node]:
    first = sorted(nodes, key=lambda node: node.id not in busy)[:SIDE]
    return sorted(first, key=lambda node: node.id)


def _load(node: Node) -> str:
    waiting = f", {node.waiting} waiting" if node.waiting else ""
    return node.trouble or f"{node.running} running{waiting}"


def _line(each: Transfer, column: Mapping[str, int]) -> _Line:
    """Return the line of a transfer: across the middle, or outside if both nodes are in one column."""
    source, target = column[each.source], column[each.target]
    begins, ends = (RIGHT, LEFT) if source < target else (LEFT, RIGHT)
    if source == target:
        begins = ends = RIGHT if source else LEFT
    return _Line(each, (each.source, begins), (each.target, ends))


def _margin(lines: Sequence[_Line], column: Mapping[str, int], number: int) -> int:
    """Return the margin for arrows between nodes of column `number`."""
    pairs = [(column[line.transfer.source], column[line.transfer.target]) for line in lines]
    return SIDE_MARGIN if (number, number) in pairs else 0


def _arrows(lines: Sequence[_Line], boxes: Mapping[str, Box]) -> list[Arrow]:
    """Return the arrows, ordered at each edge by the position of their other ends, with labels at the targets."""
    most = max((line.transfer.bytes_per_s for line in lines), default=0.0)
    arrows = []
    for line in lines:
        y0, y1 = _height(line, line.begins, lines, boxes), _height(line, line.ends, lines, boxes)
        (source, begins), (target, ends) = line.begins, line.ends
        x0, x1 = boxes[source].at(begins) + 2 * begins, boxes[target].at(ends) + 9 * ends
        label_x = x1 + LABEL * ends
        bend_x = label_x if begins == ends else (x0 + label_x) / 2
        path = f"M{x0:.1f} {y0:.1f}C{bend_x:.1f} {y0:.1f} {bend_x:.1f} {y1:.1f} {label_x:.1f} {y1:.1f}H{x1:.1f}"
        width = ARROW_WIDTHS[0] + (ARROW_WIDTHS[1] - ARROW_WIDTHS[0]) * sqrt(
            line.transfer.bytes_per_s / most if most else 0
        )
        arrows.append(Arrow(line.transfer, path, round(width, 2), round(x1 + LABEL / 2 * ends, 1), round(y1, 1)))
    return arrows


def _height(line: _Line, end: tuple[str, int], lines: Sequence[_Line], boxes: Mapping[str, Box]) -> float:
    """Return the y position of a line's end among all lines at its edge."""
    others = [each for each in lines if end in (each.begins, each.ends)]

    def order(each: _Line) -> tuple[float, str, str]:
        other = each.ends if each.begins == end else each.begins
        return boxes[other[0]].y, each.transfer.kind, other[0]

    number = sorted(others, key=order).index(line)
    return boxes[end[0]].y + BOX[1] / 2 + (number - (len(others) - 1) / 2) * ARROW_GAP
