"""Formats durations, counts, rates and percentages for the dashboard and `kvferry top`."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """Format a duration with at most three digits in a suitable unit; a dash for None."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s" if rest else f"{minutes} m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(value: float) -> str:
    """Format a count, in thousands, millions or billions if large."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (value >= size and unit != "k"):
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"


def rate(bytes_per_s: float) -> str:
    """Format a rate in bytes per second."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def share(value: float | None) -> str:
    """Format a fraction as a percentage; a dash for None."""
    return "–" if value is None else f"{100 * value:.0f} %" if value in (0, 1) else f"{100 * value:.1f} %"


def named(value: str) -> str:
    """Return a name with unprintable characters replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
