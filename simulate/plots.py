"""Markdown tables and an SVG plot of simulation results, as medians over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import median

from kvferry.simulate.compare import OURS
from kvferry.simulate.results import Figures, medians

Results = Mapping[str, Mapping[str, Sequence[Figures]]]
"""Results by workload, then by policy, one for each seed."""

HEAD = (
    "workload",
    "policy",
    "TTFT p50 / p90 / p99 s",
    "ITL p50 / p99 ms",
    "goodput /s",
    "share",
    "kept",
    "hits",
    "imbalance",
    "x real",
)
COLOURS = ("#0b7a75", "#c9d1d9", "#b3bdc7", "#9ca8b4", "#e0a070", "#b5838d", "#d8b4a0")
BACK, TEXT, GREY = "#f5f7f9", "#24292f", "#57606a"
WIDTH, LEFT, PANEL, BAR, PAD, TOP = 960, 112, 404, 14, 12, 40
"""Dimensions of the plot in pixels.

Total width, names, one column, a bar with its gap, padding around a workload, and the head."""


def table(results: Results) -> str:
    """Return a Markdown table with a row for each workload and policy."""
    rows = [_row(HEAD), _row(["---"] * len(HEAD))]
    for workload, found in results.items():
        middle = [medians(each) for each in found.values()]
        best = max(each.goodput for each in middle)
        rows += [_row(_cells(workload, each, best)) for each in middle]
    return "\n".join(rows) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(workload: str, each: Figures, best: float) -> tuple[str, ...]:
    return (
        workload,
        each.policy,
        " / ".join(f"{value:.2f}" for value in each.ttft_s),
        f"{1000 * each.itl_s[0]:.1f} / {1000 * each.itl_s[2]:.1f}",
        _marked(each.goodput, best),
        f"{each.share:.0%}",
        f"{each.kept:.1%}",
        f"{each.hit_rate:.0%}",
        f"{each.imbalance:.2f}",
        f"{each.virtual_s / max(each.real_s, 1e-9):.0f}",
    )


def _marked(goodput: float, best: float) -> str:
    return f"**{goodput:.2f}**" if goodput >= best else f"{goodput:.2f}"


def goodputs(results: Results) -> str:
    """Return a Markdown table of goodputs, with a row per workload and a column per policy.

    The last column compares kvferry with the best other policy."""
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    compared = OURS in names and len(names) > 1
    head = ["workload", *names, *(["of the best other"] if compared else [])]
    rows = [_row(head), _row(["---"] * len(head))]
    for workload, found in results.items():
        middle = {name: medians(each).goodput for name, each in found.items()}
        cells = [_marked(middle[name], max(middle.values())) for name in names]
        rows.append(_row([workload, *cells, *([_compared(found)] if compared else [])]))
    return "\n".join(rows) + "\n"


def _compared(found: Mapping[str, Sequence[Figures]]) -> str:
    """Return kvferry's goodput over the best other policy's, as median (min … max) of the seeds."""
    others = zip(*(each for name, each in found.items() if name != OURS), strict=True)
    best = [max(each.goodput for each in seed) for seed in others]
    ratios = [_ratio(each.goodput, other) for each, other in zip(found[OURS], best, strict=True)]
    return f"{median(ratios):.2f}" + (f" ({min(ratios):.2f} … {max(ratios):.2f})" if len(ratios) > 1 else "")


def _ratio(goodput: float, other: float) -> float:
    """Return the ratio; 1 if both are 0."""
    return goodput / other if other else math.inf if goodput else 1.0


def plot(results: Results) -> str:
    """Return an SVG with bars of each policy's goodput and 99th percentile of TTFT, per workload.

    Goodput is scaled to the best, TTFT to the worst. Lines over the bars span the range of all seeds."""
    parts, height = [], TOP
    for workload, found in results.items():
        parts.append(_panel(workload, found, height))
        height += BAR * len(found) + 3 * PAD
    titles = "".join(
        f'<text x="{_column_x(column)}" y="24" font-size="13" font-weight="bold">{title}</text>'
        for column, title in enumerate(("Goodput, requests/s", "TTFT, 99th percentile, s (less is better)"))
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="Policies side by side on each workload: goodput and time to first token" '
        f'font-family="sans-serif" font-size="10" fill="{TEXT}">'
    )
    return "\n".join((head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', titles, *parts, "</svg>")) + "\n"


def _column_x(column: int) -> int:
    return LEFT + column * (PANEL + 2 * PAD)


def _panel(workload: str, found: Mapping[str, Sequence[Figures]], top: int) -> str:
    tall = BAR * len(found) + 2 * PAD + 4
    lines = [
        f'<rect x="4" y="{top}" width="{WIDTH - 8}" height="{tall}" rx="6" fill="{BACK}"/>',
        f'<text x="{PAD}" y="{top + 15}" font-size="12" font-weight="bold">{escape(workload)}</text>',
    ]
    for number, name in enumerate(found):
        weight = ' font-weight="bold"' if name == OURS else f' fill="{GREY}"'
        y = top + 29 + BAR * number
        lines.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end"{weight}>{escape(name)}</text>')
    lines += _bars(_column_x(0), top + 20, [[each.goodput for each in seeds] for seeds in found.values()])
    lines += _bars(_column_x(1), top + 20, [[each.ttft_s[2] for each in seeds] for seeds in found.values()])
    return "\n".join(lines)


def _bars(left: int, top: int, values: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield one bar for each policy's values over the seeds, on a common scale."""
    scale = (PANEL - 48) / (max(map(max, values)) or 1.0)
    for number, seeds in enumerate(values):
        y, width = top + BAR * number, max(1.0, scale * median(seeds))
        colour = COLOURS[number % len(COLOURS)]
        yield f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR - 3}" rx="2" fill="{colour}"/>'
        least, most = scale * min(seeds), scale * max(seeds)
        if most > least:
            middle = y + (BAR - 3) / 2
            yield (
                f'<path d="M{left + least:.1f} {middle}H{left + most:.1f}M{left + least:.1f} {middle - 2.5}v5'
                f'M{left + most:.1f} {middle - 2.5}v5" stroke="{GREY}" fill="none"/>'
            )
        yield f'<text x="{left + max(width, most) + 5:.1f}" y="{y + 9}">{median(seeds):.2f}</text>'
