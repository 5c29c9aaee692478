"""Figures as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from simulate.figures import Figures

Results = Mapping[str, Sequence[Figures]]
"""By workload."""

HEAD = (
    "workload",
    "policy",
    "TTFT p50 / p90 / p99 s",
    "ITL p50 / p99 ms",
    "goodput /s",
    "share",
    "hits",
    "imbalance",
    "x real",
)
COLOURS = ("#0b7a75", "#b0b7bf", "#8d99a6", "#6c7a89", "#d08c60", "#a26769", "#c9ada7")
WIDTH, LEFT, BAR, GAP, PANEL = 900, 110, 11, 34, 400


def table(results: Results) -> str:
    """Markdown."""
    rows = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for workload, found in results.items():
        best = max((each.goodput for each in found), default=0.0)
        rows += ["| " + " | ".join(_cells(workload, each, best)) + " |" for each in found]
    return "\n".join(rows) + "\n"


def _cells(workload: str, each: Figures, best: float) -> tuple[str, ...]:
    goodput = f"{each.goodput:.2f}"
    return (
        workload,
        each.policy,
        " / ".join(f"{value:.2f}" for value in each.ttft_s),
        f"{1000 * each.itl_s[0]:.1f} / {1000 * each.itl_s[2]:.1f}",
        f"**{goodput}**" if each.goodput >= best else goodput,
        f"{each.share:.0%}",
        f"{each.hit_rate:.0%}",
        f"{each.imbalance:.2f}",
        f"{each.virtual_s / max(each.real_s, 1e-9):.0f}",
    )


def goodputs(results: Results) -> str:
    """Markdown: a row for each workload, a column for each policy."""
    names = list(dict.fromkeys(each.policy for found in results.values() for each in found))
    rows = ["| workload | " + " | ".join(names) + " |", "|" + " --- |" * (1 + len(names))]
    for workload, found in results.items():
        known = {each.policy: each for each in found}
        best = max((each.goodput for each in found), default=0.0)
        cells = [f"{known[name].goodput:.2f}" if name in known else "" for name in names]
        marked = [f"**{cell}**" if name in known and known[name].goodput >= best else cell
                  for name, cell in zip(names, cells, strict=True)]  # fmt: skip
        rows.append("| " + " | ".join((workload, *marked)) + " |")
    return "\n".join(rows) + "\n"


def plot(results: Results) -> str:
    """SVG: per workload a bar of each policy's goodput, as a share of the best, and of its 99th percentile of TTFT, as
    a share of the worst."""
    height, parts = 30, []
    for workload, found in results.items():
        parts.append(_panel(workload, found, height))
        height += BAR * len(found) + GAP
    titles = (
        f'<text x="{LEFT}" y="18" font-weight="bold">goodput, requests/s</text>'
        f'<text x="{LEFT + PANEL + 20}" y="18" font-weight="bold">TTFT p99, s (less is better)</text>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="Policies side by side on each workload: goodput and time to first token" '
        'font-family="sans-serif" font-size="9">'
    )
    return "\n".join((head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', titles, *parts, "</svg>")) + "\n"


def _panel(workload: str, found: Sequence[Figures], top: int) -> str:
    best = max((each.goodput for each in found), default=0.0) or 1.0
    worst = max((each.ttft_s[2] for each in found), default=0.0) or 1.0
    lines = [f'<text x="4" y="{top + 12}" font-size="11">{escape(workload)}</text>']
    for number, each in enumerate(found):
        y, colour = top + 18 + BAR * number, COLOURS[number % len(COLOURS)]
        lines.append(f'<text x="{LEFT - 6}" y="{y + 8}" text-anchor="end">{escape(each.policy)}</text>')
        for left, share, shown in (
            (LEFT, each.goodput / best, f"{each.goodput:.2f}"),
            (LEFT + PANEL + 20, each.ttft_s[2] / worst, f"{each.ttft_s[2]:.2f}"),
        ):
            width = max(1.0, share * (PANEL - 60))
            lines.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            lines.append(f'<text x="{left + width + 4:.1f}" y="{y + 8}">{shown}</text>')
    return "\n".join(lines)
