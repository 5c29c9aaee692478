"""Turns a serving benchmark's samples into medians, goals with ratios, Markdown tables, JSON and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import FORMATS
from benchmarks.recurrent_shapes import SHAPES
from benchmarks.workloads import FIGURES, Figure

LIMIT = "limit"
COLUMNS, COLOURS = 3, {"kvferry": "tab:blue", "llama.cpp": "tab:orange", "vllm": "tab:green"}
"""Panels in a row of the plot; bar colours by engine."""


@dataclass(slots=True)
class Results:
    """Samples of a run.

    samples: by (subject, workload, figure), and of limits by (group, name); ceilings: tokens/s that the limits allow,
    by (group, workload)."""

    machine: dict[str, Any] = field(default_factory=dict)
    samples: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    limits: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    ceilings: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, subject: str, workload: str, figures: Mapping[str, float]) -> None:
        for figure, value in figures.items():
            self.samples[subject, workload, figure].append(value)

    def median(self, subject: str, workload: str, figure: str) -> float | None:
        values = self.samples.get((subject, workload, figure))
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal: a figure should be `least` times as good as `against`, another subject, the machine's limit, or a value."""

    subject: str
    workload: str
    figure: str
    against: str | float
    least: float


OURS, SPLIT, VLLM = "kvferry:bf16", "kvferry:bf16:1p1d", "vllm:bf16"
GOALS = (
    Goal(OURS, "single", "tokens_per_s", LIMIT, 0.8),
    *(
        Goal(f"kvferry:{name}", "single", "tokens_per_s", f"llama.cpp:{name}", 1.7 if name == "bf16" else 2)
        for name in FORMATS
    ),
    *(Goal(OURS, workload, "tokens_per_s", LIMIT, 0.7) for workload in ("prefill512", "prefill2048")),
    *(Goal(OURS, workload, "tokens_per_s", VLLM, 1.5) for workload in ("prefill512", "prefill2048")),
    *(
        Goal(f"kvferry:{name}", workload, "tokens_per_s", OURS, 1)
        for workload in ("prefill512", "prefill2048")
        for name in FORMATS
        if name != "bf16"
    ),
    *(
        Goal(f"kvferry:{name}", workload, "tokens_per_s", f"llama.cpp:{name}", least)
        for name in SHAPES
        for workload, least in (("single", 1.2), ("streams8", 2), ("prefill512", 2))
    ),
    Goal(OURS, "streams8", "tokens_per_s", VLLM, 2),
    Goal(OURS, "streams32", "tokens_per_s", VLLM, 1.6),
    Goal(OURS, "prefix8", "tokens_per_s", VLLM, 2),
    Goal(OURS, "prefix8", "first_ms", VLLM, 2),
    Goal(SPLIT, "interference", "p99_ms", OURS, 2),
    Goal(OURS, "start", "ready_s", 5.0, 1),
    Goal(OURS, "memory", "resident_gb", 1.2, 1),
)


def times_as_good(figure: Figure, value: float, other: float) -> float:
    return value / other if figure.rises else other / value


def reached(results: Results) -> Iterator[tuple[Goal, float, float, float]]:
    """Yield (goal, value, compared value, ratio) of goals whose two figures were measured."""
    for goal in GOALS:
        value = results.median(goal.subject, goal.workload, goal.figure)
        if isinstance(goal.against, float):
            other: float | None = goal.against
        elif goal.against == LIMIT:
            other = results.ceilings.get((goal.subject.split(":")[1], goal.workload))
        else:
            other = results.median(goal.against, goal.workload, goal.figure)
        if value and other:
            figure = FIGURES[goal.workload][goal.figure]
            yield goal, value, other, times_as_good(figure, value, other)


def number(value: float | None) -> str:
    """Return three significant digits without exponent; a dash for None."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with padded columns, readable in a terminal; the first column left, figures right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = [("-" * width) if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    cells.insert(1, rule)

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    return "\n".join(map(line, cells))


def goals_table(results: Results) -> str:
    rows = []
    for goal, value, other, ratio in reached(results):
        figure = FIGURES[goal.workload][goal.figure]
        against = goal.against if isinstance(goal.against, str) else "goal"
        shown = f"{100 * ratio:.0f} %" if goal.against == LIMIT else f"{ratio:.2f} x"
        least = f"{100 * goal.least:.0f} %" if goal.against == LIMIT else f"{goal.least:g} x"
        verdict = "yes" if ratio >= goal.least else "no"
        values = (f"{number(value)} {figure.unit}", f"{number(other)} ({against})")
        rows.append((figure.title, goal.subject, *values, shown, least, verdict))
    return markdown(("figure", "subject", "measured", "against", "times as good", "goal", "met"), rows)


def group_table(results: Results, group: str, subjects: Sequence[str]) -> str:
    """Return medians, lowest and highest of one group's subjects, under the machine's limits in the same rounds."""
    rows = []
    for workload, figures in FIGURES.items():
        for name, figure in figures.items():
            found = [results.samples.get((subject, workload, name), []) for subject in subjects]
            if any(found):
                ceiling = results.ceilings.get((group, workload)) if figure.unit == "tokens/s" else None
                rows.append((f"{figure.title}, {figure.unit}", *map(_spread, found), number(ceiling)))
    limits = [
        f"{name} {number(statistics.median(values))}" for (of, name), values in results.limits.items() if of == group
    ]
    head = f"{group}: {', '.join(limits) or 'limits not measured'}"
    return f"{head}\n\n{markdown(('median (lowest - highest)', *subjects, f'limit of {group}'), rows)}"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return number(values[0] if values else None)
    return f"{number(statistics.median(values))} ({number(min(values))} - {number(max(values))})"


def as_json(results: Results) -> str:
    """Return every sample, for other statistics."""
    document = {
        "machine": results.machine,
        "limits": {f"{group} {name}": values for (group, name), values in results.limits.items()},
        "ceilings": {" ".join(key): value for key, value in results.ceilings.items()},
        "samples": {" ".join(key): values for key, values in results.samples.items()},
        "goals": [
            {"figure": f"{g.subject} {g.workload} {g.figure}", "against": g.against, "ratio": ratio, "least": g.least}
            for g, _, _, ratio in reached(results)
        ],
    }
    return json.dumps(document, indent=1)


def plot(results: Results, path: Path) -> bool:
    """Draw a panel per workload of several subjects, a bar per subject, the ceiling of bf16 as a line.

    Return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    firsts = {workload: next(iter(figures.items())) for workload, figures in FIGURES.items()}
    shown = [w for w, (name, _) in firsts.items() if sum(key[1:] == (w, name) for key in results.samples) > 1]
    rows = max(1, math.ceil(len(shown) / COLUMNS))
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(16, 3.2 * rows))
    for axis, workload in zip(axes.flat, shown, strict=False):
        name, meaning = firsts[workload]
        subjects = [subject for subject, of, which in results.samples if (of, which) == (workload, name)]
        values = [results.median(subject, workload, name) or 0.0 for subject in subjects]
        axis.barh(subjects, values, color=[COLOURS[subject.split(":")[0]] for subject in subjects])
        axis.invert_yaxis()
        axis.set_title(f"{meaning.title}, {meaning.unit}{'' if meaning.rises else ' (less is better)'}", fontsize=8)
        axis.tick_params(labelsize=7)
        if ceiling := results.ceilings.get(("bf16", workload)):
            axis.axvline(ceiling, color="tab:red", linestyle=":", label="limit of bf16")
            axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(shown) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True
